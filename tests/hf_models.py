"""Small Hugging Face directories with random weights, and the parameter tree that loading must make of them."""

import json

import jax
import numpy as np
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers

from dcache.tokenizer import CONTROL, NORMAL, byte_level_bpe

L, D, N, K, H, F, V = 3, 12, 6, 2, 4, 20, 264  # N * H differs from D, and no two sizes are equal


def hf_config(**changes):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": L,
        "hidden_size": D, "num_attention_heads": N, "num_key_value_heads": K, "head_dim": H, "intermediate_size": F,
        "vocab_size": V, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return config | changes


def hf_tensors(config, seed=0):
    """Random weights by their Hugging Face names: f32, matrices as [out, in]."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (D,)
        for name, rows in (("q", N * H), ("k", K * H), ("v", K * H)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (rows, D)
            if config["architectures"] == ["Qwen2ForCausalLM"]:
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (D, N * H)
        shapes[f"{layer}.mlp.gate_proj.weight"] = shapes[f"{layer}.mlp.up_proj.weight"] = (F, D)
        shapes[f"{layer}.mlp.down_proj.weight"] = (D, F)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def fuse(tensors):
    """The same weights with Phi-3's fused projections."""
    fused = dict(tensors)
    for i in range(L):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        fused[f"{attention}.qkv_proj.weight"] = np.concatenate(
            [fused.pop(f"{attention}.{name}_proj.weight") for name in "qkv"]
        )
        fused[f"{mlp}.gate_up_proj.weight"] = np.concatenate(
            [fused.pop(f"{mlp}.{name}_proj.weight") for name in ("gate", "up")]
        )
    return fused


def write_tokenizer(directory):
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    kinds = [CONTROL] * 3 + [NORMAL] * 256
    byte_level_bpe(tokens, kinds, [], "smollm", None).save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(directory, config, tensors, shards=1):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    where = {}
    for i, names in enumerate(np.array_split(sorted(tensors), shards)):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({str(name): tensors[name] for name in names}, directory / file)
        where |= {str(name): file for name in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return directory


def expected(tensors, config):
    """The parameter tree, written out from the definition: [out, in] -> [in, heads, head_dim] and so on."""

    def stacked(name):
        return np.stack([tensors[f"model.layers.{i}.{name}"] for i in range(L)])

    def heads(name, count):
        return stacked(f"self_attn.{name}_proj.weight").reshape(L, count, H, D).transpose(0, 3, 1, 2)

    layers = {
        "attn_norm": stacked("input_layernorm.weight"),
        "mlp_norm": stacked("post_attention_layernorm.weight"),
        "q": heads("q", N),
        "k": heads("k", K),
        "v": heads("v", K),
        "o": stacked("self_attn.o_proj.weight").reshape(L, D, N, H).transpose(0, 2, 3, 1),
        "gate": stacked("mlp.gate_proj.weight").swapaxes(1, 2),
        "up": stacked("mlp.up_proj.weight").swapaxes(1, 2),
        "down": stacked("mlp.down_proj.weight").swapaxes(1, 2),
    }
    if config["architectures"] == ["Qwen2ForCausalLM"]:
        layers |= {f"{n}_bias": stacked(f"self_attn.{n}_proj.bias").reshape(L, -1, H) for n in ("q", "k", "v")}
    tree = {"embed": tensors["model.embed_tokens.weight"], "layers": layers, "final_norm": tensors["model.norm.weight"]}
    return tree if config["tie_word_embeddings"] else tree | {"head": tensors["lm_head.weight"].T}


def check_equal(params, wanted):
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    for (path, value), other in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(wanted), strict=True):
        assert value.dtype == other.dtype, path
        np.testing.assert_array_equal(value, other, err_msg=str(path))


ARCHITECTURES = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "phi3": {"architectures": ["Phi3ForCausalLM"]},
}
