"""KVzap's learning: regression of KVzip's log scores from hidden states, on prompts as the frozen model reads them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dcache import cache as kv
from dcache import model
from dcache.attention import StatsRequest
from dcache.budget import keep_top
from dcache.config import ModelConfig
from dcache.learn.learner import PromptLearner
from dcache.learn.state import LearnConfig, TrainState, advance
from dcache.policies.base import pooled
from dcache.policies.kvzap import KVzap, predict
from dcache.policies.kvzip import KVzip
from dcache.rollout import Trajectories

_SMALLEST = 1e-6  # of KVzip's scores, whose logarithm is learnt
_SHOWN = 0.25  # budget at which the log compares predicted and true keep-sets


@dataclasses.dataclass(frozen=True)
class KVzapConfig(LearnConfig):
    """The regression's settings, beside `LearnConfig`."""

    horizon: int = 1
    """Continuation tokens that the prompts are made with; nothing is learnt from them."""


def train_step(
    state: TrainState, params: model.Params, trajectories: Trajectories, index: Array, key: Array, *,
    model_config: ModelConfig, policy: KVzap, config: KVzapConfig,
) -> tuple[TrainState, dict[str, Array]]:  # fmt: skip
    """One update on one prompt, towards the logarithm of KVzip's scores.

    Args:
      trajectories: with KVzip's statistics and hidden states. index: int32 scalar, which prompt.

    Returns:
      The new state and metrics: loss (mean squared error), explained (share of the variance within a head), overlap (share of
      KVzip's tokens at 25%, one budget for all heads, that the prediction would keep too), grad_norm.
    """
    del params, key, model_config
    cache = kv.select(trajectories.cache, index)
    filled = kv.positions(cache) >= 0
    target = jnp.log(jnp.maximum(true_scores(cache), _SMALLEST))
    real = filled.astype(jnp.float32)

    def loss_of(weights: Any):
        predicted = predict(weights, cache.hidden)
        return jnp.sum(real * (predicted - target) ** 2) / jnp.sum(real), predicted

    (loss, predicted), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    count = jnp.sum(real, axis=-1, keepdims=True)
    centred = target - jnp.sum(real * target, axis=-1, keepdims=True) / count
    variance = jnp.sum(real * centred**2) / jnp.sum(real)
    size = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    return advance(state, grads, config), {
        "loss": loss,
        "explained": 1.0 - loss / variance,
        "overlap": _overlap(predicted, target, filled),
        "grad_norm": size,
    }


def true_scores(cache: kv.Cache) -> Array:
    """KVzip's scores f32[L, B, K, S] of a cache that KVzip has looked at."""
    return KVzip().scores((), cache, jax.random.key(0))


def _overlap(predicted: Array, target: Array, filled: Array) -> Array:
    """Share of the best quarter of all heads' tokens by `target` that is in the best quarter by `predicted`."""
    mask = pooled(filled, "model")
    count = jnp.floor(_SHOWN * jnp.sum(mask, axis=-1).astype(jnp.float32)).astype(jnp.int32)
    ours, theirs = (keep_top(pooled(x, "model"), mask, count) for x in (predicted, target))
    return jnp.mean(jnp.sum(ours & theirs, axis=-1).astype(jnp.float32) / count.astype(jnp.float32))


Config = KVzapConfig


class Learner(PromptLearner):
    """KVzap in the training loop: the teacher reads each prompt, and reads it again as KVzip does."""

    step = staticmethod(train_step)
    more = StatsRequest(hidden=True)

    def observers(self):
        """KVzip, whose scores are to be predicted."""
        return (KVzip(),)
