"""Meshes, and where weights, caches and batches lie on them. The compiler inserts the communication (`jit`, Auto axes).

A mesh is made once (`make_mesh`), weights are put on it (`param_shardings`), and everything else runs inside `on(mesh)`, where
`constrain` pins the activations that decide the layout of a pass. Without a mesh nothing of this has an effect.

`pmap` is not used: upstream it is only maintained.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dcache import cache as kv
from dcache import model
from dcache.axes import MESH_AXES, PRESETS, ShardingRules, constrain, parse, shards, spec
from dcache.config import ModelConfig

F = TypeVar("F", bound=Callable[..., Any])


def make_mesh(rules: ShardingRules, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the axes `MESH_AXES` over all devices, or over these (of a described topology, for instance).

    Raises:
      ConfigError: the rules' sizes do not make up the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = rules.sizes(len(devices))
    count = 1 if set(sizes) == {1} else len(devices)
    return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes), devices=devices[:count])


def mesh_of(text: str) -> Mesh | None:
    """The mesh of a configuration's `sharding` (see `parse`) over all devices; None where one device is all that it has.

    Raises:
      ConfigError: the text cannot be read, or does not fit the devices.
    """
    mesh = make_mesh(parse(text))
    return None if mesh.size == 1 else mesh


def on(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """The context in which computations are laid out over a mesh; None for one device."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def on_its_mesh(function: F) -> F:
    """Lets a function whose first argument is a language model run on that model's mesh."""

    @functools.wraps(function)
    def wrapped(lm: Any, *args: Any, **kwargs: Any) -> Any:
        with on(lm.mesh):
            return function(lm, *args, **kwargs)

    return wrapped  # type: ignore[return-value]


def param_shardings(config: ModelConfig, rules: ShardingRules, mesh: Mesh) -> model.Params:
    """Where each weight lies, in the structure of `model.param_specs` (layers stacked)."""

    def place(weight: model.TensorSpec) -> NamedSharding:
        return NamedSharding(mesh, spec(weight.axes, weight.shape, rules.WEIGHTS, mesh.shape))

    return jax.tree.map(place, model.param_specs(config))


def cache_shardings(cache: Any, rules: ShardingRules, mesh: Mesh) -> Any:
    """Where each array of a cache lies, in its structure; cache: a `Cache` of arrays or of their shapes."""

    def place(letters: str, x: Any) -> NamedSharding:
        return NamedSharding(mesh, spec(letters, x.shape, rules.ACTIVATIONS, mesh.shape))

    return jax.tree.map(place, kv.axes(cache), cache)


def replicated(mesh: Mesh) -> NamedSharding:
    """Of what is small, whole on every device: a policy's weights and optimiser."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, rules: ShardingRules) -> NamedSharding:
    """Of arrays with a leading axis B that `data` times `fsdp` divides."""
    return NamedSharding(mesh, PartitionSpec(rules.ACTIVATIONS["B"]))


__all__ = [
    "MESH_AXES", "PRESETS", "ShardingRules", "batch_sharding", "cache_shardings", "constrain",
    "make_mesh", "mesh_of", "on", "on_its_mesh", "param_shardings", "parse", "replicated", "shards",
]  # fmt: skip
