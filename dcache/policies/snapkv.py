"""SnapKV: attention from the observation window at the end of the prompt, pooled along the sequence."""

import dataclasses

import jax.numpy as jnp

from dcache.attention import StatsRequest
from dcache.errors import BudgetError, ConfigError
from dcache.policies.base import Policy, averaged, check_granularity, recent, slot_positions, statistics
from dcache.signals import Granularity, pool

DEFAULT_WINDOW = 32


@dataclasses.dataclass(frozen=True)
class SnapKV(Policy):
    """Mean attention of the last `window` queries, pooled; the window itself always stays. Li et al., arXiv 2404.14469.

    The paper has window 32, kernel 7, max pooling; kvpress has `window=64, kernel=5, pooling="avg"`. Pooling runs per query
    head and before the mean over the query heads of a key/value head. Average pooling counts places beyond the ends (and
    the window itself) as zeros, as kvpress does.

    Attributes:
      window: observation window in tokens; None for `min(32, budget // 4)`, so that it never eats a small budget.
      kernel: odd width of the pooling. pooling: "max" or "avg".
      granularity: "head", or "layer" or "sequence" to average the scores over heads (and layers).
    """

    name = "snapkv"
    summary = "attention from the last queries of the prompt, pooled; that window is kept"
    paper = "arXiv 2404.14469"

    window: int | None = None
    kernel: int = 7
    pooling: str = "max"
    granularity: Granularity = "head"  # type: ignore[misc]

    def __post_init__(self):
        check_granularity(self)
        if self.pooling not in ("max", "avg"):
            raise ConfigError(f"snapkv: pooling is {self.pooling!r}; use 'max' or 'avg'.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"snapkv: kernel is {self.kernel}; use an odd number of tokens.")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"snapkv: window is {self.window}; use at least 1, or None for the default.")

    @property
    def width(self) -> int:
        """The observation window that is used, in tokens."""
        return DEFAULT_WINDOW if self.window is None else self.window

    @property
    def needs(self):
        """Attention of the window."""
        return StatsRequest(windows=(self.width,))

    def fit(self, budget):
        """Fills in the default window; an explicit window must be smaller than the budget."""
        if self.window is None:
            return dataclasses.replace(self, window=max(1, min(DEFAULT_WINDOW, budget // 4)))
        if self.window >= budget:
            raise BudgetError(
                f"snapkv always keeps its window of {self.window} tokens, which leaves nothing of a budget of {budget}; "
                "raise the budget, or give a smaller window."
            )
        return self

    def scores(self, params, cache, key):
        """Pooled window attention."""
        del params, key
        window = statistics(cache, lambda stats: stats.windows[self.width])  # [L, B, N, S]
        l, b, n, s = window.shape
        position = slot_positions(cache, "head")
        kv_heads = position.shape[2]
        outside = ~recent(cache, "head", jnp.full_like(cache.length, self.width)) & (position >= 0)
        window = window.reshape(l, b, kv_heads, n // kv_heads, s) / self.width
        pooled = pool(
            jnp.where(outside[:, :, :, None], window, 0.0),
            jnp.broadcast_to(position[:, :, :, None], window.shape),
            self.kernel,
            self.pooling,
        )
        return averaged(jnp.mean(pooled, axis=3), self.granularity)

    def protects(self, cache, budget):
        """The observation window."""
        del budget
        return recent(cache, self.granularity, jnp.full_like(cache.length, self.width))
