"""Answers of kvpress to the prompts of a dcache benchmark run. Needs an environment of its own: see README.md here.

    python benchmarks/peers/kvpress_answers.py --model=DIR --prompts=prompts.jsonl --out=answers.jsonl

Greedy. The first token comes from the whole prompt, the others from the pruned cache, as in dcache; tokens that are withheld
from the policy are fed after the pruning. A stopped run goes on where it was. The first line of the output describes the run;
each other line holds one prompt's answers: {"name", "prompt": digest of its line, "arms": {method: {budget: answer}}}.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import sys
import time

import kvpress
import torch
import transformers

PRESSES = {
    "snapkv": kvpress.SnapKVPress,
    "tova": kvpress.TOVAPress,
    "keydiff": kvpress.KeyDiffPress,
    "observed_attention": kvpress.ObservedAttentionPress,
    "knorm": kvpress.KnormPress,
    "expected_attention": kvpress.ExpectedAttentionPress,
    "streaming_llm": kvpress.StreamingLLMPress,
}
MINIMUM = 32  # dcache keeps no fewer tokens than this


def make_press(name: str, budget: float, seen: int):
    """The press that keeps as many of the `seen` tokens as dcache does; None if that is all of them."""
    kept = min(max(int(budget * seen + 1e-9), MINIMUM), seen)
    if kept == seen:
        return None
    # kvpress rounds seen * (1 - ratio) down to what it keeps: half a token more, so that rounding errors change nothing.
    press = PRESSES[name](compression_ratio=1 - (kept + 0.5) / seen)
    if name == "snapkv":
        press.window_size = min(press.window_size, seen - 1)  # it refuses prompts that are no longer than its window
    return press


def step(model, cache, ids: list[int], position: int) -> int:
    """Feeds tokens at their true positions to a cache that may be pruned; the most likely next token."""
    # The mask follows the slots of the pruned cache, the rotary embedding the positions in the text.
    places = torch.arange(position, position + len(ids))[None]
    slots = cache.get_seq_length() + torch.arange(len(ids))
    out = model(
        input_ids=torch.tensor([ids]), past_key_values=cache, position_ids=places, cache_position=slots, logits_to_keep=1
    )  # fmt: skip
    return int(out.logits[0, -1].argmax())


def cut(text: str, stop: list[str]) -> tuple[str, bool]:
    """A text up to the first of the texts that end it, and whether there is one."""
    places = [at for at in (text.find(end) for end in stop if end) if at >= 0]
    return (text[: min(places)], True) if places else (text, False)


@torch.no_grad()
def answer(model, tokenizer, prompt: dict, press, ends: set[int]) -> dict:
    """The answer to one prompt; press None is the full cache."""
    start = time.perf_counter()
    tokens, hidden = prompt["tokens"], prompt["withheld"]
    shown = tokens[: len(tokens) - hidden]
    cache = transformers.DynamicCache()
    # What asks for attention weights gets them from eager attention alone, and for the prefill only.
    model.set_attn_implementation("eager" if isinstance(press, kvpress.ObservedAttentionPress) else "sdpa")
    with press(model) if press else contextlib.nullcontext():
        out = model(input_ids=torch.tensor([shown]), past_key_values=cache, logits_to_keep=1)
    model.set_attn_implementation("sdpa")
    token = int(out.logits[0, -1].argmax())
    if hidden:
        token = step(model, cache, tokens[len(shown) :], len(shown))
    found = [token]
    while True:
        text, stopped = cut(
            tokenizer.decode(
                [t for t in found if t not in ends], skip_special_tokens=True, clean_up_tokenization_spaces=False
            ),
            prompt["stop"],
        )
        ended = stopped or found[-1] in ends
        if ended or len(found) >= prompt["new_tokens"]:
            break
        found.append(step(model, cache, found[-1:], len(tokens) + len(found) - 1))
    seconds = round(time.perf_counter() - start, 3)
    return {"answer": text, "answer_tokens": len(found), "ended": ended, "seconds": seconds}


def end_tokens(model, tokenizer) -> set[int]:
    """All tokens that end an answer."""
    given = model.generation_config.eos_token_id
    ends = set(given if isinstance(given, list) else [given]) | {tokenizer.eos_token_id}
    return ends - {None}


def done_before(path: pathlib.Path, header: dict, digests: set[str]) -> set[str]:
    """The prompts that the output already answers; a line that a killed run left unfinished is cut off."""
    raw = path.read_bytes() if path.exists() else b""
    complete = raw[: raw.rfind(b"\n") + 1]
    if not complete:
        path.write_text(json.dumps(header) + "\n")
        return set()
    os.truncate(path, len(complete))
    first, *lines = map(json.loads, complete.splitlines())
    other = [line["name"] for line in lines if line["prompt"] not in digests]
    if first != header or other:
        sys.exit(f"{path} holds answers of another run or to other prompts; delete it, or give another --out.")
    return {line["prompt"] for line in lines}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--prompts", required=True, help="prompts.jsonl of a dcache benchmark run")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--presses", default=",".join(PRESSES))
    parser.add_argument("--budgets", default="0.5,0.25,0.125", help="shares of the cache that stay")
    parser.add_argument("--threads", type=int, default=None)
    chosen = parser.parse_args()
    presses, budgets = chosen.presses.split(","), [float(b) for b in chosen.budgets.split(",")]
    if unknown := sorted(set(presses) - set(PRESSES)):
        sys.exit(f"There is no press {unknown[0]!r}; known are {', '.join(PRESSES)}.")
    if not all(0.0 < b < 1.0 for b in budgets):
        sys.exit(f"The budgets are {chosen.budgets}; give shares between 0 and 1.")
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    lines = pathlib.Path(chosen.prompts).read_bytes().splitlines()
    prompts = {hashlib.sha256(line).hexdigest()[:16]: json.loads(line) for line in lines}
    header = {
        "settings": {"model": pathlib.Path(chosen.model).resolve().name, "dtype": "float32"},
        "software": {module.__name__: module.__version__ for module in (torch, transformers)}
        | {"kvpress": importlib.metadata.version("kvpress")},
        "arms": {"presses": presses, "budgets": budgets},
    }
    done = done_before(chosen.out, header, set(prompts))
    tokenizer = transformers.AutoTokenizer.from_pretrained(chosen.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        chosen.model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    ends = end_tokens(model, tokenizer)
    with open(chosen.out, "a", encoding="utf-8") as file:
        for number, (digest, prompt) in enumerate(prompts.items(), 1):
            if digest in done:
                continue
            seen = len(prompt["tokens"]) - prompt["withheld"]
            full = answer(model, tokenizer, prompt, None, ends)
            arms = {"kvpress-full": {"100%": full}}
            for name in presses:
                arms[f"kvpress-{name}"] = {
                    f"{100 * b:g}%": answer(model, tokenizer, prompt, make_press(name, b, seen), ends) for b in budgets
                }
            file.write(json.dumps({"name": prompt["name"], "prompt": digest, "arms": arms}) + "\n")
            file.flush()
            print(f"{number}/{len(prompts)} {prompt['name']}", file=sys.stderr)


if __name__ == "__main__":
    main()
