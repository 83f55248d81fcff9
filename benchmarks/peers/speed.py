"""The speed of transformers and kvpress, asked for by `launch/bench.py --peers=PYTHON`, which measures dcache in between.

Reads requests from its input, a JSON object a line, and answers each with a line of JSON, {"seconds": ...}:

  {"decode": STEPS, "batch": B, "slots": S}  one step of B sequences with a DynamicCache of S made-up tokens (at
                                             25% that is what a press leaves)
  {"prefill": T}                             a prompt of T tokens
  {"prefill": T, "press": 0.25}              the same under SnapKVPress, which leaves that share
"""

import argparse
import contextlib
import json
import sys
import time

import kvpress
import torch
import transformers


def cache_of(model, batch: int, slots: int) -> transformers.DynamicCache:
    """A cache that is filled with random keys and values."""
    config, cache = model.config, transformers.DynamicCache()
    shape = (batch, config.num_key_value_heads, slots, config.head_dim)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape, dtype=model.dtype), torch.randn(shape, dtype=model.dtype), layer)
    return cache


def decode(model, batch: int, slots: int, steps: int) -> float:
    """Seconds of one step."""
    cache, token = cache_of(model, batch, slots), torch.zeros((batch, 1), dtype=torch.long)
    model(input_ids=token, past_key_values=cache)
    start = time.perf_counter()
    for _ in range(steps):
        token = model(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(-1)
    return (time.perf_counter() - start) / steps


def prefill(model, length: int, kept: float | None) -> float:
    """Seconds of reading a prompt, its cache and the first token included."""
    tokens = torch.randint(2, model.config.vocab_size, (1, length))
    press = kvpress.SnapKVPress(compression_ratio=1 - kept) if kept else None
    start = time.perf_counter()
    with press(model) if press else contextlib.nullcontext():
        model(input_ids=tokens, past_key_values=transformers.DynamicCache(), logits_to_keep=1)
    return time.perf_counter() - start


@torch.no_grad()
def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--threads", type=int, required=True)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        chosen.model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    for line in sys.stdin:
        request = json.loads(line)
        if "decode" in request:
            seconds = decode(model, request["batch"], request["slots"], request["decode"])
        else:
            seconds = prefill(model, request["prefill"], request.get("press"))
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
