"""The full cache: nothing is ever evicted."""

import dataclasses

import jax.numpy as jnp

from dcache.policies.base import Policy, slot_positions


@dataclasses.dataclass(frozen=True)
class Full(Policy):
    """Keeps every token, whatever the budget; the reference of all comparisons."""

    name = "full"
    summary = "keeps every token; the reference"
    paper = "-"

    def scores(self, params, cache, key):
        """All equal."""
        del params, key
        return jnp.zeros(slot_positions(cache, "sequence").shape, jnp.float32)

    def allowance(self, budget, seen):
        """Everything seen."""
        del budget
        return seen

    def most_kept(self, budget, seen, config):
        """Everything seen."""
        del budget, config
        return seen
