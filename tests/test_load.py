"""Loading: Hugging Face directories of every layout give the same tree, and each kind of bad input its own message."""

import dataclasses
import json

import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import errors as hub_errors
from safetensors.numpy import save_file

from dcache.config import PRESETS
from dcache.errors import ConfigError, LoadError
from dcache.load import load, read_config, read_params
from dcache.model import TensorSpec, param_specs
from dcache.tokenizer import ByteTokenizer
from tests.hf_models import (
    ARCHITECTURES,
    D,
    H,
    K,
    check_equal,
    expected,
    fuse,
    hf_config,
    hf_tensors,
    write_model,
)


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
