"""R-KV: attention of the last queries, less what other cached keys repeat."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from dcache.attention import StatsRequest
from dcache.errors import BudgetError, ConfigError
from dcache.policies.base import Policy, in_order, recent, slot_positions, statistics
from dcache.signals import pool

_ROWS = 128  # keys that are compared with all others at once


@dataclasses.dataclass(frozen=True)
class RKV(Policy):
    """`share` times the pooled attention of the last queries, less `1 - share` times the redundancy of the key.

    Cai et al., arXiv 2505.24133; made for long reasoning: evict while decoding (`evict_every`). Redundancy is the mean cosine
    similarity of the key to all others, softmax-normalised over the cache; for every token the last one that is more similar
    to it than `threshold` is left out, so that of several repetitions the latest stays. The attention is normalised over what
    lies before the window, averaged over the window, the maximum over the query heads of a key/value head, max-pooled. (The
    authors' code takes that maximum before the softmax.) The window stays.

    Attributes:
      window: observation window in tokens; None for `min(8, budget // 4)`. kernel: odd width of the pooling.
      share: weight of the attention. threshold: cosine above which two keys count as the same.
    """

    name = "rkv"
    summary = "attention of the last queries, less what other cached keys repeat; for decoding"
    paper = "arXiv 2505.24133"
    granularity = "head"

    window: int | None = None
    kernel: int = 7
    share: float = 0.1
    threshold: float = 0.5

    def __post_init__(self):
        if self.kernel < 1 or self.kernel % 2 == 0 or (self.window is not None and self.window < 1):
            raise ConfigError(f"rkv: window is {self.window} and kernel {self.kernel}; give 1 or more, kernel odd.")
        if not 0.0 <= self.share <= 1.0 or not -1.0 <= self.threshold <= 1.0:
            raise ConfigError(
                f"rkv: share is {self.share} and threshold {self.threshold}; give a share in [0, 1] and a cosine in [-1, 1]."
            )

    @property
    def width(self) -> int:
        """The observation window that is used, in tokens."""
        return 8 if self.window is None else self.window

    @property
    def needs(self):
        """Attention of the window."""
        return StatsRequest(windows=(self.width,))

    def fit(self, budget):
        """Fills in the default window; an explicit window must be smaller than the budget."""
        if self.window is None:
            return dataclasses.replace(self, window=max(1, min(8, budget // 4)))
        if self.window >= budget:
            raise BudgetError(
                f"rkv always keeps its window of {self.window} tokens, which leaves nothing of a budget of {budget}; "
                "raise the budget, or give a smaller window."
            )
        return self

    def scores(self, params, cache, key):
        """Attention less redundancy."""
        del params, key
        position = slot_positions(cache, "head")
        window = statistics(cache, lambda stats: stats.windows[self.width])  # [L, B, N, S]
        l, b, n, s = window.shape
        heads = position.shape[2]
        newest = recent(cache, "head", jnp.full_like(cache.length, self.width))
        outside = ~newest & (position >= 0)
        window = jnp.where(outside[:, :, :, None], window.reshape(l, b, heads, n // heads, s), 0.0)
        share = window / jnp.maximum(jnp.sum(window, axis=-1, keepdims=True), 1e-20)
        pooled = pool(jnp.max(share, axis=3), position, self.kernel, "max")
        return self.share * pooled - (1.0 - self.share) * in_order(cache, self._redundancy)

    def _redundancy(self, k: Array, v: Array, count: Array) -> Array:
        """f32[S] of one head whose `count` (int32) tokens come first, in order: k f32[S, H]."""
        del v
        slots = k.shape[0]
        index = jnp.arange(slots, dtype=jnp.int32)
        held = index < count
        unit = jnp.where(held[:, None], k / (jnp.linalg.norm(k, axis=-1, keepdims=True) + 1e-8), 0.0)
        blocks = -(-slots // _ROWS)
        rows = jnp.pad(unit, ((0, blocks * _ROWS - slots), (0, 0))).reshape(blocks, _ROWS, -1)
        numbers = jnp.arange(blocks * _ROWS, dtype=jnp.int32).reshape(blocks, _ROWS)

        def add(total, block):
            row, number = block
            cosine = jnp.where(number[:, None] == index[None], 0.0, row @ unit.T)  # [rows, S]
            same = cosine > self.threshold
            last = jnp.max(jnp.where(same, index[None], -1), axis=-1, keepdims=True)
            return total + jnp.sum(jnp.where(index[None] == last, 0.0, cosine), axis=0), None

        total, _ = jax.lax.scan(add, jnp.zeros(slots, jnp.float32), (rows, numbers))
        mean = total / jnp.maximum(count, 1).astype(jnp.float32)
        return jnp.nan_to_num(jax.nn.softmax(jnp.where(held, mean, -jnp.inf)))

    def protects(self, cache, budget):
        """The observation window."""
        del budget
        return recent(cache, "head", jnp.full_like(cache.length, self.width))
