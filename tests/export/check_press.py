"""Checks the press on random PyTorch models; `tests/export/test_export.py` runs it where torch is.

python tests/export/check_press.py <exported policies: sequence, head, head with terms for 30 layers of 3, shared budgets,
shared budgets and hidden states, hidden states of another width>
"""

import importlib.util
import pathlib
import sys

import torch
import transformers

# The one file for PyTorch, alone: it has the name of the library that it imports.
_SPEC = importlib.util.spec_from_file_location(
    "dcache_press", pathlib.Path(__file__).resolve().parents[2] / "dcache" / "export" / "kvpress.py"
)
_PRESS = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = _PRESS
_SPEC.loader.exec_module(_PRESS)
DistillCachePress, ExportedPolicy, layer_statistics = (
    _PRESS.DistillCachePress,
    _PRESS.ExportedPolicy,
    _PRESS.layer_statistics,
)

TOKENS, LAYERS, HEADS, KV_HEADS, WIDTH = 150, 3, 6, 2, 8
CONFIGS = {
    "Llama": transformers.LlamaConfig, "Mistral": transformers.MistralConfig, "Qwen2": transformers.Qwen2Config,
    "Phi3": transformers.Phi3Config,
}  # fmt: skip


def make(kind: str, attention: str):
    torch.manual_seed(0)
    config = CONFIGS[kind](
        vocab_size=50, hidden_size=HEADS * WIDTH, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, pad_token_id=0, attn_implementation=attention, initializer_range=0.3,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def prefill(press, model, tokens):
    cache = transformers.DynamicCache()
    with torch.no_grad(), press(model):
        model.model(input_ids=tokens, past_key_values=cache)
    return cache


def refuses(part: str, function, *arguments) -> None:
    try:
        function(*arguments)
    except ValueError as error:
        assert part in str(error), error
    else:
        raise AssertionError(f"nothing was refused: {part}")


def check_statistics(path: str, tokens: torch.Tensor) -> None:
    """Attention taken again is what eager attention gives, on every architecture."""
    policy = ExportedPolicy(path)
    window, rows = policy.constants["window"], policy.constants["entropy_queries"]
    for kind in CONFIGS:
        taken = {}

        class Watch(DistillCachePress):
            def compress(self, module, hidden_states, keys, values, attentions, kwargs, taken=taken):
                taken[module.layer_idx] = attentions.clone()
                return super().compress(module, hidden_states, keys, values, attentions, kwargs)

            def _decide(self, tokens, taken=taken):
                for i, got in self._statistics.items():
                    want = taken[i]
                    torch.testing.assert_close(got.mass, want.sum(2), rtol=1e-4, atol=1e-5)
                    torch.testing.assert_close(got.last, want[:, :, -1], rtol=1e-4, atol=1e-6)
                    torch.testing.assert_close(got.window, want[:, :, -window:].sum(2), rtol=1e-4, atol=1e-5)
                    torch.testing.assert_close(got.rows, want[:, :, -rows:].mean(1), rtol=1e-4, atol=1e-6)
                super()._decide(tokens)

        prefill(Watch(path), make(kind, "eager"), tokens)
        assert len(taken) == LAYERS


def main(sequence: str, head: str, other: str, shared: str, reading: str, wider: str) -> None:
    tokens = torch.randint(0, 50, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    check_statistics(sequence, tokens)
    model, count = make("Llama", "sdpa"), 37  # a quarter of 150
    full = transformers.DynamicCache()
    with torch.no_grad():
        model.model(input_ids=tokens, past_key_values=full)

    for path in (sequence, head):
        press = DistillCachePress(path)
        cache = prefill(press, model, tokens)
        for i in range(LAYERS):
            keep = press.kept[:, None].expand(-1, KV_HEADS, -1) if path == sequence else press.kept[i]
            assert cache.layers[i].keys.shape == (2, KV_HEADS, count, WIDTH)
            for got, all_of_it in (
                (cache.layers[i].keys, full.layers[i].keys),
                (cache.layers[i].values, full.layers[i].values),
            ):
                torch.testing.assert_close(got, all_of_it[keep].reshape(2, KV_HEADS, count, WIDTH))

    press = DistillCachePress(shared)
    prefill(press, model, tokens)
    assert press.kept.sum((0, 2, 3)).eq(LAYERS * KV_HEADS * count).all() and press.kept.sum(3).ne(count).any()
    assert press.kept.sum(3).max() == int(1.2 * count)
    for i, layer in enumerate(model.model.layers):
        hidden = torch.zeros_like(press.kept[i])
        hidden[layer.self_attn.masked_key_indices] = True
        assert hidden.eq(~press.kept[i]).all()

    for path in (sequence, head, shared, reading):  # the sequences of a batch do not see each other
        both, alone = DistillCachePress(path), DistillCachePress(path)
        prefill(both, model, tokens)
        prefill(alone, model, tokens[1:])
        second = both.scores.narrow(-2 if path == sequence else 1, 1, 1)
        torch.testing.assert_close(alone.scores, second, rtol=1e-3, atol=1e-3)

    short = prefill(DistillCachePress(sequence), model, tokens[:, :40])
    assert short.layers[0].keys.shape[2] == 32  # never fewer
    statistics = [torch.randn(1, n, 5, WIDTH) for n in (HEADS, KV_HEADS, KV_HEADS)]
    assert layer_statistics(*statistics, ExportedPolicy(sequence), 1.0).last.shape == (
        1,
        HEADS,
        5,
    )  # shorter than a window

    refuses("learned terms for 30 layers of 3", prefill, DistillCachePress(other), model, tokens)
    refuses("attn_implementation='sdpa'", prefill, DistillCachePress(shared), make("Llama", "eager"), tokens)
    misfit = DistillCachePress(wider)
    misfit.policy.heads = ()  # the layers and heads are refused first
    refuses("hidden states of width 576; the model's have 48", prefill, misfit, model, tokens)
    refuses("compression_ratio is 1.0", DistillCachePress, sequence, 1.0)
    refuses("holds no exported policy", ExportedPolicy, "nowhere")
    windowed = make("Mistral", "sdpa")
    windowed.config.sliding_window = 100
    refuses("attention sees 100", prefill, DistillCachePress(sequence), windowed, tokens)


if __name__ == "__main__":
    main(*sys.argv[1:])
