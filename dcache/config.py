"""Frozen, hashable configurations: the one place where plain dictionaries become static arguments of jitted functions.

Axis legend of the whole project, used in every docstring and einsum:
B batch, T query time, S cache slot, N query heads, K key/value heads, G = N/K, H head dimension, D model width,
F feed-forward width (also: number of signals of a policy), L layer, V vocabulary, A keep-set samples.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dcache.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling of the rotary embedding (`rope_type: llama3` in `config.json`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a Llama-like decoder (Llama, Mistral, Qwen2, Phi-3/4).

    Attributes:
      num_layers: L. num_heads: N. num_kv_heads: K. head_dim: H. embed_dim: D. ffn_dim: F. vocab_size: V.
      max_positions: longest context, in tokens.
      norm_eps: epsilon of RMSNorm.
      rope_theta, rope_scaling: rotary embedding base, and Llama-3 scaling or None.
      tie_embeddings: the output matrix is the transposed embedding.
      qkv_bias: bias on the q, k and v projections (Qwen2).
      sliding_window: a query sees this many most recent positions (itself included), or None for all.
      dtype: "float32" or "bfloat16", of weights, activations and cache; softmax, norms and logits are float32.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    embed_dim: int
    ffn_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float = 1e-5
    rope_theta: float = 1e4
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    sliding_window: int | None = None
    dtype: str = "float32"

    def __post_init__(self):
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype is {self.dtype!r}; use 'float32' or 'bfloat16'.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly.")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary embeddings need an even number.")

    @property
    def group_size(self) -> int:
        """G, the query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token occupies in all layers."""
        itemsize = 4 if self.dtype == "float32" else 2
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], dtype: str = "float32") -> "ModelConfig":
        """Reads the contents of a Hugging Face `config.json` (transformers 4 and 5 spellings).

        Raises:
          ConfigError: unknown architecture, missing field, or a feature that this model does not have.
        """
        return _from_hf(hf, dtype)


_LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Phi3ForCausalLM")


def _from_hf(hf: Mapping[str, Any], dtype: str) -> ModelConfig:
    architectures = hf.get("architectures") or ["(none)"]
    if architectures[0] not in ARCHITECTURES:
        raise ConfigError(
            f"config.json names the architecture {architectures[0]!r}; supported are {', '.join(ARCHITECTURES)}."
        )
    if hf.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"config.json asks for the activation {hf['hidden_act']!r}; only SwiGLU ('silu') is built.")
    if hf.get("mlp_bias", False):
        raise ConfigError("config.json asks for biases in the feed-forward layers, which this model does not have.")
    required = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size")
    missing = [name for name in required if name not in hf]
    if missing:
        raise ConfigError(f"config.json lacks {', '.join(missing)}.")

    # transformers 5 moved rope_theta and rope_scaling into rope_parameters.
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = rope.get("rope_theta", hf.get("rope_theta", 1e4))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if float(rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ConfigError("config.json asks for partial rotary embeddings, which this model does not have.")
    if kind == "llama3":
        lacking = [f for f in _LLAMA3_ROPE if f not in rope]
        if lacking:
            raise ConfigError(f"config.json asks for llama3 RoPE scaling but lacks its {', '.join(lacking)}.")
        scaling = RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    elif kind == "default":
        scaling = None
    else:
        raise ConfigError(f"config.json asks for RoPE scaling of type {kind!r}; built are 'default' and 'llama3'.")

    qwen = architectures[0] == "Qwen2ForCausalLM"
    if not qwen and hf.get("attention_bias", False):
        raise ConfigError("config.json asks for a bias on the output projection, which this model does not have.")
    window = hf.get("sliding_window")
    if qwen and not hf.get("use_sliding_window", False):
        window = None  # Qwen2 configs state a window that they do not use.
    if qwen and window is not None:
        window = _qwen_window(int(window), hf)
    if window is not None and window >= hf.get("max_position_embeddings", 2048):
        window = None
    heads = int(hf["num_attention_heads"])
    return ModelConfig(
        num_layers=int(hf["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(hf.get("num_key_value_heads") or heads),
        head_dim=int(hf.get("head_dim") or hf["hidden_size"] // heads),
        embed_dim=int(hf["hidden_size"]),
        ffn_dim=int(hf["intermediate_size"]),
        vocab_size=int(hf["vocab_size"]),
        max_positions=int(hf.get("max_position_embeddings", 2048)),
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
        rope_scaling=scaling,
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=qwen,
        sliding_window=None if window is None else int(window),
        dtype=dtype,
    )


def _qwen_window(window: int, hf: Mapping[str, Any]) -> int | None:
    """Qwen2 applies its window to the layers from `max_window_layers` on; here all layers have it or none has."""
    layers = int(hf["num_hidden_layers"])
    types = hf.get("layer_types")
    first = int(hf.get("max_window_layers", 28))
    windowed = types.count("sliding_attention") if types else max(layers - first, 0)
    if windowed == 0:
        return None
    if windowed < layers:
        raise ConfigError(
            f"config.json gives a sliding window to {windowed} of {layers} layers; only all or none is built. "
            "Set use_sliding_window to false to read contexts shorter than the window."
        )
    return window


PRESETS: dict[str, ModelConfig] = {
    "smollm2": ModelConfig(
        num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, embed_dim=576, ffn_dim=1536, vocab_size=49152,
        max_positions=8192, norm_eps=1e-5, rope_theta=1e5, tie_embeddings=True,
    ),
    "mistral7b": ModelConfig(
        num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, embed_dim=4096, ffn_dim=14336, vocab_size=32768,
        max_positions=32768, norm_eps=1e-5, rope_theta=1e6, dtype="bfloat16",
    ),
    "llama3_8b": ModelConfig(
        num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, embed_dim=4096, ffn_dim=14336, vocab_size=128256,
        max_positions=8192, norm_eps=1e-5, rope_theta=5e5, dtype="bfloat16",
    ),
    "qwen2_5_7b": ModelConfig(
        num_layers=28, num_heads=28, num_kv_heads=4, head_dim=128, embed_dim=3584, ffn_dim=18944, vocab_size=152064,
        max_positions=32768, norm_eps=1e-6, rope_theta=1e6, qkv_bias=True, dtype="bfloat16",
    ),
    "tiny": ModelConfig(
        num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, embed_dim=32, ffn_dim=48, vocab_size=64,
        max_positions=131072, tie_embeddings=True,
    ),
}  # fmt: skip
"""Architectures by short name. "tiny" has random weights and serves the tests."""
