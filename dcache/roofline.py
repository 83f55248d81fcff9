"""What a chip can do at best, and how long a program's work takes there at least.

Roofline (Williams, Waterman & Patterson, 2009): no phase of a program (`dcache.hlo.phases`) is faster than its matrix products
at the peak rate, its bytes at the bandwidth of main memory, or its collectives at that of the links; the slowest of the
three bounds it. Overlap is perfect within a phase and nothing else costs anything: neither what is computed outside matrix
products nor the time that each collective takes to start. Real times are longer.
"""

import dataclasses
from collections.abc import Sequence

from dcache.errors import ConfigError
from dcache.hlo import Work


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU chip.

    Attributes:
      flops: peak operations per second, bfloat16. memory: bytes of main memory. bandwidth: its bytes per second.
      link: bytes per second that one link to a neighbour carries in one direction.
    """

    flops: float
    memory: float
    bandwidth: float
    link: float

    @property
    def ring(self) -> float:
        """Bytes per second that a chip sends in a ring: over one link to each of two neighbours."""
        return 2 * self.link


# https://docs.cloud.google.com/tpu/docs/v5e, .../v5p and .../v6e (read 2026-12). "Bidirectional ICI bandwidth per chip" counts
# both directions of all ports: 400 GB/s of 4 ports (v5e), 1,200 of 6 (v5p), 800 of 4 (v6e).
CHIPS: dict[str, Chip] = {
    "v5e": Chip(flops=197e12, memory=16e9, bandwidth=819e9, link=50e9),
    "v5p": Chip(flops=459e12, memory=95e9, bandwidth=2765e9, link=100e9),
    "v6e": Chip(flops=918e12, memory=32e9, bandwidth=1638e9, link=100e9),
}


def chip_of(topology: str) -> Chip:
    """The chip that a topology such as "v5e:2x4" is made of.

    Raises:
      ConfigError: it is none of `CHIPS`.
    """
    name = topology.partition(":")[0]
    if name not in CHIPS:
        raise ConfigError(
            f"The topology {topology!r} is of a chip that is not known here; use one of {', '.join(CHIPS)}, a colon and the "
            "slice's shape, such as 'v5e:2x4'."
        )
    return CHIPS[name]


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The least time that a program takes on a chip.

    Attributes:
      seconds: of its phases, one after the other. bound: what limits most of them: "compute", "memory" or "links".
      alone: seconds that each limit would allow if there were no other.
    """

    seconds: float
    bound: str
    alone: dict[str, float]


def roofline(phases: Sequence[Work], chip: Chip) -> Roofline:
    """Where the work of one chip hits the chip's limits."""
    alone, bounded = (
        dict.fromkeys(("compute", "memory", "links"), 0.0),
        dict.fromkeys(("compute", "memory", "links"), 0.0),
    )
    for work in phases:
        limits = {
            "compute": work.flops / chip.flops,
            "memory": work.bytes / chip.bandwidth,
            "links": sum(work.sent.values()) / chip.ring,
        }
        slowest = max(limits, key=limits.__getitem__)
        bounded[slowest] += limits[slowest]
        alone = {name: alone[name] + seconds for name, seconds in limits.items()}
    return Roofline(sum(bounded.values()), max(bounded, key=bounded.__getitem__), alone)


def chip_hours(seconds: float, steps: int, chips: int) -> float:
    """What `steps` steps of so many seconds cost on a slice of so many chips."""
    return seconds * steps * chips / 3600
