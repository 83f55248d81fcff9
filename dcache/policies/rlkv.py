"""RLKV: a few heads keep everything, the others only sinks and recent tokens; trained by `dcache.learn.rlkv`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dcache.config import ModelConfig
from dcache.errors import ConfigError
from dcache.policies.base import Policy, Trained, slot_positions

FULL_SHARE = (2, 5)
"""Numerator and denominator of the share of a small budget that full heads get, as tokens: 0.4."""


@dataclasses.dataclass(frozen=True)
class RLKV(Policy):
    """Heads with the largest gates keep all tokens, every other head its first and its most recent ones.

    arXiv 2510.08525. The weights are `{"gates": f32[L, K]}`, the gates themselves, in [0, 1] (no logits). As many heads are
    full as the budget pays for when every other head keeps `sinks + recent` tokens, the paper's window. Where that leaves
    full heads less than 0.4 of the budget (small budgets, about which the paper is silent), they get 0.4 of it, and the
    windows shrink, sinks and recent tokens in proportion. What does not pay for another full head makes the windows longer:
    the mean over heads is the budget.

    A fixed-shape cache gives every head as many slots as a full one needs: `generate` reports that no memory is saved.

    Attributes:
      heads: (L, K) of the model that the gates belong to; the default is SmolLM2-135M's.
      sinks, recent: first and most recent tokens of a head that is not full (the paper's values at evaluation).
    """

    name = "rlkv"
    summary = "heads of the largest learned gates keep all tokens, the others sinks and recent ones"
    paper = "arXiv 2510.08525"
    granularity = "head"
    learner = "dcache.learn.rlkv"

    heads: tuple[int, ...] = (30, 3)
    sinks: int = 16
    recent: int = 64

    def __post_init__(self):
        check_heads(self)
        if self.sinks < 1 or self.recent < 1:
            raise ConfigError(f"rlkv: sinks is {self.sinks} and recent {self.recent}; give 1 or more of each.")

    def init(self, key: Array) -> Any:
        """Every gate at 1: training starts from the model as it is."""
        del key
        return {"gates": jnp.ones(self.heads, jnp.float32)}

    def check_model(self, config):
        """Raises ConfigError for a model of another shape."""
        check_gates(self, config)

    def observe(self, weights, params, config, cache, tokens, continuation):
        """Refuses a model of another shape."""
        del weights, params, tokens, continuation
        self.check_model(config)
        return cache

    def scores(self, params, cache, key):
        """Sinks and recent tokens in turn, in proportion to how many there are; after the window by recency alone."""
        del params, key
        position = slot_positions(cache, "head").astype(jnp.float32)
        age = (cache.length - 1).astype(jnp.float32)[None, :, None, None] - position
        as_recent = -(age + 0.5) / self.recent
        as_sink = jnp.where((position >= 0) & (position < self.sinks), -position / self.sinks, -jnp.inf)
        return jnp.maximum(as_recent, as_sink)

    def full_heads(self, budget: Array, seen: Array) -> Array:
        """How many heads keep everything: int32[B] of budget int32[B] and tokens seen int32[B]."""
        total, window = self.heads[0] * self.heads[1], self.sinks + self.recent
        budget = jnp.minimum(budget, seen)
        spare = total * jnp.maximum(budget - window, 0) // jnp.maximum(seen - window, 1)
        return jnp.maximum(spare, at_most(FULL_SHARE, budget, seen, total))

    def allocate(self, params, cache, scores, filled, budget, protected):
        """Full heads get all they hold, the others share what is left."""
        del scores, protected
        full = largest(params["gates"], self.full_heads(budget, cache.length))
        return shares(params["gates"], full, jnp.sum(filled, axis=-1, dtype=jnp.int32), budget)

    def most_kept(self, budget, seen, config):
        """All of them: a full head."""
        del budget, config
        return seen


def shuffled(trained: Trained, key: Array) -> Trained:
    """A trained policy with its gates given to random heads: the control that shows whether it matters which heads they are."""
    gates = trained.params["gates"]
    return Trained(trained.policy, {"gates": jax.random.permutation(key, gates.reshape(-1)).reshape(gates.shape)})


def check_heads(policy: Any) -> None:
    """Raises ConfigError if `heads` is not (layers, key/value heads per layer)."""
    if len(policy.heads) != 2 or min(policy.heads) < 1:
        raise ConfigError(
            f"{policy.name}: heads is {policy.heads}; give (layers, key/value heads per layer) of the model."
        )


def check_gates(policy: Any, config: ModelConfig) -> None:
    """Raises ConfigError if the gates of a policy do not fit a model."""
    shape = (config.num_layers, config.num_kv_heads)
    if policy.heads != shape:
        raise ConfigError(
            f"This {policy.name} has gates for {policy.heads[0]} layers of {policy.heads[1]} key/value heads; the model has "
            f"{shape[0]} of {shape[1]}. Train one for it."
        )


def at_most(share: tuple[int, int], budget: Array, seen: Array, total: int) -> Array:
    """How many of `total` heads can keep all tokens for a share (a fraction of integers) of the budget: int32[B], rounded down.

    Args:
      budget: int32[B], mean tokens per head. seen: int32[B], tokens that a full head keeps.
    """
    return share[0] * total * budget // (share[1] * seen)


def largest(gates: Array, count: Array) -> Array:
    """The `count` (int32[B]) heads of the largest gates f32[L, K], of equal ones the first: bool[L, B, K]."""
    return rank(gates)[:, None] < count[None, :, None]


def rank(gates: Array) -> Array:
    """int32[L, K]: place of every gate f32[L, K] in descending order, 0 for the largest."""
    order = jnp.argsort(-gates.reshape(-1), stable=True)
    return jnp.argsort(order).astype(jnp.int32).reshape(gates.shape)


def shares(gates: Array, full: Array, held: Array, budget: Array) -> Array:
    """Tokens of each head, int32[L, B, K]: full heads all that they hold, the others equal parts of the rest.

    What cannot be divided goes to those of the largest gates, one token each, so that all heads together get L * K * budget.

    Args:
      gates: f32[L, K]. full: bool[L, B, K]. held: int32[L, B, K], tokens that a head holds. budget: int32[B].
    """
    taken = jnp.sum(jnp.where(full, held, 0), axis=(0, 2))
    count = jnp.sum(full, axis=(0, 2), dtype=jnp.int32)
    rest, others = gates.size * budget - taken, jnp.maximum(gates.size - count, 1)
    more = rank(gates)[:, None] - count[None, :, None] < (rest % others)[None, :, None]
    return jnp.where(full, held, (rest // others)[None, :, None] + more.astype(jnp.int32))
