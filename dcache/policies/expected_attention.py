"""Expected Attention: the attention that Gaussian future queries would pay."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array

from dcache import cache as kv
from dcache.attention import StatsRequest
from dcache.errors import ConfigError
from dcache.policies.base import Policy, per_token, slot_positions


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(Policy):
    """Queries to come are Gaussian with the moments of those seen, at the next positions. Devoto et al., arXiv 2510.00636.

    Mean and covariance are of the queries before their rotary embedding (the first 4, outliers, left out), rotated by the
    average rotation of the next `future` positions. A key's score is the softmax over the cache of the logarithm of
    E[exp(q k / sqrt(H))], averaged over the query heads of a key/value head, plus `epsilon`, times the norm of its value. The
    first `sinks` tokens stay and take no part in the softmax. Defaults as in kvpress.

    Attributes:
      future: positions averaged over. sinks: first tokens, which stay. covariance: use the second moment too.
      value_norm: multiply by the norm of the value. epsilon: added before that.
    """

    name = "expected_attention"
    summary = "attention that Gaussian future queries would pay, times the value norm"
    paper = "arXiv 2510.00636"
    granularity = "head"

    future: int = 512
    sinks: int = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0

    def __post_init__(self):
        if self.future < 1 or self.sinks < 0 or self.epsilon < 0.0:
            raise ConfigError(
                f"expected_attention: future is {self.future}, sinks {self.sinks} and epsilon {self.epsilon}; give "
                "future >= 1, sinks >= 0 and epsilon >= 0."
            )

    @property
    def needs(self):
        """Moments of the queries."""
        return StatsRequest(queries=True)

    def scores(self, params, cache, key):
        """Expected attention."""
        del params, key
        mean, covariance = self._moments(cache)
        heads = slot_positions(cache, "head").shape[2]
        counted = slot_positions(cache, "head") >= self.sinks

        def logits(k: Array, v: Array, mean: Array, covariance: Array) -> Array:
            """[B or 1, K, S, H], mean f32[B, N, H], covariance f32[B, N, H, H] -> f32[B, K * G, S]."""
            del v
            b, n, h = mean.shape
            mean, covariance = mean.reshape(b, heads, n // heads, h), covariance.reshape(b, heads, n // heads, h, h)
            k = jnp.broadcast_to(k.astype(jnp.float32), (b, *k.shape[1:]))
            out = jnp.einsum("bksh,bkgh->bkgs", k, mean) / math.sqrt(h)
            if self.covariance:
                turned = jnp.einsum("bksh,bkghi->bkgsi", k, covariance)
                out += jnp.einsum("bkgsi,bksi->bkgs", turned, k) / (2 * h)
            return out.reshape(b, n, -1)

        expected = per_token(cache, logits, mean, covariance)  # [L, B, N, S]
        l, b, n, s = expected.shape
        grouped = jnp.where(counted[:, :, :, None], expected.reshape(l, b, heads, n // heads, s), -jnp.inf)
        # With nothing but sinks in the cache every logit is -inf: any scores will do.
        attention = jnp.mean(jnp.nan_to_num(jax.nn.softmax(grouped, axis=-1)), axis=3)
        if not self.value_norm:
            return attention
        return (attention + self.epsilon) * kv.by_layer(cache, lambda layer: layer.value_norm)

    def _moments(self, cache: kv.Cache) -> tuple[Array, Array]:
        """Mean f32[L, B, N, H] and covariance f32[L, B, N, H, H] of the rotated future queries."""
        q = cache.queries
        count = jnp.maximum(q.count, 1.0)
        mean = q.total / count[:, None, None, None]
        covariance = q.outer / count[:, None, None, None, None] - mean[..., :, None] * mean[..., None, :]
        position = cache.length[:, None] + jnp.arange(self.future, dtype=jnp.int32)[None]
        angle = position.astype(jnp.float32)[..., None] * q.frequencies[:, None]  # [B, future, H/2]
        cos, sin = (jnp.mean(f(angle), axis=1)[:, None, None] for f in (jnp.cos, jnp.sin))  # [B, 1, 1, H/2]

        def turn(x, cos, sin):  # the average rotation of the last axis
            first, second = jnp.split(x, 2, axis=-1)
            return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

        mean = turn(mean, cos, sin)
        covariance = turn(covariance, cos[..., None, :], sin[..., None, :])
        covariance = turn(covariance.swapaxes(-1, -2), cos[..., None, :], sin[..., None, :])
        return mean.swapaxes(0, 1), covariance.swapaxes(0, 1)

    def protects(self, cache, budget):
        """The sinks."""
        del budget
        position = slot_positions(cache, "head")
        return (position >= 0) & (position < self.sinks)

    def protected_tokens(self, budget):
        """The sinks."""
        del budget
        return self.sinks
