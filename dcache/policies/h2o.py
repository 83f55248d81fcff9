"""H2O: heavy hitters of accumulated attention, and recent tokens."""

import dataclasses

import jax.numpy as jnp

from dcache.attention import StatsRequest
from dcache.errors import ConfigError
from dcache.policies.base import Policy, averaged, check_granularity, per_kv_head, recent, statistics
from dcache.signals import Granularity


@dataclasses.dataclass(frozen=True)
class H2O(Policy):
    """Attention received, accumulated over all queries so far; half of the budget is for recent tokens.

    Zhang et al., arXiv 2306.14048. The sum of an evicted token is dropped. Under grouped-query attention the score of a
    key/value head is the mean over its query heads.

    Attributes:
      recent_share: share of the budget that goes to the most recent tokens.
      granularity: "head", or "layer" or "sequence" to average the scores over heads (and layers).
    """

    name = "h2o"
    summary = "attention accumulated over all queries, half of the budget for recent tokens"
    paper = "arXiv 2306.14048"

    recent_share: float = 0.5
    granularity: Granularity = "head"  # type: ignore[misc]

    def __post_init__(self):
        check_granularity(self)
        if not 0.0 <= self.recent_share <= 1.0:
            raise ConfigError(f"h2o: recent_share is {self.recent_share}; give a share in [0, 1].")

    @property
    def needs(self):
        """Accumulated attention."""
        return StatsRequest(mass=True)

    def scores(self, params, cache, key):
        """Accumulated attention mass."""
        del params, key
        return averaged(per_kv_head(statistics(cache, lambda stats: stats.mass), cache), self.granularity)

    def protects(self, cache, budget):
        """The most recent `recent_share` of the budget."""
        count = jnp.floor(self.recent_share * budget.astype(jnp.float32)).astype(jnp.int32)
        return recent(cache, self.granularity, count)
