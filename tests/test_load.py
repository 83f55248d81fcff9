"""Loading: Hugging Face directories of every layout give the same tree, and each kind of bad input its own message."""

import contextlib
import dataclasses
import json
import tracemalloc
import types

import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors
from huggingface_hub import errors as hub_errors
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers

from dcache import sharding
from dcache.config import PRESETS
from dcache.errors import ConfigError, LoadError
from dcache.load import load, read_config, read_params
from dcache.model import TensorSpec, param_specs
from dcache.tokenizer import CONTROL, NORMAL, ByteTokenizer, byte_level_bpe

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


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("shards", [1, 3])
def test_directory(tmp_path, kind, shards):
    config = hf_config(**ARCHITECTURES[kind])
    tensors = hf_tensors(config)
    directory = write_model(tmp_path / "m", config, fuse(tensors) if kind == "phi3" else tensors, shards)
    lm = load(str(directory))
    check_equal(lm.params, expected(tensors, config))
    specs = param_specs(lm.config)
    shapes = jax.tree.map(lambda spec: spec.shape, specs, is_leaf=lambda x: isinstance(x, TensorSpec))
    assert jax.tree.map(lambda x: x.shape, lm.params) == shapes
    assert (lm.config.num_kv_heads, lm.config.dtype, lm.name) == (K, "float32", str(directory))
    np.testing.assert_array_equal(lm.tokenizer.encode("ab 1"), load(directory).tokenizer.encode("ab 1"))


class Reads:
    """Stands in for safetensors' files and notes what is read: (tensor, bytes)."""

    def __init__(self, monkeypatch):
        self.made, opened = [], safetensors.safe_open

        def spy(*args, **kwargs):
            file = opened(*args, **kwargs)
            return contextlib.nullcontext(
                types.SimpleNamespace(keys=file.keys, get_slice=lambda name: self.view(file, name))
            )

        monkeypatch.setattr(safetensors, "safe_open", spy)

    def view(self, file, name):
        inner, reads = file.get_slice(name), self

        class View:
            get_shape, get_dtype = inner.get_shape, inner.get_dtype

            def __getitem__(self, bounds):
                value = inner[bounds]
                reads.made.append((name, value.nbytes))
                return value

        return View()

    @property
    def total(self):
        return sum(size for _, size in self.made)


@pytest.mark.parametrize("kind", ["untied", "qwen2", "phi3"])
def test_weights_are_read_once_into_their_shards(tmp_path, monkeypatch, kind):
    config = hf_config(**ARCHITECTURES[kind])
    tensors = hf_tensors(config)
    directory = write_model(tmp_path / "m", config, fuse(tensors) if kind == "phi3" else tensors)
    reads = Reads(monkeypatch)
    lm = load(directory, sharding="data=2,fsdp=2,tensor=2")
    check_equal(lm.params, expected(tensors, config))
    rules = sharding.parse("data=2,fsdp=2,tensor=2")
    places = sharding.param_shardings(lm.config, rules, lm.mesh)
    jax.tree.map(lambda x, place: np.testing.assert_equal(x.sharding, place), lm.params, places)
    assert lm.params["layers"]["q"].addressable_shards[0].data.shape == (L, D // 2, N // 2, H)
    # Two of the eight devices hold the same part, which is read once.
    assert reads.total == sum(value.nbytes for value in tensors.values())
    # No tensor is read whole but those of a few numbers.
    assert all(size < tensors.get(name, np.zeros(V * D, np.float32)).nbytes for name, size in reads.made)


def test_a_host_reads_only_what_lies_on_its_devices(tmp_path, monkeypatch):
    config = hf_config()
    directory = write_model(tmp_path / "m", config, hf_tensors(config))
    rules, mesh = sharding.parse("tensor=2"), sharding.mesh_of("tensor=2")
    places = sharding.param_shardings(read_config(directory), rules, mesh)
    mine, shares = set(mesh.devices[:, :, 0].flat), []

    def of_one_host(shape, place, callback, dtype):
        indices = {device: index for device, index in place.devices_indices_map(shape).items() if device in mine}
        shares.append(next(iter([callback(index) for index in indices.values()])).nbytes)

    monkeypatch.setattr(jax, "make_array_from_callback", of_one_host)
    reads = Reads(monkeypatch)
    read_params(directory, read_config(directory), places)
    whole = sum(value.nbytes for value in hf_tensors(config).values())
    assert reads.total == sum(shares)
    assert 0.5 * whole < reads.total < 0.52 * whole  # norms are whole on each device


def test_memory_while_weights_are_read(tmp_path):
    """Beside the shards themselves, which lie on the host here: less than the largest tensor of all layers."""
    config = hf_config(hidden_size=128, intermediate_size=1024, vocab_size=4096, num_hidden_layers=4)
    rng, sizes = np.random.default_rng(0), {D: 128, F: 1024, V: 4096}
    tensors = {
        name: rng.standard_normal([sizes.get(size, size) for size in value.shape], np.float32)
        for name, value in hf_tensors(hf_config(num_hidden_layers=4)).items()
    }
    directory = write_model(tmp_path / "m", config, tensors)
    places = sharding.param_shardings(read_config(directory), sharding.parse("tensor=2"), sharding.mesh_of("tensor=2"))
    largest = 4 * 4 * 128 * 1024
    read_params(directory, read_config(directory), places)  # imports and caches are filled
    tracemalloc.start()
    read_params(directory, read_config(directory), places)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < sum(value.nbytes for value in tensors.values()) + largest


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes(tmp_path, stored, dtype):
    config = hf_config()
    tensors = {name: value.astype(stored) for name, value in hf_tensors(config).items()}
    directory = write_model(tmp_path / "m", config, tensors)
    params = read_params(directory, read_config(directory, dtype))
    check_equal(params, jax.tree.map(lambda x: x.astype(dtype), expected(tensors, config)))


def test_tied_head_and_old_buffers_are_ignored(tmp_path):
    config = hf_config(tie_word_embeddings=True)
    tensors = hf_tensors(config)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(H // 2, np.float32),
    }
    directory = write_model(tmp_path / "m", config, tensors | extra)
    check_equal(load(directory).params, expected(tensors, config))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiny(dtype):
    lm = load("tiny", dtype)
    assert lm.config == dataclasses.replace(PRESETS["tiny"], dtype=dtype)
    assert isinstance(lm.tokenizer, ByteTokenizer)
    assert lm.tokenizer.vocab_size == lm.config.vocab_size
    assert {str(x.dtype) for x in jax.tree.leaves(lm.params)} == {dtype}
    check_equal(lm.params, jax.tree.map(np.asarray, load("tiny", dtype).params))


# ---------------------------------------------------------------------------------------------------------------------
# Bad input. Each message names the place and says what to do.


def test_unknown_dtype():
    with pytest.raises(ConfigError, match="dtype is 'float16'; use 'float32' or 'bfloat16'"):
        load("tiny", "float16")


@pytest.mark.parametrize("name", ["", "smollm3", "./nowhere", "/nowhere/model", "a/b/c", "~/nowhere", "-x/y", "a b/c"])
def test_unknown_name(name):
    with pytest.raises(LoadError, match="is no known model: use 'smollm2', 'tiny', an existing directory"):
        load(name)


def test_preset_without_weights():
    with pytest.raises(LoadError, match="has no weights of its own; load 'mistralai/Mistral-7B-Instruct-v0.3'"):
        load("mistral7b")


def test_every_other_preset_names_a_hub_id():
    for name in PRESETS.keys() - {"smollm2", "tiny"}:
        with pytest.raises(LoadError, match=r"load '[\w.-]+/[\w.-]+'"):
            load(name)


def test_file_of_another_kind(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(LoadError, match="neither a directory nor a .gguf file"):
        load(tmp_path / "model.safetensors")


@pytest.fixture
def directory(tmp_path):
    config = hf_config()
    return write_model(tmp_path / "m", config, hf_tensors(config))


@pytest.fixture
def sharded(tmp_path):
    config = hf_config()
    return write_model(tmp_path / "m", config, hf_tensors(config), shards=3)


def test_no_config(directory):
    (directory / "config.json").unlink()
    with pytest.raises(LoadError, match="has no config.json; give the directory of a model"):
        load(directory)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"architectures"', "\xff"])
def test_damaged_config(directory, text):
    (directory / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(LoadError, match="fetch it again"):
        load(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": None},
        {"hidden_size": "wide"},
        {"num_key_value_heads": -0.5},
        {"rope_scaling": 7},
    ],
)
def test_malformed_config(directory, changes):
    (directory / "config.json").write_text(json.dumps(hf_config(**changes)))
    with pytest.raises(LoadError, match="missing or malformed value"):
        load(directory)


def test_incomplete_rope_scaling(directory):
    (directory / "config.json").write_text(json.dumps(hf_config(rope_scaling={"rope_type": "llama3", "factor": 8.0})))
    with pytest.raises(ConfigError, match="lacks its low_freq_factor, high_freq_factor"):
        load(directory)


def test_unknown_architecture(directory):
    (directory / "config.json").write_text(json.dumps(hf_config(architectures=["GPT2LMHeadModel"])))
    with pytest.raises(ConfigError, match="'GPT2LMHeadModel'; supported are"):
        load(directory)


def test_quantised(directory):
    (directory / "config.json").write_text(json.dumps(hf_config(quantization_config={"quant_method": "gptq"})))
    with pytest.raises(LoadError, match="quantised weights, which are not supported; use the unquantised model"):
        load(directory)


def test_missing_shard(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(LoadError, match="lacks the shard model-00002-of-00003.safetensors that its index names"):
        load(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_damaged_index(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(LoadError, match="fetch it again"):
        load(sharded)


def test_index_outside_the_directory(sharded):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../m/other.safetensors"}}))
    with pytest.raises(LoadError, match="outside its directory, which is refused"):
        load(sharded)


@pytest.mark.parametrize("keep", [0, 5, 8, 500, -1])
def test_truncated_safetensors(directory, keep):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(LoadError, match="model.safetensors is truncated or damaged .*; delete it and fetch it again"):
        load(directory)


def test_garbage_safetensors(directory):
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 10)
    with pytest.raises(LoadError, match="truncated or damaged"):
        load(directory)


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused(directory, pickle):
    (directory / "model.safetensors").rename(directory / pickle)
    with pytest.raises(LoadError, match="only as pickles, which can run code when read and are refused"):
        load(directory)


def test_no_weights(directory):
    (directory / "model.safetensors").rename(directory / "consolidated.safetensors")
    with pytest.raises(LoadError, match="neither model.safetensors nor model.safetensors.index.json"):
        load(directory)


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.layers.2.mlp.up_proj.weight"])
def test_missing_tensor(directory, name):
    tensors = hf_tensors(hf_config())
    del tensors[name]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(LoadError, match=f"lacks the tensor {name} "):
        load(directory)


def test_superfluous_tensor(directory):
    extra = {"model.layers.0.self_attn.o_proj.bias": np.ones(D, np.float32)}
    save_file(hf_tensors(hf_config()) | extra, directory / "model.safetensors")
    with pytest.raises(LoadError, match="has the tensor model.layers.0.self_attn.o_proj.bias .* has no place"):
        load(directory)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight"])
def test_wrong_shape(directory, name):
    tensors = hf_tensors(hf_config())
    good = tensors[name].shape
    tensors[name] = np.zeros(good[::-1], np.float32)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(LoadError) as caught:
        load(directory)
    assert f"{name} has the shape {good[::-1]}, but config.json asks for {good}" in str(caught.value)


def test_integer_weights(directory):
    tensors = hf_tensors(hf_config())
    tensors["model.norm.weight"] = np.ones(D, np.int8)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(LoadError, match="has the type I8; only F32, F16 and BF16"):
        load(directory)


def test_tokenizer_larger_than_the_model(directory):
    (directory / "config.json").write_text(json.dumps(hf_config(vocab_size=200)))
    with pytest.raises(LoadError, match="has 259 tokens but the model only 200"):
        load(directory)


# ---------------------------------------------------------------------------------------------------------------------
# The hub. Nothing here reaches the network.


def test_hub(directory, monkeypatch):
    asked = {}

    def snapshot_download(name, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    lm = load("owner/some-model_v0.3")
    check_equal(lm.params, expected(hf_tensors(hf_config()), hf_config()))
    assert (lm.name, asked["name"]) == ("owner/some-model_v0.3", "owner/some-model_v0.3")
    offered = [
        "config.json", "model.safetensors", "model-00001-of-00003.safetensors", "model.safetensors.index.json",
        "tokenizer.json", "tokenizer_config.json", "generation_config.json", "consolidated.safetensors",
        "pytorch_model.bin", "model.pt", "original/model.safetensors", "modeling_custom.py", "tokenizer.py",
    ]  # fmt: skip
    taken = list(huggingface_hub.utils.filter_repo_objects(offered, allow_patterns=asked["patterns"]))
    assert taken == offered[:7]


def raised_by_the_hub(kind):
    error = kind.__new__(kind)  # the constructors want an HTTP response
    Exception.__init__(error, "first line\nsecond line")
    return error


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (hub_errors.GatedRepoError, "is gated: accept its licence at https://huggingface.co/owner/model, then log in"),
        (hub_errors.RepositoryNotFoundError, "neither a local path nor a repository on the Hugging Face hub"),
        (hub_errors.LocalEntryNotFoundError, r"could not be fetched from the Hugging Face hub \(first line\)"),
        (ConnectionError, r"could not be fetched .* \(first line\); check the network and the free disk space"),
    ],
)
def test_hub_errors(monkeypatch, kind, message):
    def snapshot_download(name, allow_patterns):
        raise raised_by_the_hub(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(LoadError, match=message):
        load("owner/model")


def test_hub_offline(monkeypatch, tmp_path):
    # tests/conftest.py sets HF_HUB_OFFLINE, so that this is the hub's own answer.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(LoadError, match="'owner/model' is no local path and could not be fetched"):
        load("owner/model")
