"""Observed attention: what a token received from the queries that could see it."""

import dataclasses

from dcache import signals
from dcache.policies.base import Policy, check_granularity


@dataclasses.dataclass(frozen=True)
class ObservedAttention(Policy):
    """Attention received, divided by the number of queries that could see the token. kvpress has it under this name.

    H2O's score without H2O's favour for old tokens and without its recent window; also DistillCache's first signal. Under
    grouped-query attention the score of a key/value head is the mean over its query heads.

    Attributes:
      granularity: "head", or "layer" or "sequence" to average over heads (and layers).
    """

    name = "observed_attention"
    summary = "mean attention from the queries that could see the token"
    paper = "kvpress; related to arXiv 2306.14048"

    granularity: signals.Granularity = "head"  # type: ignore[misc]

    def __post_init__(self):
        check_granularity(self)

    @property
    def needs(self):
        """Accumulated attention."""
        return signals.needs(("alpha",))

    def scores(self, params, cache, key):
        """Mean attention received."""
        del params, key
        return signals.compute(("alpha",), cache, self.granularity)[..., 0]
