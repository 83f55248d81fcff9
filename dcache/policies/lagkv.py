"""LagKV: tokens whose keys and values stand out against the block of tokens that follows."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from dcache.errors import ConfigError
from dcache.policies.base import Policy, in_order


@dataclasses.dataclass(frozen=True)
class LagKV(Policy):
    """Spread over channels of keys and values, scaled by the range of the next block. Liang et al., arXiv 2504.04704.

    After the sinks the tokens form blocks of `lag`. Each channel of a block's keys is scaled to the minimum and maximum of
    the next block; a token's standard deviation over channels, softmax-normalised within its block, is its key score. The
    same for values; the mean of both is ranked within the block, so every block keeps the same share. Sinks, the last whole
    block and what follows it have no next block and stay (score 1). A prompt of fewer than two blocks keeps its most
    recent tokens. Where kvpress's ranks tie at the cut, this keeps the earlier token.

    Attributes:
      sinks: first tokens, which stay. lag: tokens in a block.
    """

    name = "lagkv"
    summary = "keys and values that stand out against the next block; needs no attention"
    paper = "arXiv 2504.04704"
    granularity = "head"

    sinks: int = 4
    lag: int = 128

    def __post_init__(self):
        if self.sinks < 0 or self.lag < 2:
            raise ConfigError(f"lagkv: sinks is {self.sinks} and lag {self.lag}; give sinks >= 0 and lag >= 2.")

    def scores(self, params, cache, key):
        """Rank within the block, from 0 to 1."""
        del params, key
        return in_order(cache, self._ranks)

    def _ranks(self, k: Array, v: Array, count: Array) -> Array:
        """Scores f32[S] of one head whose `count` (int32) tokens come first, in order: k, v f32[S, H]."""
        slots = k.shape[0]
        index = jnp.arange(slots, dtype=jnp.int32)
        recent = (index - self.sinks).astype(jnp.float32) / jnp.maximum(count - self.sinks, 1).astype(jnp.float32)
        short = jnp.where(index < self.sinks, 1.0, recent)
        blocks = (slots - self.sinks) // self.lag
        if blocks < 2:
            return short
        end = self.sinks + blocks * self.lag
        score = (self._spread(k[self.sinks : end], blocks) + self._spread(v[self.sinks : end], blocks)) / 2
        rank = jnp.argsort(jnp.argsort(score, axis=-1), axis=-1).astype(jnp.float32) / self.lag
        # Block b is compared if block b + 1 is whole.
        compared = jnp.arange(blocks - 1, dtype=jnp.int32)[:, None] + 1 < (count - self.sinks) // self.lag
        ranked = jnp.where(compared, rank, 1.0).reshape(-1)
        long = jnp.ones(slots, jnp.float32).at[self.sinks : self.sinks + ranked.shape[0]].set(ranked)
        return jnp.where(count >= self.sinks + 2 * self.lag, long, short)

    def _spread(self, x: Array, blocks: int) -> Array:
        """f32[blocks - 1, lag]: of each block but the last, relative to the next."""
        x = x.reshape(blocks, self.lag, -1)
        low, high = jnp.min(x[1:], axis=1, keepdims=True), jnp.max(x[1:], axis=1, keepdims=True)
        relative = (x[:-1] - low) / jnp.maximum(high - low, 1e-12)
        return jax.nn.softmax(jnp.std(relative, axis=-1, ddof=1), axis=-1)
