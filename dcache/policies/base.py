"""The policy seam: what every eviction method declares, and how its scores become a keep-set."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from dcache import budget as budgets
from dcache import cache as kv
from dcache import signals
from dcache.attention import Stats, StatsRequest
from dcache.errors import BudgetError, ConfigError


@dataclasses.dataclass(frozen=True)
class Policy:
    """An eviction method: frozen and hashable (a static argument of jitted functions), its weights passed in.

    A subclass sets the class attributes and overrides `scores`, and whatever else it needs.

    Attributes:
      name: short name in the registry. summary: one line. paper: title or arXiv number.
      granularity: "sequence" (one keep-set for all), "layer" or "head" (key/value head).
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    granularity: ClassVar[signals.Granularity] = "sequence"

    @property
    def needs(self) -> StatsRequest:
        """The attention statistics that `scores` reads; nothing else is computed."""
        return StatsRequest()

    def scores(self, params: Any, cache: kv.Cache, key: Array) -> Array:
        """Scores of all slots, higher = keep.

        Args:
          params: weights of a trained policy, () for others. cache: with the statistics that `needs` asks for.
          key: a random key; most policies ignore it.

        Returns:
          f32[B, S], f32[L, B, S] or f32[L, B, K, S], by granularity. Empty slots may hold anything finite.
        """
        raise NotImplementedError(f"{type(self).__name__} must define scores().")

    def protects(self, cache: kv.Cache, budget: Array) -> Array | None:
        """bool of the shape of the scores: slots that stay whatever their score; None for none. budget: int32[B]."""
        del cache, budget
        return None

    def protected_tokens(self, budget: int) -> int:
        """How many tokens `protects` marks under a budget, so that a budget too small for them can be refused."""
        del budget
        return 0

    def allowance(self, budget: Array, seen: Array) -> Array:
        """How many tokens the method keeps of `seen` (int32[B]) under a budget (int32[B])."""
        del seen
        return budget

    def fit(self, budget: int) -> "Policy":
        """The policy with every setting that depends on the budget (in tokens) filled in.

        Raises:
          BudgetError: the budget is smaller than what the method protects.
        """
        protected = self.protected_tokens(budget)
        if protected > budget:
            raise BudgetError(
                f"{self.name} always keeps {protected} tokens, more than the budget of {budget}; "
                "raise the budget or lower the method's own settings."
            )
        return self


def check_granularity(policy: Policy) -> None:
    """Raises ConfigError if a policy's granularity is unknown."""
    if policy.granularity not in signals.GRANULARITIES:
        raise ConfigError(
            f"{policy.name}: granularity is {policy.granularity!r}; use one of {', '.join(signals.GRANULARITIES)}."
        )


def shaped(x: Array, granularity: str) -> Array:
    """[B] -> the shape that broadcasts against scores without their last axis: [B], [1, B] or [1, B, 1]."""
    if granularity == "sequence":
        return x
    return x[None] if granularity == "layer" else x[None, :, None]


def slot_positions(cache: kv.Cache, granularity: signals.Granularity) -> Array:
    """int32 positions of the slots in the shape of the scores: [B, S], [L, B, S] or [L, B, K, S]."""
    return signals.positions_of(kv.positions(cache), granularity)


def recent(cache: kv.Cache, granularity: signals.Granularity, count: Array) -> Array:
    """bool in the shape of the scores: the `count` (int32[B]) most recently seen tokens that are still there."""
    first = shaped(cache.length - count, granularity)[..., None]
    position = slot_positions(cache, granularity)
    return (position >= first) & (position >= 0)


def spread(x: Array, cache: kv.Cache, granularity: str) -> Array:
    """Scores or masks of any granularity as [L, B, K, S]."""
    l, b, k, s = kv.positions(cache).shape
    if granularity == "sequence":
        x = x[None, :, None]
    elif granularity == "layer":
        x = x[:, :, None]
    return jnp.broadcast_to(x, (l, b, k, s))


def keep_set(policy: Policy, params: Any, cache: kv.Cache, budget: Array, key: Array) -> Array:
    """Which slots the policy keeps: bool[L, B, K, S], at most `budget` (int32[B]) per sequence, layer and head."""
    scores = policy.scores(params, cache, key).astype(jnp.float32)
    mask = signals.filled(cache, policy.granularity)
    allowed = policy.allowance(budget, cache.length)
    allowed = jnp.broadcast_to(shaped(allowed, policy.granularity), mask.shape[:-1])
    keep = budgets.keep_top(scores, mask, allowed, policy.protects(cache, budget))
    return spread(keep, cache, policy.granularity)


def averaged(scores: Array, granularity: str) -> Array:
    """Per-head scores f32[L, B, K, S] averaged down to a granularity."""
    if granularity == "sequence":
        return jnp.mean(scores, axis=(0, 2))
    return jnp.mean(scores, axis=2) if granularity == "layer" else scores


def per_kv_head(x: Array, cache: kv.Cache) -> Array:
    """Mean over the query heads of each key/value head: [L, B, N, S] -> [L, B, K, S] (what kvpress does under GQA)."""
    l, b, n, s = x.shape
    k = kv.positions(cache).shape[2]
    return jnp.mean(x.reshape(l, b, k, n // k, s), axis=3)


def statistics(cache: kv.Cache, read: Callable[[Stats], Array]) -> Array:
    """One attention statistic of all layers, for instance `lambda stats: stats.mass`: f32[L, B, N, S]."""
    if isinstance(cache.layers, tuple):
        return jnp.stack([read(layer.stats) for layer in cache.layers])
    return read(cache.layers.stats)


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """A policy together with its weights."""

    policy: Policy
    params: Any
