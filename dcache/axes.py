"""Logical axes of tensors -> axes of a device mesh: the rules, and `constrain`, which model code may call anywhere.

Nothing here needs a model, so every module may import it. What is made from the rules is in `dcache.sharding`.

Axis legend: B batch, T query time, S cache slot, N query heads, K key/value heads, H head dimension, D model width,
F feed-forward width, L layer, V vocabulary, A keep-set samples.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import jax
from jax import Array
from jax.sharding import AxisType, PartitionSpec

from dcache.errors import ConfigError

MESH_AXES = ("data", "fsdp", "tensor", "sequence")
"""Axes of every mesh, the slowest first: neighbours on the last ones talk most and should be near each other."""


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """How many devices each mesh axis has, and which logical axis lies on which.

    Prompts and keep-set samples lie on `data` and `fsdp`, the model on `tensor`, the slots of keys and values on `sequence`.
    Weights are also split along D over `fsdp`, and gathered layer by layer. A logical axis that its mesh axes do not divide
    stays whole: where `tensor` does not divide the key/value heads, each of its devices holds those of the cache whole.

    Attributes:
      data: devices, or -1 for all that the others leave. fsdp, tensor, sequence: devices.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1

    WEIGHTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "D": ("fsdp",), "N": ("tensor",), "K": ("tensor",), "F": ("tensor",), "V": ("tensor",),
    }  # fmt: skip
    ACTIVATIONS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "B": ("data", "fsdp"), "A": ("data", "fsdp"), "N": ("tensor",), "K": ("tensor",), "F": ("tensor",),
        "V": ("tensor",), "S": ("sequence",),
    }  # fmt: skip

    def __post_init__(self):
        for name in MESH_AXES:
            size = getattr(self, name)
            if size < 1 and not (name == "data" and size == -1):
                raise ConfigError(f"The mesh axis {name!r} has the size {size}; give 1 or more, or -1 for data alone.")

    def sizes(self, devices: int) -> tuple[int, ...]:
        """Devices of each of `MESH_AXES` on a machine with so many.

        Raises:
          ConfigError: they do not make up all devices (but one alone may be taken of many).
        """
        rest = self.fsdp * self.tensor * self.sequence
        data = devices // rest if self.data == -1 else self.data
        if data * rest not in (1, devices) or data == 0:
            raise ConfigError(
                f"The mesh {self.text()} does not fit {devices} devices; the product of its sizes must be their number, and "
                "data=-1 takes what the others leave."
            )
        return data, self.fsdp, self.tensor, self.sequence

    def text(self) -> str:
        """As `parse` reads it: "data=-1,fsdp=1,tensor=4,sequence=1"."""
        return ",".join(f"{name}={getattr(self, name)}" for name in MESH_AXES)


PRESETS: dict[str, ShardingRules] = {
    "none": ShardingRules(data=1),
    "v5e-8": ShardingRules(tensor=8),
    "v5p-8": ShardingRules(tensor=4),
    "v6e-8": ShardingRules(tensor=4),
    "gpu-80gb": ShardingRules(),
    "gpu-8": ShardingRules(tensor=4),
}
"""Meshes by the accelerator's name. A student's step is nothing but reading weights and cache, so `tensor` is as large as
the key/value heads of the 7B and 8B models allow where memory is scarce (v5e: 16 GB a chip); v5p-8 names 8 cores, 4 chips."""


def parse(text: str) -> ShardingRules:
    """The rules of a preset's name, or of sizes such as "data=2,tensor=4" (data takes the rest if it is not given).

    Raises:
      ConfigError: it is neither.
    """
    if text in PRESETS:
        return PRESETS[text]
    pairs = [part.partition("=") for part in text.split(",")]
    sizes = {name.strip(): value.strip() for name, _, value in pairs}
    numbers = all(value.lstrip("-").isdecimal() for value in sizes.values())
    if not numbers or len(sizes) < len(pairs) or not set(sizes) <= set(MESH_AXES):
        raise ConfigError(
            f"sharding is {text!r}; use one of {', '.join(PRESETS)}, or sizes of the mesh axes {', '.join(MESH_AXES)} such as "
            "'data=2,tensor=4'."
        )
    return ShardingRules(**{name: int(value) for name, value in sizes.items()})


def spec(
    letters: str, shape: tuple[int, ...], table: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]
) -> PartitionSpec:  # fmt: skip
    """Where a tensor's axes lie; letters without an entry in the table, such as ".", are not split.

    Args:
      letters: one for each axis. table: of `ShardingRules`. sizes: devices of each mesh axis that may be used.
    """
    used: set[str] = set()
    places = []
    for letter, size in zip(letters, shape, strict=True):
        names = [name for name in table.get(letter, ()) if sizes.get(name, 1) > 1 and name not in used]
        while names and size % math.prod(sizes[name] for name in names):
            names.pop()
        used.update(names)
        places.append(tuple(names) if len(names) > 1 else names[0] if names else None)
    return PartitionSpec(*places)


def open_sizes() -> dict[str, int]:
    """Axes of the current mesh that the compiler shards along, with their sizes; none without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return {n: mesh.shape[n] for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto}


def platform() -> str:
    """The kind of device to compute for: "cpu", "gpu" or "tpu", of the current mesh or else of this machine.

    The devices of a mesh may be those of a described topology, which nobody has here.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def shards(name: str) -> int:
    """Devices of one axis of the current mesh, 1 without a mesh."""
    return open_sizes().get(name, 1)


def constrain(x: Array, letters: str) -> Array:
    """Lays an activation out over the current mesh as its logical axes say; without a mesh it is returned as it is."""
    sizes = open_sizes()
    if all(size == 1 for size in sizes.values()):
        return x
    return jax.lax.with_sharding_constraint(x, spec(letters, x.shape, ShardingRules.ACTIVATIONS, sizes))
