"""DistillCache's learning: the KL between the full-cache model and a student with an evicted cache, as a loss.

Two estimators of its gradient. REINFORCE with students of sampled keep-sets (Althoubi, arXiv 2608.08878): where the paper is
silent or contradicts itself the choice is a field of `DistillConfig`. And a relaxed keep-set (`dcache.relaxed`), through
which the KL is differentiated: one student a step and no sampling noise, so that every layer and head can have a keep-set
of its own.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from dcache import cache as kv
from dcache import model, subset
from dcache.budget import tokens_kept
from dcache.config import ModelConfig
from dcache.errors import ConfigError
from dcache.learn import policy_gradient as pg
from dcache.learn.learner import PromptLearner
from dcache.learn.state import LearnConfig, TrainState, advance, start
from dcache.policies.distillcache import DistillCache
from dcache.rollout import (
    Decisions,
    Trajectories,
    check_schedule,
    relaxed_student,
    sample_students,
    teacher_log_probs,
)


@dataclasses.dataclass(frozen=True)
class DistillConfig(LearnConfig):
    """Everything that the learning rule depends on, beside `LearnConfig`. Defaults are the paper's where it gives a value.

    Attributes:
      horizon: T, continuation tokens. evict_every: tokens between evictions (the paper:
        1); 0 evicts once, after the prefill.
      samples: K, keep-sets drawn per prompt; at least 2 use the leave-one-out baseline, 1 uses the moving average.
      ratios: budget ratios; one is drawn per step. minimum: B_min.
      estimator: "reinforce" as the paper, or "relaxed" (any granularity; one eviction, after the prefill).
      law: keep-set distribution, see `dcache.subset`.
      gamma: discount per token. entropy_bonus: beta. entropy_form: "score" adds the centred, detached surprise per kept
        token to the return (the score-function gradient of the entropy); "direct" differentiates the surprise itself, as
        the paper writes it (zero mean: pure noise).
      baseline_decay: decay of the moving average of the return. standardise: divide advantages by their standard deviation.
      temperature, final_temperature: of the relaxed keep-set, from the first step to the last, falling geometrically.
      straight_through: the relaxed student keeps what will be kept; only the way back is relaxed.
    """

    horizon: int = 64
    evict_every: int = 1
    samples: int = 8
    ratios: tuple[float, ...] = (0.5, 0.25, 0.125)
    minimum: int = 32
    estimator: Literal["reinforce", "relaxed"] = "reinforce"
    law: subset.Law = "plackett_luce"
    gamma: float = 0.99
    entropy_bonus: float = 0.01
    entropy_form: str = "score"
    baseline_decay: float = 0.95
    standardise: bool = False
    temperature: float = 1.0
    final_temperature: float = 1.0
    straight_through: bool = True

    def __post_init__(self):
        super().__post_init__()
        subset.check_law(self.law)
        check_schedule(self.horizon, self.evict_every)
        if self.samples < 1:
            raise ConfigError(f"samples is {self.samples}; draw at least 1 keep-set per prompt.")
        if not self.ratios or not all(0.0 < r <= 1.0 for r in self.ratios):
            raise ConfigError(f"ratios are {self.ratios}; give one or more budget ratios in (0, 1].")
        if self.entropy_form not in ("score", "direct"):
            raise ConfigError(f"entropy_form is {self.entropy_form!r}; use 'score' or 'direct'.")
        if self.estimator not in ("reinforce", "relaxed"):
            raise ConfigError(f"estimator is {self.estimator!r}; use 'reinforce' or 'relaxed'.")
        if self.estimator == "relaxed" and self.evict_every:
            raise ConfigError(
                f"evict_every is {self.evict_every}; the relaxed estimator evicts once, after the prefill: set it to 0."
            )
        if not 0.0 < self.final_temperature <= self.temperature:
            raise ConfigError(
                f"temperature is {self.temperature} and final_temperature {self.final_temperature}; give positive ones, the "
                "final one not above the other."
            )

    def check(self, policy):
        """Raises ConfigError where REINFORCE would have to choose for every layer or head."""
        if policy.granularity != "sequence" and self.estimator != "relaxed":
            raise ConfigError(
                f"policy.granularity is {policy.granularity!r} with learn.estimator {self.estimator!r}; REINFORCE "
                "trains 'sequence' policies, the 'relaxed' estimator all."
            )

    @property
    def every(self) -> int:
        """Tokens between two decisions, the horizon if there is only one."""
        return self.evict_every or self.horizon


def init_state(key: Array, policy: DistillCache, config: DistillConfig) -> TrainState:
    """A fresh state: weights from `key`, step 0."""
    return start(policy.init(key), config)


def decision_log_probs(policy: DistillCache, params: Any, rolled: Decisions, law: subset.Law, most: int) -> Array:
    """Log-probability of every decision under the policy's current weights: f32[A, D], differentiable in `params`."""
    scores = policy.scores_of(params, rolled.features)  # [D, A, S]
    per_sample = jax.vmap(lambda s, o, f, b: subset.log_prob(law, s, o, f, b, most))
    return jax.vmap(per_sample)(scores, rolled.order, rolled.filled, rolled.budget).T


def advantages(
    rolled: Decisions, weight: Array, log_probs: Array, baseline: Array, config: DistillConfig
) -> tuple[Array, Array]:
    """Advantages f32[A, D] and returns f32[A, D] of sampled students.

    `weight` f32[T] is 0 where a token's reward does not count; `log_probs` f32[A, D] are used as constants.
    """
    returns = pg.discounted_returns(-rolled.kl * weight[None], config.gamma, config.every)
    value = returns
    if config.entropy_form == "score":
        surprise = -jax.lax.stop_gradient(log_probs) / rolled.budget.T.astype(jnp.float32)
        value = value + config.entropy_bonus * surprise
    value = pg.leave_one_out(value) if config.samples > 1 else value - baseline
    if config.standardise:
        value = value / jnp.maximum(jnp.std(value, axis=0, keepdims=True), 1e-6)
    return value, returns


def train_step(
    state: TrainState, params: model.Params, trajectories: Trajectories, index: Array, key: Array, *,
    model_config: ModelConfig, policy: DistillCache, config: DistillConfig, most: int,
) -> tuple[TrainState, dict[str, Array]]:  # fmt: skip
    """One update on one prompt.

    Args:
      state: donated. params: the frozen language model, stacked. trajectories: of a batch of prompts.
      index: int32 scalar, which of them. key: random key of the run; the step is folded in.
      most: static upper bound of the budgets.

    Returns:
      The new state and metrics (f32 scalars): reward (mean return), kl, ratio, grad_norm, baseline; with REINFORCE also
      kl_deviation (over samples) and surprise (-log pi per kept token), relaxed also temperature.
    """
    key_ratio, key_sample = jax.random.split(jax.random.fold_in(key, state.step))
    ratio = jax.random.choice(key_ratio, jnp.asarray(config.ratios, jnp.float32))
    cache = kv.select(trajectories.cache, index)
    continuation, weight = trajectories.continuation[index], trajectories.weight[index]
    teacher = teacher_log_probs(params, model_config, cache, continuation)
    student = (params, model_config, policy)
    if config.estimator == "relaxed":
        grads, found = _relaxed_gradient(state, student, cache, continuation, weight, teacher, ratio, config)
    else:
        grads, found = _reinforce_gradient(
            state, student, cache, continuation, weight, teacher, ratio, key_sample, config, most
        )
    decay = jnp.where(state.step == 0, 0.0, config.baseline_decay)
    baseline = decay * state.baseline + (1.0 - decay) * found["reward"]
    new = dataclasses.replace(advance(state, grads, config), baseline=baseline)
    return new, {**found, "ratio": ratio, "grad_norm": optax.tree.norm(grads), "baseline": new.baseline}


def _counted_mean(kl: Array, weight: Array) -> Array:
    """Mean over the tokens that count: kl f32[..., T], weight f32[T] -> f32[...]."""
    return jnp.sum(kl * weight, axis=-1) / jnp.maximum(jnp.sum(weight), 1.0)


def _reinforce_gradient(state, student, cache, continuation, weight, teacher, ratio, key, config, most):
    """Gradient of the REINFORCE surrogate, and the metrics of its students."""
    params, model_config, policy = student
    rolled = sample_students(
        params, model_config, policy, state.params, cache, continuation, teacher, ratio, key,
        samples=config.samples, evict_every=config.evict_every, law=config.law, minimum=config.minimum, most=most,
    )  # fmt: skip

    def loss_of(policy_params):
        log_probs = decision_log_probs(policy, policy_params, rolled, config.law, most)
        advantage, returns = advantages(rolled, weight, log_probs, state.baseline, config)
        loss = pg.reinforce_loss(log_probs, advantage)
        if config.entropy_form == "direct":
            loss = loss + config.entropy_bonus * jnp.mean(jnp.sum(log_probs, axis=1))
        return loss, (log_probs, returns)

    grads, (log_probs, returns) = jax.grad(loss_of, has_aux=True)(state.params)
    kl = _counted_mean(rolled.kl, weight[None])
    return grads, {
        "reward": jnp.mean(returns[:, 0]),
        "kl": jnp.mean(kl),
        "kl_deviation": jnp.std(kl),
        "surprise": jnp.mean(-log_probs / rolled.budget.T.astype(jnp.float32)),
    }


def _relaxed_gradient(state, student, cache, continuation, weight, teacher, ratio, config):
    """Gradient of the mean KL of the relaxed student, and its metrics."""
    params, model_config, policy = student
    done = state.step.astype(jnp.float32) / config.steps
    temperature = config.temperature * (config.final_temperature / config.temperature) ** done

    def loss_of(policy_params):
        kl = relaxed_student(
            params, model_config, policy, policy_params, cache, continuation, teacher, ratio, temperature,
            straight_through=config.straight_through, minimum=config.minimum,
        )  # fmt: skip
        return _counted_mean(kl, weight), kl

    (loss, kl), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    returns = pg.discounted_returns(-(kl * weight)[None], config.gamma, config.every)
    return grads, {"reward": returns[0, 0], "kl": loss, "temperature": temperature}


Config = DistillConfig


class Learner(PromptLearner):
    """DistillCache in the training loop."""

    step = staticmethod(train_step)

    def static(self):
        """The largest budget."""
        learn, data = self.experiment.learn, self.experiment.data
        return {"most": max(tokens_kept(r, data.length + learn.horizon, learn.minimum) for r in learn.ratios)}

    def tokens_read(self, prompt):
        """Prompt and continuation by the teacher, the continuation by every student."""
        learn = self.experiment.learn
        return len(prompt.tokens) + (1 + learn.samples) * learn.horizon
