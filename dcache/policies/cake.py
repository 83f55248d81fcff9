"""CAKE: layers whose attention is spread out and shifts get more of the budget."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from dcache.attention import StatsRequest
from dcache.errors import BudgetError, ConfigError
from dcache.policies.base import Policy, most_marked, recent, slot_positions, statistics
from dcache.signals import pool


@dataclasses.dataclass(frozen=True)
class CAKE(Policy):
    """Mean plus `gamma` times variance of the last queries' attention; layer budgets by dispersion and shift.

    Qin et al., arXiv 2503.12491. A layer's preference is `H ** (1 / tau1) * V ** (1 / tau2)`: H the entropy of the window's
    attention to what lies before it, V its variance over the window, both summed over heads. What the window leaves of the
    budget is shared in proportion; what a layer cannot use goes to the others in the same proportion (the authors share it
    equally). The scores are average-pooled per query head; the window stays. The authors tune tau1 and tau2 for each model and
    budget (0.4 to 2.3); the default is neutral.

    Attributes:
      window: observation window in tokens; None for `min(32, budget // 4)`. kernel: odd width of the pooling.
      gamma: weight of the variance in the scores. tau1, tau2: temperatures of dispersion and shift.
    """

    name = "cake"
    summary = "mean and variance of the last queries' attention; layer budgets by how it spreads and shifts"
    paper = "arXiv 2503.12491"
    granularity = "head"

    window: int | None = None
    kernel: int = 5
    gamma: float = 200.0
    tau1: float = 1.0
    tau2: float = 1.0

    def __post_init__(self):
        if self.kernel < 1 or self.kernel % 2 == 0 or (self.window is not None and self.window < 2):
            raise ConfigError(
                f"cake: window is {self.window} and kernel {self.kernel}; give a window >= 2 and an odd kernel."
            )
        if self.gamma < 0.0 or self.tau1 <= 0.0 or self.tau2 <= 0.0:
            raise ConfigError(
                f"cake: gamma is {self.gamma}, tau1 {self.tau1} and tau2 {self.tau2}; give gamma >= 0 and positive taus."
            )

    @property
    def width(self) -> int:
        """The observation window that is used, in tokens."""
        return 32 if self.window is None else self.window

    @property
    def needs(self):
        """Attention of the window, and its squares and surprisals."""
        return StatsRequest(windows=(self.width,), spreads=(self.width,))

    def fit(self, budget):
        """Fills in the default window; an explicit window must be smaller than the budget."""
        if self.window is None:
            return dataclasses.replace(self, window=max(2, min(32, budget // 4)))
        if self.window >= budget:
            raise BudgetError(
                f"cake always keeps its window of {self.window} tokens, which leaves nothing of a budget of {budget}; "
                "raise the budget, or give a smaller window."
            )
        return self

    def _per_query_head(self, cache, read) -> Array:
        """A statistic of the slots before the window, f32[L, B, K, G, S]; 0 elsewhere."""
        x = statistics(cache, read)
        l, b, n, s = x.shape
        position = slot_positions(cache, "head")
        outside = ~recent(cache, "head", jnp.full_like(cache.length, self.width)) & (position >= 0)
        heads = position.shape[2]
        return jnp.where(outside[:, :, :, None], x.reshape(l, b, heads, n // heads, s), 0.0)

    def _moments(self, cache) -> tuple[Array, Array]:
        """Mean and (unbiased) variance over the window, f32[L, B, K, G, S]."""
        mean = self._per_query_head(cache, lambda stats: stats.windows[self.width]) / self.width
        squares = self._per_query_head(cache, lambda stats: stats.squares[self.width]) / self.width
        return mean, jnp.maximum(squares - mean * mean, 0.0) * (self.width / (self.width - 1))

    def scores(self, params, cache, key):
        """Pooled mean plus variance."""
        del params, key
        mean, variance = self._moments(cache)
        position = jnp.broadcast_to(slot_positions(cache, "head")[:, :, :, None], mean.shape)
        return jnp.mean(pool(mean + self.gamma * variance, position, self.kernel, "avg"), axis=3)

    def preferences(self, cache) -> Array:
        """f32[L, B]: how much of the budget a layer asks for, up to a factor."""
        surprisal = self._per_query_head(cache, lambda stats: stats.surprisals[self.width])
        _, variance = self._moments(cache)
        dispersion, shift = (jnp.sum(x, axis=(2, 3, 4)) for x in (surprisal, variance))
        return dispersion ** (1.0 / self.tau1) * shift ** (1.0 / self.tau2)

    def allocate(self, params, cache, scores, filled, budget, protected):
        """In proportion to the preferences, as far as a layer has tokens."""
        del params
        held = jnp.max(jnp.sum(filled, axis=-1, dtype=jnp.int32), axis=2)  # [L, B]
        stays = jnp.int32(self.width)  # more, if a policy around this one protects more
        if protected is not None:
            stays = jnp.maximum(stays, most_marked(protected & filled))
        window = jnp.minimum(stays, budget)
        total = scores.shape[0] * (budget - window)
        shares = proportional(self.preferences(cache), jnp.maximum(held - window[None], 0), total)
        return jnp.broadcast_to((window[None] + shares)[:, :, None], scores.shape[:-1])

    def most_kept(self, budget, seen, config):
        """All of them, if the other layers keep little but their windows."""
        return min(seen, self.width + config.num_layers * max(budget - self.width, 0))

    def protects(self, cache, budget):
        """The observation window."""
        del budget
        return recent(cache, "head", jnp.full_like(cache.length, self.width))


def proportional(weights: Array, limit: Array, total: Array) -> Array:
    """Whole shares int32[L, B] in proportion to weights f32[L, B], none above its limit int32[L, B], that sum to a total.

    Args:
      total: int32[B]. Where the limits sum to less, all are reached.
    """
    weights = jnp.maximum(weights / jnp.maximum(jnp.max(weights, axis=0, keepdims=True), 1e-30), 1e-6)
    top = limit.astype(jnp.float32)

    def halve(bounds, _):
        low, high = bounds
        middle = (low + high) / 2
        small = jnp.sum(jnp.minimum(weights * middle[None], top), axis=0) <= total.astype(jnp.float32)
        return (jnp.where(small, middle, low), jnp.where(small, high, middle)), None

    # At this factor every layer would reach its limit.
    start = (jnp.zeros_like(top[0]), jnp.max(top / weights, axis=0) + 1.0)
    (factor, _), _ = jax.lax.scan(halve, start, None, length=60)
    shares = jnp.minimum(jnp.floor(weights * factor[None]).astype(jnp.int32), limit)
    # What rounding left over goes to the first layers that have room; bisection ends within a layer's rounding.
    room = (shares < limit).astype(jnp.int32)
    left = total[None] - jnp.sum(shares, axis=0, keepdims=True)
    before = jnp.cumsum(room, axis=0) - room
    return shares + room * (before < left).astype(jnp.int32)
