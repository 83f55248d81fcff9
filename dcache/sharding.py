"""Meshes, and where weights, caches and batches lie on them. The compiler inserts the communication (`jit`, Auto axes).

A mesh is made once (`make_mesh`), weights are put on it (`param_shardings`), and everything else runs inside `on(mesh)`, where
`constrain` pins the activations that decide the layout of a pass. Without a mesh nothing of this has an effect.

Several processes (hosts) run the same command and make one mesh of all their devices; each holds its own shards. They agree on
what cannot be seen in an array (whether to stop), and the first of them alone writes files.

`pmap` is not used: upstream it is only maintained.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dcache import cache as kv
from dcache import model
from dcache.axes import MESH_AXES, PRESETS, ShardingRules, constrain, parse, shards, spec
from dcache.config import ModelConfig
from dcache.errors import ConfigError

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


def join_processes() -> None:
    """Makes this process one of several, before anything is computed; nothing has to be said on Cloud TPU, SLURM or Kubernetes.

    Raises:
      ConfigError: there is no such environment, or the other processes cannot be reached.
    """
    try:
        jax.distributed.initialize()
        # They connect now, before one of them is busy with loading: some transports wait for 30 seconds only.
        wait_for_all("the start")
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"config.distributed is set, but the processes cannot find each other ({reason}); start the same command on every "
            "host of a TPU slice, with srun, or in a Kubernetes job, or leave config.distributed off on one machine."
        ) from error


def is_first_process() -> bool:
    """Whether this process is the one that writes files."""
    return jax.process_index() == 0


def wait_for_all(moment: str) -> None:
    """Returns when all processes have come to this moment of the run; at once if there is one."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(moment)


# What the transports, the coordination service and barriers say of a process that has gone.
_GONE = ("gloo", "nccl", "barrier", "heartbeat", "coordination service", "connection reset", "connection closed")


def lost_another(error: BaseException) -> bool:
    """Whether this failure of work that several processes do together means that another one has ended.

    A runtime says so itself, or a library does whose thread was waiting for the others at that moment: with an error of its
    own, in which only the transport's words tell.
    """
    if jax.process_count() == 1:
        return False
    links = [error]
    while (cause := links[-1].__cause__ or links[-1].__context__) is not None and cause not in links:
        links.append(cause)
    text = " ".join(map(str, links)).lower()
    if "resource_exhausted" in text or "no space left" in text:  # this process's own trouble
        return False
    return any(isinstance(link, (jax.errors.JaxRuntimeError, TimeoutError)) for link in links) or any(
        words in text for words in _GONE
    )


def anywhere(flag: bool) -> bool:
    """Whether the flag is set in any process."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


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
    "MESH_AXES", "PRESETS", "ShardingRules", "anywhere", "batch_sharding", "cache_shardings", "constrain", "is_first_process",
    "join_processes", "lost_another", "make_mesh", "mesh_of", "on", "on_its_mesh", "param_shardings", "parse", "replicated",
    "shards", "wait_for_all",
]  # fmt: skip
