"""What all learned methods share: the state of a run, its optimiser, and one update of it."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from dcache.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class LearnConfig:
    """The optimiser's part of every learning rule: clipping, AdamW, linear warm-up, then cosine decay.

    Attributes:
      steps: updates. learning_rate, warmup_steps, final_rate: linear warm-up, then cosine to `final_rate` times the peak.
      weight_decay, clip_norm: of AdamW and of the gradient.
      average: decay of the moving average of the weights, which is the trained policy (Polyak averaging: the updates are
        noisy, their mean is less so); 0 takes the last weights.
    """

    steps: int = 10_000
    learning_rate: float = 3e-4
    warmup_steps: int = 500
    final_rate: float = 0.0
    weight_decay: float = 1e-4
    clip_norm: float = 1.0
    average: float = 0.0

    def __post_init__(self):
        if self.steps < 1:
            raise ConfigError(f"steps is {self.steps}; train for 1 or more.")
        if not 0 <= self.warmup_steps < self.steps:
            raise ConfigError(f"warmup_steps is {self.warmup_steps} of {self.steps} steps; warm up for fewer than all.")
        if not 0.0 <= self.average < 1.0:
            raise ConfigError(f"average is {self.average}; give a decay in [0, 1).")

    def check(self, policy: Any) -> None:
        """Raises ConfigError if this rule cannot train the policy."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that changes during training, one pytree, donated from step to step.

    Attributes:
      params: policy weights. average: their moving average, what is saved as the trained policy.
      opt_state: of the optimiser. step: int32 scalar, updates done = position in the data.
      baseline: f32 scalar, moving average of the reward for methods that use one, 0 for others.
    """

    params: Any
    average: Any
    opt_state: Any
    step: Array
    baseline: Array


def optimiser(config: LearnConfig) -> optax.GradientTransformation:
    """Clipping, then AdamW with warm-up and cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.steps,
        end_value=config.learning_rate * config.final_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm), optax.adamw(schedule, weight_decay=config.weight_decay)
    )


def start(params: Any, config: LearnConfig) -> TrainState:
    """The state of a run before its first update."""
    average = jax.tree.map(jnp.copy, params)
    return TrainState(params, average, optimiser(config).init(params), jnp.int32(0), jnp.float32(0.0))


def advance(state: TrainState, grads: Any, config: LearnConfig, rates: Mapping[str, float] | None = None) -> TrainState:
    """The state after one update with these gradients; rates: multiples of the learning rate, where the top of the weights'
    tree has a part of that name.
    """
    with jax.numpy_dtype_promotion("standard"):  # optax raises Python floats to int32 powers
        updates, opt_state = optimiser(config).update(grads, state.opt_state, state.params)
    if rates:
        updates = {
            name: jax.tree.map(functools.partial(jnp.multiply, rates.get(name, 1.0)), part)
            for name, part in updates.items()
        }
    params = optax.apply_updates(state.params, updates)
    average = _moving_average(state.average, params, state.step, config.average)
    return TrainState(params, average, opt_state, state.step + 1, state.baseline)


def _moving_average(average: Any, params: Any, step: Array, decay: float) -> Any:
    """The plain mean of the weights so far until it spans 1 / (1 - decay) steps, then their moving average."""
    done = step.astype(jnp.float32)
    kept = jnp.minimum(decay, done / (done + 1.0))
    return jax.tree.map(lambda old, new: kept * old + (1.0 - kept) * new, average, params)
