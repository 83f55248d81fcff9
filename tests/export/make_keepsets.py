"""What exported policies keep on a PyTorch model. Needs an environment of its own: `pip install torch kvpress==0.5.5`.

    python tests/export/make_keepsets.py <directory of the default model> <output.npz> <label>=<exported policy> ...

The directory is what `dcache.load("smollm2")` made under its cache folder; exported policies are folders of `launch/export.py`.
The prompt is that of tests/golden/smollm2_512.npz. Nothing of dcache is imported but the one file for PyTorch.
"""

import importlib.util
import pathlib
import sys

import numpy as np
import torch
import transformers

TESTS = pathlib.Path(__file__).resolve().parents[1]
# The one file for PyTorch, alone: it has the name of the library that it imports.
_SPEC = importlib.util.spec_from_file_location(
    "dcache_press", pathlib.Path(__file__).resolve().parents[2] / "dcache" / "export" / "kvpress.py"
)
_PRESS = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = _PRESS
_SPEC.loader.exec_module(_PRESS)
DistillCachePress = _PRESS.DistillCachePress

KEPT = 0.25


def main(directory: str, output: str, *policies: str) -> None:
    given = np.load(TESTS / "golden" / "smollm2_512.npz")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.eval()
    prompt = torch.tensor(given["input_ids"], dtype=torch.long)[None]
    continuation = torch.tensor(given["continuation_ids"], dtype=torch.long)[None]

    def run(press) -> torch.Tensor:
        cache = transformers.DynamicCache()
        with torch.no_grad():
            if press is None:
                model.model(input_ids=prompt, past_key_values=cache)
            else:
                with press(model):
                    model.model(input_ids=prompt, past_key_values=cache)
            position = torch.arange(prompt.shape[1], prompt.shape[1] + continuation.shape[1])[None]
            # The mask follows the slots of the pruned cache, the rotary embedding the positions in the text.
            slot = cache.get_seq_length() + torch.arange(continuation.shape[1])
            out = model(input_ids=continuation, past_key_values=cache, position_ids=position, cache_position=slot)
        return torch.log_softmax(out.logits[0].double(), -1)

    full, found = run(None), {}
    for label, path in (item.split("=", 1) for item in policies):
        press = DistillCachePress(path, compression_ratio=1 - KEPT)
        pruned = run(press)
        batch = 0 if press.scores.ndim == 2 else 1  # [B, S] or [L, B, K, S]
        found[f"{label}/scores"] = press.scores.select(batch, 0).numpy().astype(np.float32)
        found[f"{label}/kept"] = press.kept.select(batch, 0).numpy()
        found[f"{label}/kl"] = torch.sum(full.exp() * (full - pruned), -1).numpy().astype(np.float32)
    np.savez_compressed(output, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
