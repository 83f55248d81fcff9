"""Makes smollm2_512_more.npz with kvpress (torch). Needs an environment of its own: `pip install torch kvpress==0.5.5`.

    python tests/golden/make_kvpress.py <directory of the default model> <output.npz>

The directory is what `dcache.load("smollm2")` made under its cache folder. The prompt is that of smollm2_512.npz.
"""

import pathlib
import sys

import numpy as np
import torch
import transformers
from kvpress import CriticalKVPress, KVzipPress, SnapKVPress

KEPT = 0.25


def main(directory: str, output: str) -> None:
    torch.manual_seed(0)
    given = np.load(pathlib.Path(__file__).with_name("smollm2_512.npz"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.eval()
    prompt = torch.tensor(given["input_ids"], dtype=torch.long)[None]
    continuation = torch.tensor(given["continuation_ids"], dtype=torch.long)[None]
    found: dict[str, np.ndarray] = {}

    class WholePrompt(KVzipPress):
        """Everything in the prompt is context, the opening of the chat template too."""

        def _perform_kvzip_compression(self, model, tokenizer):
            self.prefix_length = 0
            super()._perform_kvzip_compression(model, tokenizer)
            found["kvzip/scores"] = self.score_val[:, 0].numpy()

    class Critical(CriticalKVPress):
        """Notes the scores of all layers."""

        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            scores = super().score(module, hidden_states, keys, values, attentions, kwargs)
            layers.append(scores[0].numpy().copy())
            return scores

    layers: list[np.ndarray] = []
    presses = {
        "kvzip": WholePrompt(compression_ratio=1 - KEPT),
        "criticalkv": Critical(SnapKVPress(compression_ratio=1 - KEPT, window_size=64, kernel_size=5)),
    }

    def run(press) -> torch.Tensor:
        cache = transformers.DynamicCache()
        with torch.no_grad():
            if press is None:
                model(input_ids=prompt, past_key_values=cache)
            else:
                with press(model):
                    model.model(input_ids=prompt, past_key_values=cache)
            position = torch.arange(prompt.shape[1], prompt.shape[1] + continuation.shape[1])[None]
            # The mask follows the slots of the pruned cache, the rotary embedding the positions in the text.
            slot = cache.get_seq_length() + torch.arange(continuation.shape[1])
            out = model(input_ids=continuation, past_key_values=cache, position_ids=position, cache_position=slot)
        return torch.log_softmax(out.logits[0].double(), -1)

    full = run(None)
    np.testing.assert_allclose(
        (full - full[:, :1])[:, :2048],
        given["full_continuation_logits"] - given["full_continuation_logits"][:, :1],
        atol=1e-3,
    )
    for name, press in presses.items():
        pruned = run(press)
        found[f"{name}/kl"] = torch.sum(full.exp() * (full - pruned), -1).numpy()
        if name == "criticalkv":
            found["criticalkv/scores"] = np.stack(layers)
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None
    np.savez_compressed(output, **{k: v.astype(np.float32) for k, v in found.items()})
    print({k: (v.shape, float(v.mean())) for k, v in found.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
