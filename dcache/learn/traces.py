"""Traces: what a frozen model's cache held and which of it was looked at later, kept on disk.

A method that learns from traces runs the language model once for each text, and never again. One trace is one file; they
are written one by one, whole or not at all, so a run that was stopped goes on where it was.
"""

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

from dcache import cache as kv
from dcache import model
from dcache.attention import EMPTY, Stats
from dcache.config import ModelConfig
from dcache.data.prompts import Prompt
from dcache.errors import ConfigError, LoadError
from dcache.load import LanguageModel
from dcache.workdir import atomic_write


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """One text as a model read it.

    Attributes:
      k, v: bf16[L, K, S, H], rotated keys and values, 0 after the end of the text.
      received: f16[L, K, Q, S], attention that each token received from each block of S / Q queries, summed over the queries.
        Each query counts with the largest attention among the query heads of the key/value head.
      length: tokens of the text. name, kind: of its prompt.
    """

    k: np.ndarray
    v: np.ndarray
    received: np.ndarray
    length: int
    name: str
    kind: str

    def importance(self, count: int) -> np.ndarray:
        """Attention that each of the first `count` tokens receives from the queries after them: f32[L, K, count].

        Args:
          count: a whole number of blocks.
        """
        block = self.k.shape[2] // self.received.shape[2]
        if count % block:
            raise ConfigError(f"The importance of {count} tokens is not known; give a multiple of the block, {block}.")
        return self.received[:, :, count // block :, :count].astype(np.float32).sum(2)


def record(params: model.Params, config: ModelConfig, tokens: Array, length: Array, block: int) -> tuple[Array, ...]:
    """Reads one text block by block, and adds up the attention of each block's queries.

    Args:
      params: stacked. tokens: int32[S], padded on the right, S a multiple of `block`. length: int32 scalar, real tokens.

    Returns:
      k, v bf16[L, K, S, H] and received f16[L, K, S / block, S], see `Trace`.
    """
    slots, heads = tokens.shape[0], config.num_kv_heads
    empty = jnp.zeros((config.num_layers, 1, heads, slots, config.head_dim), params["embed"].dtype)
    cache = kv.from_prompt(empty, empty, jnp.full((1, slots), EMPTY, jnp.int32), Stats(), None)

    def one(cache, xs):
        fed, start = xs
        real = start + jnp.arange(block, dtype=jnp.int32) < length

        def received(probs, position):
            del position
            grouped = probs.reshape(heads, config.group_size, block, slots)
            return jnp.sum(jnp.where(real[None, :, None], jnp.max(grouped, axis=1), 0.0), axis=1)

        _, cache, seen = model.extend_watched(params, config, fed[None], cache, start, received)
        return cache, seen

    starts = block * jnp.arange(slots // block, dtype=jnp.int32)
    cache, received = jax.lax.scan(one, cache, (tokens.reshape(-1, block), starts))
    there = (jnp.arange(slots) < length)[None, None, :, None]
    k, v = (jnp.where(there, x[:, 0], 0.0).astype(jnp.bfloat16) for x in (cache.layers.k, cache.layers.v))
    return k, v, received.transpose(1, 2, 0, 3).astype(jnp.float16)


_record = jax.jit(record, static_argnames=("config", "block"))


def path_of(folder: str | os.PathLike[str], number: int) -> Path:
    """The file of a trace."""
    return Path(folder) / f"{number:05d}.safetensors"


def collect(
    folder: str | os.PathLike[str], lm: LanguageModel, prompt_of: Callable[[int], Prompt], count: int, *,
    length: int, horizon: int, block: int, identity: Mapping[str, Any], stopped: Callable[[], bool] = lambda: False,
) -> bool:  # fmt: skip
    """Fills a folder with traces 0 to `count` - 1; those that are there stay.

    Args:
      prompt_of: the prompt of a trace, a pure function. Its text is the prompt and up to `horizon` tokens of its continuation.
      length: S, slots of a trace. block: queries whose attention is summed.
      identity: JSON values that decide what `prompt_of` gives; kept in each file, with the model and the sizes.
      stopped: asked before each text; if true, the folder is left incomplete.

    Returns:
      Whether all traces are there.

    Raises:
      LoadError: the folder holds traces of another model, other texts or other sizes, or damaged files.
      ConfigError: the text is not made of whole blocks. WorkdirError: a trace cannot be written.
    """
    if block < 1 or length % block:
        raise ConfigError(f"Traces of {length} tokens cannot be cut into blocks of {block}; give a length that can.")
    whole = _plain({**identity, "model": _model_identity(lm), "length": length, "horizon": horizon, "block": block})
    missing = []
    for number in range(count):
        path = path_of(folder, number)
        if path.exists():
            _check(path, _open(path)[0]["identity"], whole)
        else:
            missing.append(number)
    for number in _progress(missing, count):
        if stopped():
            return False
        prompt = prompt_of(number)
        text = np.concatenate([prompt.tokens, prompt.continuation[:horizon]])[:length]
        tokens = np.zeros(length, np.int32)
        tokens[: len(text)] = text
        k, v, received = jax.device_get(_record(lm.params, lm.config, tokens, np.int32(len(text)), block))
        about = {"identity": whole, "length": len(text), "name": prompt.name, "kind": prompt.kind}
        _write(path_of(folder, number), k, v, received, about)
    return True


def _write(path: Path, k: np.ndarray, v: np.ndarray, received: np.ndarray, about: Mapping[str, Any]) -> None:
    import safetensors.numpy

    # As whole numbers: not every reader of these files knows bfloat16.
    tensors = {"k": k.view(np.uint16), "v": v.view(np.uint16), "received": received}
    atomic_write(path, safetensors.numpy.save(tensors, metadata={"trace": json.dumps(about)}))


def read(path: str | os.PathLike[str]) -> Trace:
    """Reads one trace.

    Raises:
      LoadError: the file is missing or damaged.
    """
    about, tensors = _open(path, values=True)
    k, v = (tensors[name].view(ml_dtypes.bfloat16) for name in ("k", "v"))
    return Trace(k, v, tensors["received"], about["length"], about["name"], about["kind"])


def _open(path: str | os.PathLike[str], *, values: bool = False) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A file's description, and its tensors if asked for."""
    import safetensors

    try:
        with safetensors.safe_open(path, framework="np") as handle:
            about = json.loads((handle.metadata() or {})["trace"])
            return about, {name: handle.get_tensor(name) for name in handle.keys()} if values else {}
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise LoadError(f"{str(path)!r} is no trace, or damaged ({error}); delete it, and collect again.") from error


def _check(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    differing = sorted(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))
    if differing:
        told = ", ".join(
            f"{name} ({_short(found.get(name))} there, {_short(wanted.get(name))} here)" for name in differing
        )
        raise LoadError(
            f"{str(path)!r} is a trace that differs in {told}; use another folder for these traces, or delete those."
        )


def _short(value: Any) -> str:
    return (
        str(value["name"]) + " " + str(value["weights"])
        if isinstance(value, dict) and "weights" in value
        else repr(value)
    )


def _model_identity(lm: LanguageModel) -> dict[str, Any]:
    """Name, shape, precision, and a digest of a few weights: a name may stand for another model tomorrow."""
    few = (lm.params["final_norm"], lm.params["layers"]["q"][0, 0])
    digest = hashlib.blake2b(digest_size=8)
    for weight in few:
        digest.update(np.asarray(weight.astype(jnp.float32)).tobytes())
    return {"name": lm.name, **dataclasses.asdict(lm.config), "weights": digest.hexdigest()}


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(value, default=str))


def _progress(missing: list[int], count: int) -> Any:
    """The numbers of the missing traces, with a progress bar if there are any."""
    from tqdm import tqdm

    interval = 0.2 if sys.stderr.isatty() else 30.0
    shown = {"total": count, "initial": count - len(missing), "desc": "traces", "unit": "text"}
    return tqdm(missing, mininterval=interval, smoothing=0.0, disable=not missing, **shown)
