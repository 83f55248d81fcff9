"""Pooling around another policy: scores of neighbouring tokens together."""

import dataclasses

import jax.numpy as jnp

from dcache.errors import ConfigError
from dcache.policies.base import Policy, slot_positions
from dcache.policies.h2o import H2O
from dcache.policies.wrapper import Wrapper, check_ranks
from dcache.signals import pool


@dataclasses.dataclass(frozen=True)
class Smoothed(Wrapper):
    """The maximum or mean of another policy's scores over the neighbouring tokens that are cached.

    SnapKV (Li et al., arXiv 2404.14469) pools so that a fact that spans several tokens stays whole. It pools attention per
    query head, and counts places beyond the ends as zeros; this pools whatever the scores are, of any sign, once they are
    those of a key/value head (or layer, or sequence), and counts only tokens that are there. Scores of protected tokens
    take part.

    Attributes:
      base: whose scores are pooled. kernel: odd number of tokens. pooling: "max" or "avg".
    """

    name = "smoothed"
    summary = "another policy's scores (H2O's), pooled over neighbouring tokens"
    paper = "arXiv 2404.14469"

    base: Policy = H2O()
    kernel: int = 7
    pooling: str = "max"

    def __post_init__(self):
        super().__post_init__()
        check_ranks(self)
        if self.pooling not in ("max", "avg"):
            raise ConfigError(f"smoothed: pooling is {self.pooling!r}; use 'max' or 'avg'.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"smoothed: kernel is {self.kernel}; use an odd number of tokens.")

    def scores(self, params, cache, key):
        """Pooled scores."""
        return self._pool(self.base.scores(params, cache, key), cache)

    def scores_at(self, params, cache, budget, key):
        """Pooled scores."""
        return self._pool(self.base.scores_at(params, cache, budget, key), cache)

    def _pool(self, scores, cache):
        position = slot_positions(cache, self.granularity)
        return pool(scores.astype(jnp.float32), position, self.kernel, self.pooling, zeros=False)
