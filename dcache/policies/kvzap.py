"""KVzap: KVzip's score predicted from hidden states, so that the context need not be read twice."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from dcache import cache as kv
from dcache.attention import StatsRequest
from dcache.errors import ConfigError
from dcache.policies import reader
from dcache.policies.base import (
    Policy,
    Scope,
    check_scope,
    later,
    most_shared,
    per_kv_head,
    recent,
    shared_counts,
    statistics,
)

# Where KVzip's log scores lie and how far they spread, so that the network starts near them with weights of ordinary size.
_LOCATION, _SPREAD = -6.0, 3.0
_WINDOW = 128


def predict(weights: Any, hidden: Array) -> Array:
    """Log scores f32[L, B, K, S] of hidden states [B, L, S, D]."""
    return _LOCATION + _SPREAD * reader.read(weights, hidden)


@dataclasses.dataclass(frozen=True)
class KVzap(Policy):
    """The logarithm of KVzip's score, predicted by a small network per layer from what enters the layer's attention.

    Jegou and Jeblick, arXiv 2601.07891; trained by `dcache.learn.kvzap`. The paper keeps what scores above a threshold; here
    as many tokens stay as the budget allows, by default one budget for all heads, which is what a threshold amounts to.
    The prediction is made while the prompt is read; tokens that come later stay. The hidden states get a LayerNorm first.

    Attributes:
      heads: (L, K) of the model. width: D of the model. hidden: units of the network's hidden layer (the paper: D / 8), 0 for
        a linear prediction.
      window: most recent tokens, which stay; None for the paper's 128, or a quarter of the budget if that is less.
      scope: which heads share a budget: "model", "layer" or "head" (none).
    """

    name = "kvzap"
    summary = "KVzip's score predicted from hidden states by a small network per layer; trained"
    paper = "arXiv 2601.07891"
    granularity = "head"
    learner = "dcache.learn.kvzap"
    looks = True

    heads: tuple[int, ...] = (30, 3)
    width: int = 576
    hidden: int = 72
    window: int | None = None
    scope: Scope = "model"

    def __post_init__(self):
        check_scope(self)
        if len(self.heads) != 2 or min(self.heads) < 1 or self.width < 1 or self.hidden < 0:
            raise ConfigError(
                f"kvzap: heads is {self.heads}, width {self.width}, hidden {self.hidden}; give (layers, key/value heads per "
                "layer) and the width of the model, and a hidden size of 0 or more."
            )
        if self.window is not None and self.window < 0:
            raise ConfigError(f"kvzap: window is {self.window}; give 0 or more, or None.")

    @property
    def needs(self):
        """Hidden states while the prompt is read, then the prediction."""
        return StatsRequest(hidden=True, extra=("kvzap",))

    def init(self, key: Array) -> Any:
        """Fresh weights, float32: the first prediction is the same for every token."""
        return reader.init(key, self.heads, self.width, self.hidden)

    def check_model(self, config):
        """Raises ConfigError for a model of another shape."""
        shape = (config.num_layers, config.num_kv_heads)
        if self.heads != shape or self.width != config.embed_dim:
            raise ConfigError(
                f"This kvzap is for {self.heads[0]} layers of {self.heads[1]} key/value heads and width {self.width}; "
                f"the model has {shape[0]} of {shape[1]} and width {config.embed_dim}. Train one for it."
            )

    def observe(self, weights, params, config, cache, tokens, continuation):
        """Predicts the scores of the prompt's tokens."""
        del params, tokens, continuation
        self.check_model(config)
        return kv.with_extra(cache, "kvzap", predict(weights, cache.hidden))

    def scores(self, params, cache, key):
        """The prediction."""
        del params, key
        predicted = statistics(cache, lambda stats: stats.extra["kvzap"])
        return per_kv_head(jnp.where(jnp.isinf(predicted), 0.0, predicted), cache)

    def fit(self, budget):
        """Fills in the window."""
        return Policy.fit(dataclasses.replace(self, window=self.protected_tokens(budget)), budget)

    def protects(self, cache, budget):
        """The window, and what came after the prompt."""
        default = jnp.minimum(_WINDOW, budget // 4)
        window = default if self.window is None else jnp.full_like(budget, self.window)
        return recent(cache, "head", window) | later(cache, "kvzap", "head")

    def protected_tokens(self, budget):
        """The window."""
        return min(_WINDOW, budget // 4) if self.window is None else self.window

    def allocate(self, params, cache, scores, filled, budget, protected):
        """By the scores of all heads that share a budget."""
        equal = super().allocate(params, cache, scores, filled, budget, protected)
        return equal if self.scope == "head" else shared_counts(scores, filled, equal, protected, self.scope)

    def most_kept(self, budget, seen, config):
        """All tokens of a head, if those that share its budget keep little."""
        return most_shared(budget, seen, config, self.scope)
