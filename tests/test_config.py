"""Reading of config.json: the spellings of transformers 4 and 5, the families that are supported, refusals."""

import dataclasses

import pytest

from dcache.config import PRESETS, ModelConfig, RopeScaling
from dcache.errors import ConfigError

LLAMA3 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
MISTRAL_V03 = {
    "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32768,
}  # fmt: skip
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
PHI4 = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 5120,
    "intermediate_size": 17920, "max_position_embeddings": 16384, "model_type": "phi3", "num_attention_heads": 40,
    "num_hidden_layers": 40, "num_key_value_heads": 10, "original_max_position_embeddings": 16384,
    "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 250000,
    "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 100352,
}  # fmt: skip
LLAMA31_ROPE = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip


def as_transformers5(hf):
    """The same file as transformers 5 writes it: all that concerns RoPE lies in `rope_parameters`."""
    rope = {"rope_type": "default"} | (hf.get("rope_scaling") or {}) | {"rope_theta": hf["rope_theta"]}
    new = {k: v for k, v in hf.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    return new | {"rope_parameters": rope, "dtype": "bfloat16"}


@pytest.mark.parametrize("spelling", [dict, as_transformers5])
@pytest.mark.parametrize("hf, preset", [(LLAMA3, "llama3_8b"), (MISTRAL_V03, "mistral7b"), (QWEN25, "qwen2_5_7b")])
def test_presets(hf, preset, spelling):
    assert ModelConfig.from_hf(spelling(hf), "bfloat16") == PRESETS[preset]


@pytest.mark.parametrize("spelling", [dict, as_transformers5])
def test_phi4(spelling):
    assert ModelConfig.from_hf(spelling(PHI4)) == ModelConfig(
        num_layers=40, num_heads=40, num_kv_heads=10, head_dim=128, embed_dim=5120, ffn_dim=17920, vocab_size=100352,
        max_positions=16384, norm_eps=1e-5, rope_theta=250000.0,
    )  # fmt: skip


@pytest.mark.parametrize("spelling", [dict, as_transformers5])
def test_llama31_scaling(spelling):
    hf = LLAMA3 | {"rope_scaling": LLAMA31_ROPE, "max_position_embeddings": 131072}
    config = ModelConfig.from_hf(spelling(hf))
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    assert config.rope_theta == 500000.0 and config.max_positions == 131072


def test_older_spelling_of_the_scaling_type():
    old = {("type" if k == "rope_type" else k): v for k, v in LLAMA31_ROPE.items()}
    assert ModelConfig.from_hf(LLAMA3 | {"rope_scaling": old}).rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)


def test_optional_fields():
    minimal = {k: LLAMA3[k] for k in ("architectures", "num_hidden_layers", "num_attention_heads", "hidden_size",
                                      "intermediate_size", "vocab_size")}  # fmt: skip
    config = ModelConfig.from_hf(minimal)
    # The defaults of transformers' LlamaConfig.
    assert (config.num_kv_heads, config.head_dim, config.max_positions) == (32, 128, 2048)
    assert (config.norm_eps, config.rope_theta, config.tie_embeddings) == (1e-6, 1e4, False)
    assert ModelConfig.from_hf(LLAMA3 | {"head_dim": 96}).head_dim == 96
    assert ModelConfig.from_hf(LLAMA3 | {"head_dim": None, "num_key_value_heads": None}).num_kv_heads == 32
    assert ModelConfig.from_hf(LLAMA3 | {"tie_word_embeddings": True}).tie_embeddings


def test_sliding_window():
    assert ModelConfig.from_hf(MISTRAL_V03 | {"sliding_window": 4096}).sliding_window == 4096  # Mistral v0.1
    # A window of the whole context is none.
    assert ModelConfig.from_hf(MISTRAL_V03 | {"sliding_window": 32768}).sliding_window is None
    # Qwen2 states a window that it does not use.
    assert ModelConfig.from_hf(QWEN25 | {"sliding_window": 4096}).sliding_window is None
    everywhere = QWEN25 | {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0}
    assert ModelConfig.from_hf(everywhere).sliding_window == 4096


def test_sliding_window_of_some_layers_is_refused():
    # Qwen2: only layers from `max_window_layers` on have the window. Applying it to all would be silently wrong.
    some = QWEN25 | {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 14}
    with pytest.raises(ConfigError, match="window"):
        ModelConfig.from_hf(some)
    # transformers 5 says it layer by layer.
    kinds = ["full_attention"] * 14 + ["sliding_attention"] * 14
    with pytest.raises(ConfigError, match="window|layer_types"):
        ModelConfig.from_hf(some | {"layer_types": kinds})


def test_window_that_starts_after_the_last_layer_is_none():
    none = QWEN25 | {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28}
    assert ModelConfig.from_hf(none).sliding_window is None


@pytest.mark.parametrize(
    "change, says",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "none"),
        ({"architectures": []}, "none"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "feed-forward"),
        ({"attention_bias": True}, "output projection"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"partial_rotary_factor": 0.75}, "partial rotary"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
        ({"num_key_value_heads": 5}, "5"),
        ({"head_dim": 127}, "127"),
    ],
)
def test_refusals(change, says):
    with pytest.raises(ConfigError, match=says):
        ModelConfig.from_hf(LLAMA3 | change)


@pytest.mark.parametrize(
    "name", ["num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size"]
)
def test_missing_fields_are_named(name):
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_hf({k: v for k, v in LLAMA3.items() if k != name})


def test_incomplete_scaling_is_a_config_error():
    rope = {k: v for k, v in LLAMA31_ROPE.items() if k != "low_freq_factor"}
    with pytest.raises(ConfigError, match="low_freq_factor"):
        ModelConfig.from_hf(LLAMA3 | {"rope_scaling": rope})


def test_dtype():
    assert ModelConfig.from_hf(LLAMA3).dtype == "float32"
    with pytest.raises(ConfigError, match="float16"):
        ModelConfig.from_hf(LLAMA3, "float16")


def test_derived_numbers():
    config = PRESETS["mistral7b"]
    assert config.group_size == 4
    assert config.kv_bytes_per_token() == 2 * 32 * 8 * 128 * 2  # 128 KiB
    assert dataclasses.replace(config, dtype="float32").kv_bytes_per_token() == 2 * 32 * 8 * 128 * 4


def test_frozen_and_hashable():
    assert hash(PRESETS["tiny"]) == hash(dataclasses.replace(PRESETS["tiny"]))
    assert len(set(PRESETS.values())) == len(PRESETS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["tiny"].num_layers = 3
