"""Random eviction: the floor that every method must beat."""

import dataclasses

import jax

from dcache.policies.base import Policy, slot_positions


@dataclasses.dataclass(frozen=True)
class Random(Policy):
    """Uniform random scores, one per token of the sequence."""

    name = "random"
    summary = "uniform random scores; the floor"
    paper = "-"

    def scores(self, params, cache, key):
        """Uniform in [0, 1)."""
        del params
        return jax.random.uniform(key, slot_positions(cache, "sequence").shape)
