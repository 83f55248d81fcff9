"""Meshes, and where weights, caches and batches lie on them. The compiler inserts the communication (`jit`, Auto axes).

A mesh is made once (`make_mesh`), weights are put on it (`param_shardings`), and everything else runs inside `on(mesh)`, where
`constrain` pins the activations that decide the layout of a pass. Without a mesh nothing of this has an effect.

`pmap` is not used: upstream it is only maintained.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dcache import cache as kv
from dcache import model
from dcache.attention import Segment
from dcache.axes import MESH_AXES, PRESETS, ShardingRules, constrain, parse, shards, spec
from dcache.config import ModelConfig


def make_mesh(rules: ShardingRules, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the axes `MESH_AXES` over all devices, or over these (of a described topology, for instance).

    Raises:
      ConfigError: the rules' sizes do not make up the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = rules.sizes(len(devices))
    count = 1 if set(sizes) == {1} else len(devices)
    return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes), devices=devices[:count])


def on(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """The context in which computations are laid out over a mesh; None for one device."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def param_shardings(config: ModelConfig, rules: ShardingRules, mesh: Mesh) -> model.Params:
    """Where each weight lies, in the structure of `model.param_specs` (layers stacked)."""

    def place(weight: model.TensorSpec) -> NamedSharding:
        return NamedSharding(mesh, spec(weight.axes, weight.shape, rules.WEIGHTS, mesh.shape))

    return jax.tree.map(place, model.param_specs(config))


def cache_axes(cache: kv.Cache) -> kv.Cache:
    """The logical axes of every array of a cache, in its structure: a leading L if its layers are stacked."""

    def layer(at: kv.LayerCache, lead: str) -> kv.LayerCache:
        # The tail behind a shared prompt is short: its slots are not split.
        own: Any = f"{lead}BK.H" if cache.prompt is not None else f"{lead}BKSH"
        slots: Any = f"{lead}BKS"
        return kv.LayerCache(own, own, slots, slots, jax.tree.map(lambda _: f"{lead}BNS", at.stats))

    unrolled = isinstance(cache.layers, tuple)
    shared: Any = "L.KSH"
    per_sequence: Any = "B"
    moments: Any = ("B", "BLNH", "BLN..", "B.")
    return kv.Cache(
        layers=tuple(layer(at, "") for at in cache.layers) if unrolled else layer(cache.layers, "L"),
        prompt=None if cache.prompt is None else Segment(shared, shared),
        length=per_sequence,
        rows=None if cache.rows is None else "B.S",
        row_entropy=None if cache.row_entropy is None else "B.",
        queries=None if cache.queries is None else kv.QueryMoments(*moments),
        hidden=None if cache.hidden is None else "BLSD",
    )


def cache_shardings(cache: Any, rules: ShardingRules, mesh: Mesh) -> Any:
    """Where each array of a cache lies, in its structure; cache: a `Cache` of arrays or of their shapes."""

    def place(letters: str, x: Any) -> NamedSharding:
        return NamedSharding(mesh, spec(letters, x.shape, rules.ACTIVATIONS, mesh.shape))

    return jax.tree.map(place, cache_axes(cache), cache)


def constrain_cache(cache: kv.Cache) -> kv.Cache:
    """`constrain` for every array of a cache."""
    return jax.tree.map(lambda letters, x: constrain(x, letters), cache_axes(cache), cache)


def batch_sharding(mesh: Mesh, rules: ShardingRules) -> NamedSharding:
    """Of arrays with a leading axis B that `data` times `fsdp` divides."""
    return NamedSharding(mesh, PartitionSpec(rules.ACTIVATIONS["B"]))


__all__ = [
    "MESH_AXES", "PRESETS", "ShardingRules", "batch_sharding", "cache_axes", "cache_shardings", "constrain",
    "constrain_cache", "make_mesh", "on", "param_shardings", "parse", "shards",
]  # fmt: skip
