"""Ahead-of-time compilation, so that no timing contains a compilation and each shape is compiled once."""

import functools
import time
from collections.abc import Hashable
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding


@functools.lru_cache(maxsize=64)
def _compiled(jitted: Any, static: Hashable, tree: Any, shapes: tuple) -> Any:
    return jitted.lower(static, *jax.tree.unflatten(tree, shapes)).compile()


def compiled(jitted: Any, static: Hashable, *args: Any) -> tuple[Any, float]:
    """The executable of a jitted function for arguments of these shapes, and the seconds that it took to get it.

    Args:
      jitted: a `jax.jit`ted function whose first argument is static. static: that argument.
    """
    began = time.perf_counter()
    leaves, tree = jax.tree.flatten(args)
    found = _compiled(jitted, static, tree, tuple(map(_shape, leaves)))
    return found, time.perf_counter() - began


def _shape(x: Array) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, and its place if it lies on a mesh."""
    place = x.sharding if isinstance(x.sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
