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
from dcache.policies import reader
from dcache.policies.base import (
    Policy,
    Scope,
    best_of_each,
    check_cap,
    check_granularity,
    check_scope,
    later,
    most_capped,
    most_shared,
    per_kv_head,
    pooled,
    shaped,
    shared_counts,
    statistics,
    unpooled,
)

_READING = "reading"


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
      cap: where all heads of the model share a budget, most that one head keeps, as a multiple of the budget; it bounds the
        memory of a cache with as many slots for every head. 0 for no bound. Training does not apply it.
      heads: (L, K) of the model, if every head is to have learned terms of its own (granularity "head"; the policy then
        fits models of that shape only); () for none.
      reads: (D of the model, units) of a further network per layer that reads the hidden states of the prompt, as KVzap does
        (`dcache.policies.reader`); its output is one more input of the scoring network, after the signals. () for none. Needs
        `heads`.
      sees_budget: the logarithm of the share of tokens to keep is one more input, the last one.
      hidden, layers: width and number of hidden layers of the network.
      layer_reduce: "mean" or "max": how `vnorm` and `sigma` are reduced over layers.
      logs: take the logarithm of attention signals before they are standardised.
      prior: fixed weights of the network's inputs, added to its output, one per input; () for none. The
        network starts at zero, so with a prior training starts from that ranking instead of a random one.
    """

    name = "distillcache"
    summary = "learned network over attention signals, trained on the KL to the full-cache model"
    paper = "arXiv 2608.08878"
    learner = "dcache.learn.distill"

    signals: tuple[str, ...] = signal_lib.EXTENDED_SIGNALS
    granularity: signal_lib.Granularity = "sequence"  # type: ignore[misc]
    scope: Scope = "head"
    cap: float = 0.0
    heads: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    sees_budget: bool = False
    hidden: int = 128
    layers: int = 2
    layer_reduce: str = "mean"
    logs: bool = True
    prior: tuple[float, ...] = ()

    def __post_init__(self):
        signal_lib.check_names(self.signals)
        check_granularity(self)
        check_scope(self)
        check_cap(self, self.scope == "model")
        if self.heads and (self.granularity != "head" or len(self.heads) != 2):
            raise ConfigError(
                f"distillcache: heads is {self.heads} with granularity {self.granularity!r}; give (layers, key/value heads "
                "per layer) of the model with granularity 'head', or ()."
            )
        if self.reads and (not self.heads or len(self.reads) != 2 or min(self.reads) < 1):
            raise ConfigError(
                f"distillcache: reads is {self.reads} with heads {self.heads}; give (width of the model, units of the network "
                "that reads its hidden states) together with heads, or ()."
            )
        if self.prior and len(self.prior) != self.inputs:
            raise ConfigError(
                f"distillcache: the prior has {len(self.prior)} weights for {self.inputs} inputs; give one for each of "
                f"{', '.join(self.signals)}{', the reading' * bool(self.reads)}{', the budget' * self.sees_budget}, or none."
            )
        if self.layer_reduce not in ("mean", "max"):
            raise ConfigError(f"distillcache: layer_reduce is {self.layer_reduce!r}; use 'mean' or 'max'.")

    @property
    def looks(self):  # type: ignore[override]
        """Whether it reads hidden states."""
        return bool(self.reads)

    @property
    def inputs(self) -> int:
        """F, the number of inputs of the scoring network: signals, reading, budget."""
        return len(self.signals) + bool(self.reads) + self.sees_budget

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
        own = tuple(map(self._key, self.once)) + (_READING,) * bool(self.reads)
        return signal_lib.needs(self.signals) | StatsRequest(hidden=bool(self.reads), extra=own)

    def init(self, key: Array) -> Any:
        """Fresh weights, float32."""
        leading = (self.heads[0], 1, self.heads[1], 1) if self.heads else (1,)
        weights = self.net.init(key, jnp.zeros((*leading, self.inputs), jnp.float32))
        if not self.reads:
            return weights
        return {**weights, "reader": reader.init(jax.random.fold_in(key, 1), self.heads, *self.reads)}

    def check_model(self, config):
        """Raises ConfigError for a model of another shape, if every head has learned terms of its own."""
        shape = (config.num_layers, config.num_kv_heads)
        if self.heads and self.heads != shape:
            raise ConfigError(
                f"This distillcache has learned terms for {self.heads[0]} layers of {self.heads[1]} key/value heads; the model "
                f"has {shape[0]} of {shape[1]}. Train one for it, or use a policy without `heads`."
            )
        if self.reads and self.reads[0] != config.embed_dim:
            raise ConfigError(
                f"This distillcache reads hidden states of width {self.reads[0]}; the model's have {config.embed_dim}. "
                "Train one for it."
            )

    def observe(self, weights, params, config, cache, tokens, continuation):
        """Reads the hidden states, and takes the signals that average over layers, standardised over the prompt.

        Without weights (in training, where they change) nothing is read: see `differentiable_scores`.
        """
        del params, tokens, continuation
        self.check_model(config)
        if self.reads and weights:
            cache = kv.with_extra(cache, _READING, reader.read(weights["reader"], cache.hidden))
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

    def _extra(self, cache: kv.Cache, key: str) -> Array:
        return statistics(cache, lambda stats: stats.extra[key])

    def features(self, cache, budget: Array | None = None, reading: Array | None = None) -> Array:
        """The network's inputs f32[..., S, F]: standardised signals, then the reading and the budget's logarithm.

        Args:
          budget: int32[B], tokens to keep; a quarter where nothing is given.
          reading: f32[L, B, K, S] in place of the one that was taken at the prefill.
        """
        filled = signal_lib.filled(cache, self.granularity)
        columns = self._signals(cache, filled)
        if self.reads:
            if reading is None:
                taken = per_kv_head(self._extra(cache, _READING), cache)
                reading = jnp.where(jnp.isinf(taken), 0.0, taken)
            columns.append(reading)
        if self.sees_budget:
            budget = cache.length // 4 if budget is None else budget
            share = budget.astype(jnp.float32) / jnp.maximum(cache.length, 1).astype(jnp.float32)
            share = shaped(jnp.log2(jnp.clip(share, 2.0**-10, 1.0)), self.granularity)[..., None]
            columns.append(jnp.broadcast_to(share, filled.shape))
        return jnp.stack(columns, axis=-1)

    def _signals(self, cache, filled: Array) -> list[Array]:
        """The standardised signals in their order, each of the shape of `filled` (bool[..., S])."""
        own = tuple(name for name in self.signals if name not in self.once)
        by_name = {}
        if own:
            raw = signal_lib.compute(own, cache, self.granularity, self.layer_reduce)
            by_name = {name: raw[..., i] for i, name in enumerate(own)}
            competing = jnp.stack([pooled(x, self.scope) for x in by_name.values()], axis=-1)
            mask = pooled(filled, self.scope)
            done = signal_lib.standardise(own, competing, mask, logs=self.logs)
            by_name = {name: unpooled(done[..., i], filled.shape, self.scope) for i, name in enumerate(own)}
        for name in self.once:
            taken = self._extra(cache, self._key(name))
            taken = jnp.where(jnp.isinf(taken), 0.0, taken)
            by_name[name] = taken if self.granularity == "head" else taken[:, :, 0]
        return [by_name[name] for name in self.signals]

    def scores_of(self, params: Any, features: Array) -> Array:
        """Scores f32[..., S] of features f32[..., S, F]."""
        learned: Any = self.net.apply(params, features)
        return learned + features @ jnp.asarray(self.prior, jnp.float32) if self.prior else learned

    def scores_at(self, params, cache, budget, key):
        """The network's scores."""
        del key
        return self.scores_of(params, self.features(cache, budget))

    def scores(self, params, cache, key):
        """The network's scores for a quarter of the tokens, where it sees the budget."""
        del key
        return self.scores_of(params, self.features(cache))

    def differentiable_scores(self, params: Any, cache: kv.Cache, budget: Array) -> Array:
        """The scores of a prompt whose hidden states are still there, with the slope of the reading too."""
        reading = reader.read(params["reader"], cache.hidden) if self.reads else None
        return self.scores_of(params, self.features(cache, budget, reading))

    def protects(self, cache, budget):
        """What came after the prompt, if something was taken there."""
        del budget
        taken = (*map(self._key, self.once), *(_READING,) * bool(self.reads))
        return later(cache, taken[0], self.granularity) if taken else None

    def allocate(self, params, cache, scores, filled, budget, protected):
        """By the scores of all that compete."""
        equal = super().allocate(params, cache, scores, filled, budget, protected)
        if self.cap:
            filled = best_of_each(scores, filled, budget, protected, self.cap)
        return equal if self.scope == "head" else shared_counts(scores, filled, equal, protected, self.scope)

    def most_kept(self, budget, seen, config):
        """All tokens of a head, if those that share its budget keep none; no more than the cap."""
        most = most_shared(budget, seen, config, self.scope)
        return min(most, most_capped(budget, self.cap)) if self.cap else most


def parameter_count(params: Any) -> int:
    """Number of weights (the paper's text says about 200 thousand; its own architecture has about 17 thousand)."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
