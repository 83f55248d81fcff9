"""TOVA: attention of the last query."""

import dataclasses

import jax.numpy as jnp

from dcache.attention import StatsRequest
from dcache.policies.base import Policy, recent, statistics


@dataclasses.dataclass(frozen=True)
class TOVA(Policy):
    """Attention of the last query, mean over all heads of the layer; the last token stays. Oren et al., arXiv 2401.06104."""

    name = "tova"
    summary = "attention of the last query, mean over the heads of a layer"
    paper = "arXiv 2401.06104"
    granularity = "layer"

    @property
    def needs(self):
        """Attention of the last query."""
        return StatsRequest(last=True)

    def scores(self, params, cache, key):
        """Mean over heads of the last query's attention."""
        del params, key
        return jnp.mean(statistics(cache, lambda stats: stats.last), axis=2)

    def protects(self, cache, budget):
        """The last token."""
        del budget
        return recent(cache, self.granularity, jnp.ones_like(cache.length))

    def protected_tokens(self, budget):
        """The last token."""
        del budget
        return 1
