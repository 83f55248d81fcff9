"""The hybrid: heads with the largest gates of RLKV keep everything, DistillCache chooses the tokens of all others."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dcache import cache as kv
from dcache.attention import StatsRequest
from dcache.errors import ConfigError
from dcache.policies.base import Policy, Trained, later, per_kv_head, shared_counts, spread, statistics
from dcache.policies.distillcache import DistillCache
from dcache.policies.rlkv import FULL_SHARE, RLKV, at_most, check_gates, check_heads, largest, shares

PAPER_HEADS = (1, 5)
PAPER_SHARE = (4, 5)
"""The paper's hybrid: 20% of the heads are full, which at a budget of 25% is 0.8 of it."""

_KEY = "hybrid"


@dataclasses.dataclass(frozen=True)
class Hybrid(Policy):
    """Head gates and token scores together. Althoubi, arXiv 2608.08878 (its Table 7).

    It is not trained: `compose` makes it of a trained `rlkv` and a trained `distillcache`. The weights are
    `{"gates": f32[L, K], "base": DistillCache's}`. The scores are DistillCache's after the prefill, when all heads still
    hold the same tokens; what comes later stays. So one evaluation holds one hybrid. In both modes the mean over heads is the
    budget.

    A fixed-shape cache gives every head as many slots as a full one needs: `generate` reports that no memory is saved.

    Attributes:
      base: DistillCache's settings, of any granularity. Where its heads share budgets, those that are not full do.
      heads: (L, K) of the model that the gates belong to; the default is SmolLM2-135M's.
      matched: full heads get at most 0.4 of the budget. False: as in the paper, 20% of the heads are full. At a budget of
        25% this leaves 6.25% to each other head. The paper gives no other budget; at smaller ones full heads get the same
        0.8 of the budget (20% of the heads would be more than all of it).
    """

    name = "hybrid"
    summary = "heads of the largest learned gates keep all tokens, DistillCache chooses those of the others"
    paper = "arXiv 2608.08878"
    granularity = "head"
    looks = True

    base: DistillCache = DistillCache()
    heads: tuple[int, ...] = (30, 3)
    matched: bool = True

    def __post_init__(self):
        check_heads(self)
        if not isinstance(self.base, DistillCache):
            raise ConfigError(f"hybrid: base is {self.base!r}; give a DistillCache policy or its settings.")
        if self.base.sees_budget or self.base.reads:
            raise ConfigError(
                "hybrid: base sees the budget or reads hidden states; a hybrid takes its scores when the prompt is read, at no "
                "certain budget, and leaves nothing else: give one that looks at signals only."
            )

    @property
    def needs(self):
        """What DistillCache needs, and its scores of the prompt."""
        return self.base.needs | StatsRequest(extra=(_KEY,))

    def init(self, key: Array) -> Any:
        """Every gate at 1, fresh weights of DistillCache."""
        return {"gates": jnp.ones(self.heads, jnp.float32), "base": self.base.init(key)}

    def check_model(self, config):
        """Raises ConfigError for a model of another shape."""
        check_gates(self, config)
        self.base.check_model(config)

    @property
    def offline(self):
        """It needs all of the prompt."""
        return "it ranks all tokens of a prompt once, when the prompt has been read"

    def observe(self, weights, params, config, cache, tokens, continuation):
        """Scores the prompt with DistillCache."""
        self.check_model(config)
        cache = self.base.observe(weights["base"], params, config, cache, tokens, continuation)
        scores = self.base.scores(weights["base"], cache, jax.random.key(0))
        return kv.with_extra(cache, _KEY, spread(scores.astype(jnp.float32), cache, self.base.granularity))

    def scores(self, params, cache, key):
        """DistillCache's of the prompt's tokens."""
        del params, key
        taken = statistics(cache, lambda stats: stats.extra[_KEY])
        return per_kv_head(jnp.where(jnp.isinf(taken), 0.0, taken), cache)

    def protects(self, cache, budget):
        """What came after the prompt."""
        del budget
        return later(cache, _KEY, "head")

    def full_heads(self, budget: Array, seen: Array) -> Array:
        """How many heads keep everything: int32[B] of budget int32[B] and tokens seen int32[B]."""
        total, budget = self.heads[0] * self.heads[1], jnp.minimum(budget, seen)
        if self.matched:
            return at_most(FULL_SHARE, budget, seen, total)
        return jnp.minimum(PAPER_HEADS[0] * total // PAPER_HEADS[1], at_most(PAPER_SHARE, budget, seen, total))

    def allocate(self, params, cache, scores, filled, budget, protected):
        """Full heads get all they hold, the others what DistillCache gives them of what is left."""
        full = largest(params["gates"], self.full_heads(budget, cache.length))
        held = jnp.sum(filled, axis=-1, dtype=jnp.int32)
        equal = shares(params["gates"], full, held, budget)
        if self.base.scope == "head":
            return equal
        open_ = ~full[..., None]
        safe = None if protected is None else protected & open_
        counts = shared_counts(scores, filled & open_, jnp.where(full, 0, equal), safe, self.base.scope)
        return jnp.where(full, held, counts)

    def most_kept(self, budget, seen, config):
        """All of them: a full head."""
        del budget, config
        return seen


def compose(rlkv: Trained, distillcache: Trained, *, matched: bool = True) -> Trained:
    """The hybrid of a trained RLKV and a trained DistillCache.

    Raises:
      ConfigError: one of them is another policy, or DistillCache has learned terms for a model of another shape.
    """
    for given, kind in ((rlkv, RLKV), (distillcache, DistillCache)):
        if not isinstance(given.policy, kind):
            raise ConfigError(
                f"The hybrid is made of an rlkv and a distillcache policy; a {given.policy.name} was given as its {kind.name}."
            )
    gates, base = rlkv.policy, distillcache.policy
    assert isinstance(gates, RLKV) and isinstance(base, DistillCache)
    if base.heads and base.heads != gates.heads:
        raise ConfigError(
            f"The gates are of {gates.heads[0]} layers of {gates.heads[1]} key/value heads, the distillcache of "
            f"{base.heads[0]} of {base.heads[1]}; train both on one model."
        )
    weights = {"gates": rlkv.params["gates"], "base": distillcache.params}
    return Trained(Hybrid(base=base, heads=gates.heads, matched=matched), weights)
