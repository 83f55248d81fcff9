"""DistillCache: a small network scores every cached token; trained by `dcache.learn.distill`."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from dcache import cache as kv
from dcache import signals as signal_lib
from dcache.attention import StatsRequest
from dcache.errors import ConfigError
from dcache.policies.base import (
    Policy,
    Scope,
    check_granularity,
    check_scope,
    later,
    most_shared,
    pooled,
    shared_counts,
    statistics,
    unpooled,
)


class ScoreNet(nn.Module):
    """MLP with ReLU and LayerNorm: features f32[..., F] -> score f32[...]. Two hidden layers of 128 in the paper.

    With `heads` = (L, K) the features are f32[L, B, K, S, F], and every head of the model has a learned code of `CODE` numbers
    among the network's inputs, and a linear term of its own beside it.
    """

    hidden: int = 128
    layers: int = 2
    heads: tuple[int, ...] = ()

    CODE = 8

    @nn.compact
    def __call__(self, features: Array) -> Array:
        """Scores every token independently."""
        x = features
        if self.heads:
            code = self.param("code", nn.initializers.normal(0.5), (*self.heads, self.CODE))
            code = jnp.broadcast_to(code[:, None, :, None], (*features.shape[:-1], self.CODE))
            x = jnp.concatenate([features, code], axis=-1)
        for _ in range(self.layers):
            x = nn.relu(nn.LayerNorm()(nn.Dense(self.hidden)(x)))
        # A zero start: the first keep-sets are those of the prior, and without one no signal has a head start.
        score = nn.Dense(1, kernel_init=nn.initializers.zeros)(x)[..., 0]
        if not self.heads:
            return score
        slope = self.param("slope", nn.initializers.zeros, (*self.heads, features.shape[-1]))
        offset = self.param("offset", nn.initializers.zeros, self.heads)
        return score + jnp.einsum("lbksf,lkf->lbks", features, slope) + offset[:, None, :, None]


@dataclasses.dataclass(frozen=True)
class DistillCache(Policy):
    """Scores of a learned network over per-token signals. Althoubi, arXiv 2608.08878.

    The paper's policy keeps one set of tokens for all layers and heads. With granularity "layer" or "head" the same network
    scores every layer's or head's tokens by their own signals. Signals that average over layers (`signals.SEQUENCE_ONLY`)
    are then taken once, right after the prefill, since later the heads hold different tokens; tokens that come later stay.

    Attributes:
      signals: names of `dcache.signals.SIGNALS`, in the order of the network's inputs.
      granularity: "sequence" as in the paper, "layer" or "head".
      scope: whose tokens compete for one budget, "head" (each head has its own), "layer" or "model". Signals are standardised
        over the tokens that compete.
      heads: (L, K) of the model, if every head is to have learned terms of its own (granularity "head"; the policy then
        fits models of that shape only); () for none.
      hidden, layers: width and number of hidden layers of the network.
      layer_reduce: "mean" or "max": how `vnorm` and `sigma` are reduced over layers.
      logs: take the logarithm of attention signals before they are standardised.
      prior: fixed weights of the standardised signals, added to the network's output, one per signal; () for none. The
        network starts at zero, so with a prior training starts from that ranking instead of a random one.
    """

    name = "distillcache"
    summary = "learned network over attention signals, trained on the KL to the full-cache model"
    paper = "arXiv 2608.08878"
    learner = "dcache.learn.distill"

    signals: tuple[str, ...] = signal_lib.EXTENDED_SIGNALS
    granularity: signal_lib.Granularity = "sequence"  # type: ignore[misc]
    scope: Scope = "head"
    heads: tuple[int, ...] = ()
    hidden: int = 128
    layers: int = 2
    layer_reduce: str = "mean"
    logs: bool = True
    prior: tuple[float, ...] = ()

    def __post_init__(self):
        signal_lib.check_names(self.signals)
        check_granularity(self)
        check_scope(self)
        if self.heads and (self.granularity != "head" or len(self.heads) != 2):
            raise ConfigError(
                f"distillcache: heads is {self.heads} with granularity {self.granularity!r}; give (layers, key/value heads "
                "per layer) of the model with granularity 'head', or ()."
            )
        if self.prior and len(self.prior) != len(self.signals):
            raise ConfigError(
                f"distillcache: the prior has {len(self.prior)} weights for {len(self.signals)} signals; "
                "give one each, or none."
            )
        if self.layer_reduce not in ("mean", "max"):
            raise ConfigError(f"distillcache: layer_reduce is {self.layer_reduce!r}; use 'mean' or 'max'.")

    @property
    def net(self) -> ScoreNet:
        """The scoring network."""
        return ScoreNet(self.hidden, self.layers, self.heads)

    @property
    def once(self) -> tuple[str, ...]:
        """The signals that are taken once, after the prefill."""
        if self.granularity == "sequence":
            return ()
        return tuple(name for name in self.signals if name in signal_lib.SEQUENCE_ONLY)

    @property
    def needs(self):
        """Whatever the signals need."""
        return signal_lib.needs(self.signals) | StatsRequest(extra=tuple(map(self._key, self.once)))

    def init(self, key: Array) -> Any:
        """Fresh weights, float32."""
        leading = (self.heads[0], 1, self.heads[1], 1) if self.heads else (1,)
        return self.net.init(key, jnp.zeros((*leading, len(self.signals)), jnp.float32))

    def check_model(self, config):
        """Raises ConfigError for a model of another shape, if every head has learned terms of its own."""
        shape = (config.num_layers, config.num_kv_heads)
        if self.heads and self.heads != shape:
            raise ConfigError(
                f"This distillcache has learned terms for {self.heads[0]} layers of {self.heads[1]} key/value heads; the model "
                f"has {shape[0]} of {shape[1]}. Train one for it, or use a policy without `heads`."
            )

    def observe(self, weights, params, config, cache, tokens, continuation):
        """Takes the signals that average over layers, standardised over the prompt."""
        del weights, params, tokens, continuation
        self.check_model(config)
        if not self.once:
            return cache
        raw = signal_lib.compute(self.once, cache, "sequence", self.layer_reduce)
        taken = signal_lib.standardise(self.once, raw, signal_lib.filled(cache), logs=self.logs)
        for i, name in enumerate(self.once):
            spread = jnp.broadcast_to(taken[None, :, None, :, i], kv.positions(cache).shape)
            cache = kv.with_extra(cache, self._key(name), spread)
        return cache

    def _key(self, name: str) -> str:
        """Under which a signal that is taken once stands among the cache's statistics."""
        return f"{name}, {'log' if self.logs else 'raw'}"

    def _taken(self, cache: kv.Cache, name: str) -> Array:
        key = self._key(name)
        return statistics(cache, lambda stats: stats.extra[key])

    def features(self, cache) -> Array:
        """Standardised signals f32[..., S, F] of a cache, the network's input."""
        own = tuple(name for name in self.signals if name not in self.once)
        by_name = {}
        if own:
            raw = signal_lib.compute(own, cache, self.granularity, self.layer_reduce)
            filled = signal_lib.filled(cache, self.granularity)
            by_name = {name: raw[..., i] for i, name in enumerate(own)}
            competing = jnp.stack([pooled(x, self.scope) for x in by_name.values()], axis=-1)
            mask = pooled(filled, self.scope)
            done = signal_lib.standardise(own, competing, mask, logs=self.logs)
            by_name = {name: unpooled(done[..., i], filled.shape, self.scope) for i, name in enumerate(own)}
        for name in self.once:
            taken = self._taken(cache, name)
            taken = jnp.where(jnp.isinf(taken), 0.0, taken)
            by_name[name] = taken if self.granularity == "head" else taken[:, :, 0]
        return jnp.stack([by_name[name] for name in self.signals], axis=-1)

    def scores_of(self, params: Any, features: Array) -> Array:
        """Scores f32[..., S] of features f32[..., S, F]."""
        learned: Any = self.net.apply(params, features)
        return learned + features @ jnp.asarray(self.prior, jnp.float32) if self.prior else learned

    def scores(self, params, cache, key):
        """The network's scores."""
        del key
        return self.scores_of(params, self.features(cache))

    def protects(self, cache, budget):
        """What came after the prompt, if signals were taken there."""
        del budget
        return later(cache, self._key(self.once[0]), self.granularity) if self.once else None

    def allocate(self, params, cache, scores, filled, budget, protected):
        """By the scores of all that compete."""
        equal = super().allocate(params, cache, scores, filled, budget, protected)
        return equal if self.scope == "head" else shared_counts(scores, filled, equal, protected, self.scope)

    def most_kept(self, budget, seen, config):
        """All tokens of a head, if those that share its budget keep none."""
        return most_shared(budget, seen, config, self.scope)


def parameter_count(params: Any) -> int:
    """Number of weights (the paper's text says about 200 thousand; its own architecture has about 17 thousand)."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
