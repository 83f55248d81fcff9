"""CriticalKV: what a token's value does to the output, on top of another method's attention scores."""

import dataclasses

import jax.numpy as jnp

from dcache import budget as budgets
from dcache import signals
from dcache.attention import StatsRequest
from dcache.errors import ConfigError
from dcache.policies.base import per_kv_head, statistics
from dcache.policies.wrapper import Wrapper, check_head_level


@dataclasses.dataclass(frozen=True)
class CriticalKV(Wrapper):
    """Two stages: part of the budget by another method's scores, the rest by those times the size of what a token adds.

    The size is the L1 norm of the value after the output projection, mean over the query heads of a key/value head. Feng et
    al., arXiv 2502.03805. Around `adakv` it is the paper's second variant: budgets of the heads from the plain scores.

    Attributes:
      base: whose scores are used (SnapKV, as in the paper).
      first_share: share of each head's tokens that the first stage chooses. epsilon: added to the scores in the second.
    """

    name = "criticalkv"
    summary = "another policy's scores (SnapKV's) times the size of the projected value"
    paper = "arXiv 2502.03805"
    ranks = False

    first_share: float = 0.5
    epsilon: float = 1e-4

    def __post_init__(self):
        super().__post_init__()
        check_head_level(self)
        if not 0.0 <= self.first_share <= 1.0 or self.epsilon < 0.0:
            raise ConfigError(
                f"criticalkv: first_share is {self.first_share} and epsilon {self.epsilon}; give a share in [0, 1] and an "
                "epsilon of 0 or more."
            )

    @property
    def needs(self):
        """What the policy inside needs, and the projected values."""
        return self.base.needs | StatsRequest(projected=True)

    def scores(self, params, cache, key):
        """Those of the second stage."""
        return self._weighted(self.base.scores(params, cache, key), cache)

    def scores_at(self, params, cache, budget, key):
        """Those of the second stage."""
        return self._weighted(self.base.scores_at(params, cache, budget, key), cache)

    def _weighted(self, scores, cache):
        return (scores + self.epsilon) * per_kv_head(statistics(cache, lambda stats: stats.projected), cache)

    def decide(self, params, cache, budget, key, protected=None):
        """Both stages."""
        first = self.base.scores_at(params, cache, budget, key).astype(jnp.float32)
        filled = signals.filled(cache, "head")
        protected = self.protects(cache, budget) if protected is None else protected
        allowed = self.allocate(params, cache, first, filled, self.allowance(budget, cache.length), protected)
        part = jnp.floor(self.first_share * allowed.astype(jnp.float32)).astype(jnp.int32)
        chosen = budgets.keep_top(first, filled, part, protected)
        if protected is not None:
            chosen |= protected & filled
        return budgets.keep_top(self._weighted(first, cache), filled, allowed, chosen)
