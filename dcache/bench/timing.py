"""Timing of calls, and what the machine can do at best: the rate at which it copies memory and multiplies matrices."""

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcache.load import LanguageModel

Numbers = dict[str, float]


def interleaved(calls: dict[str, Callable[[], Any]], repeats: int) -> Numbers:
    """Median seconds of each call; all are warmed up first, then run in turn `repeats` times."""
    for call in calls.values():
        jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def random_prompt(lm: LanguageModel, length: int, seed: int = 0) -> np.ndarray:
    """int32[length] of random ids; costs do not depend on what a text says."""
    return np.random.default_rng(seed).integers(2, lm.config.vocab_size, length).astype(np.int32)


class Copying:
    """A call that reads and writes `nbytes` of memory each, in place; `rate` turns its seconds into bytes per second.

    As in the STREAM benchmark (McCalpin, 1995) bytes read and bytes written count, and the array must be four times as large as
    the last cache (servers have 260 MiB and more). It is reused, because a new one would be paid for page by page.
    """

    def __init__(self, nbytes: int = 2**30):
        self._nbytes = nbytes
        self._array = jnp.zeros(nbytes // 4, jnp.float32)
        self._add = jax.jit(lambda x: x + 1.0, donate_argnums=0)

    def __call__(self) -> jax.Array:
        """The array, of which every number has been read and written once."""
        self._array = self._add(self._array)
        return self._array

    def rate(self, seconds: float) -> float:
        """Bytes per second."""
        return 2 * self._nbytes / seconds


class Reading:
    """A call that reads `nbytes` of memory and writes next to nothing: a square matrix times a vector.

    That is what a decode step does with weights, keys and values. Copying moves more bytes per second than reading where cores
    write without waiting, so a step cannot reach all of the copy bandwidth.
    """

    def __init__(self, nbytes: int = 2**30):
        side = math.isqrt(nbytes // 4)
        self._nbytes = 4 * side**2
        self._args = jnp.zeros((side, side), jnp.float32), jnp.zeros(side, jnp.float32)
        self._product = jax.jit(jnp.matmul)

    def __call__(self) -> jax.Array:
        """The product."""
        return self._product(*self._args)

    def rate(self, seconds: float) -> float:
        """Bytes per second."""
        return self._nbytes / seconds


def machine(repeats: int = 5, size: int = 2048, nbytes: int = 2**30) -> Numbers:
    """Bandwidths of copying and of reading in bytes per second, and operations per second of a product of square matrices."""
    copying, reading = Copying(nbytes), Reading(nbytes)
    product = jax.jit(jnp.matmul)
    matrices = {dtype: jnp.ones((size, size), dtype) for dtype in ("float32", "bfloat16")}
    products = {dtype: functools.partial(product, x, x) for dtype, x in matrices.items()}
    seconds = interleaved({"copy": copying, "read": reading, **products}, repeats)
    return {
        "machine.copy_bandwidth": copying.rate(seconds["copy"]),
        "machine.read_bandwidth": reading.rate(seconds["read"]),
        "machine.matrix_rate": 2 * size**3 / seconds["float32"],
        "machine.matrix_rate_bf16": 2 * size**3 / seconds["bfloat16"],
    }
