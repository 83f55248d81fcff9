"""The oracle: knows the attention that the text to come will pay."""

import dataclasses

import jax.numpy as jnp

from dcache import cache as kv
from dcache import model, signals
from dcache.attention import StatsRequest
from dcache.errors import ConfigError
from dcache.policies.base import Policy, averaged, check_granularity, later, per_kv_head, statistics


@dataclasses.dataclass(frozen=True)
class Oracle(Policy):
    """The true attention that the tokens of the continuation pay to each cached one, with nothing evicted.

    A ceiling for methods that rank tokens by attention, not a method: it reads the continuation first. Attention is not
    the KL, so a method that learns from the KL may do better.

    Attributes:
      granularity: "head", or "layer" or "sequence" to average over heads (and layers).
    """

    name = "oracle"
    summary = "the true attention of the text to come; a ceiling, not a method"
    paper = "-"

    granularity: signals.Granularity = "head"  # type: ignore[misc]

    def __post_init__(self):
        check_granularity(self)

    @property
    def needs(self):
        """Its own look at the continuation."""
        return StatsRequest(extra=("future",))

    @property
    def offline(self):
        """It needs all of the prompt."""
        return "it looks at the text that follows the whole prompt"

    def observe(self, weights, params, config, cache, tokens, continuation):
        """Feeds the continuation to the full cache and sums the attention that each slot of the prompt receives."""
        del weights, tokens
        if continuation is None:
            raise ConfigError(
                "The oracle needs the text that follows: use it in fidelity or launch/eval.py, not where it is unknown."
            )
        horizon, real = continuation.shape[1], (continuation >= 0).astype(jnp.float32)
        grown = kv.grow(kv.restrict(cache, StatsRequest()), horizon)
        slots = kv.positions(cache).shape[-1]

        def received(probs, position):
            del position
            return jnp.einsum("bnts,bt->bns", probs[..., :slots], real)

        fed = jnp.maximum(continuation, 0)
        _, _, future = model.extend_watched(params, config, fed, grown, jnp.int32(slots), received)
        return kv.with_extra(cache, "future", future)

    def scores(self, params, cache, key):
        """Attention received."""
        del params, key
        future = statistics(cache, lambda stats: stats.extra["future"])
        future = per_kv_head(jnp.where(jnp.isinf(future), 0.0, future), cache)
        return averaged(future, self.granularity)

    def protects(self, cache, budget):
        """What came after the prompt."""
        del budget
        return later(cache, "future", self.granularity)
