"""DistillCache's learning: the KL between the full-cache model and a student with an evicted cache, as a loss.

Two estimators of its gradient. REINFORCE with students of sampled keep-sets (Althoubi, arXiv 2608.08878): where the paper is
silent or contradicts itself the choice is a field of `DistillConfig`. And a relaxed keep-set (`dcache.relaxed`), through
which the KL is differentiated: one student a step and no sampling noise, so that every layer and head can have a keep-set
of its own.

What the paper compares its reward with is here too: a ranker supervised by the attention of the text to come (Table 10), and
two rewards made from that attention (Table 6). None of them runs a student.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from dcache import cache as kv
from dcache import checkpoint, model, signals, subset
from dcache.budget import keep_top, tokens_kept, tokens_kept_traced
from dcache.config import ModelConfig
from dcache.errors import ConfigError
from dcache.learn import policy_gradient as pg
from dcache.learn.learner import PromptLearner
from dcache.learn.state import LearnConfig, TrainState, advance, start
from dcache.policies.distillcache import DistillCache
from dcache.policies.kvzap import KVzap
from dcache.policies.oracle import Oracle
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
      question: whether the policy sees the question of a retrieval prompt: "seen", "hidden" (it is fed after the eviction, and
        what counts begins after its last token), or "both", in turn from block to block. horizon: T, continuation tokens.
      evict_every: tokens between evictions (the paper:
        1); 0 evicts once, after the prefill.
      samples: K, keep-sets drawn per prompt; at least 2 use the leave-one-out baseline, 1 uses the moving average.
      ratios: budget ratios; one is drawn per step. minimum: B_min.
      estimator: "reinforce" as the paper, "relaxed" (any granularity; one eviction, after the prefill), or "ranker": logistic
        loss on all pairs of a token that belongs to the B of most future attention and one that does not.
      reward: of REINFORCE: "kl" as the paper, "contribution" (share of the attention of the next `horizon` tokens that goes to
        what was kept; the paper rolls out 8), or "ranking" (of a sampled ranking of all tokens: that share averaged over all
        budgets). Attention is the full cache's, averaged over layers and heads.
      law: keep-set distribution, see `dcache.subset`.
      gamma: discount per token. entropy_bonus: beta. entropy_form: "score" adds the centred, detached surprise per kept
        token to the return (the score-function gradient of the entropy); "direct" differentiates the surprise itself, as
        the paper writes it (zero mean: pure noise).
      baseline_decay: decay of the moving average of the return. standardise: divide advantages by their standard deviation.
      temperature, final_temperature: of the relaxed keep-set, from the first step to the last, falling geometrically.
      start: folder of a trained `kvzap` policy, or of its run, from whose network a policy that reads hidden states (`reads`)
        starts; "" for a fresh one. reader_rate: learning rate of that network, as a multiple of the others'.
      straight_through: the relaxed student keeps what will be kept; only the way back is relaxed.
    """

    question: Literal["seen", "hidden", "both"] = "seen"
    horizon: int = 64
    evict_every: int = 1
    samples: int = 8
    ratios: tuple[float, ...] = (0.5, 0.25, 0.125)
    minimum: int = 32
    estimator: Literal["reinforce", "relaxed", "ranker"] = "reinforce"
    reward: Literal["kl", "contribution", "ranking"] = "kl"
    law: subset.Law = "plackett_luce"
    gamma: float = 0.99
    entropy_bonus: float = 0.01
    entropy_form: str = "score"
    baseline_decay: float = 0.95
    standardise: bool = False
    temperature: float = 1.0
    final_temperature: float = 1.0
    straight_through: bool = True
    start: str = ""
    reader_rate: float = 0.1

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
        if self.question not in ("seen", "hidden", "both") or (self.question != "seen" and self.evict_every):
            raise ConfigError(
                f"question is {self.question!r} with evict_every {self.evict_every}; use 'seen', 'hidden' or 'both', the last "
                "two with one eviction (0)."
            )
        if self.estimator not in ("reinforce", "relaxed", "ranker"):
            raise ConfigError(f"estimator is {self.estimator!r}; use 'reinforce', 'relaxed' or 'ranker'.")
        if self.reward not in ("kl", "contribution", "ranking"):
            raise ConfigError(f"reward is {self.reward!r}; use 'kl', 'contribution' or 'ranking'.")
        if self.reward != "kl" and self.estimator != "reinforce":
            raise ConfigError(
                f"reward is {self.reward!r} with estimator {self.estimator!r}; only 'reinforce' has a reward."
            )
        if self.evict_every and (self.estimator != "reinforce" or self.reward != "kl"):
            raise ConfigError(
                f"evict_every is {self.evict_every}; estimator {self.estimator!r} with reward {self.reward!r} evicts once, "
                "after the prefill: set it to 0."
            )
        if self.reward != "kl" and self.samples < 2:
            raise ConfigError(
                f"samples is {self.samples}; reward {self.reward!r} needs at least 2, each other's baseline."
            )
        if not 0.0 < self.final_temperature <= self.temperature:
            raise ConfigError(
                f"temperature is {self.temperature} and final_temperature {self.final_temperature}; give positive ones, the "
                "final one not above the other."
            )

    def check(self, policy):
        """Raises ConfigError where REINFORCE or the ranker would choose for every layer or head, or `start` has no use."""
        if self.start and not policy.reads:
            raise ConfigError(
                f"learn.start is {self.start!r}, but policy.reads is (): only what reads hidden states starts from a policy."
            )
        if policy.granularity != "sequence" and self.estimator != "relaxed":
            raise ConfigError(
                f"policy.granularity is {policy.granularity!r} with learn.estimator {self.estimator!r}; REINFORCE and the "
                "ranker train 'sequence' policies, the 'relaxed' estimator all."
            )

    @property
    def foresees(self) -> bool:
        """Whether it learns from the attention of the text to come in place of the KL."""
        return self.estimator == "ranker" or self.reward != "kl"


def init_state(key: Array, policy: DistillCache, config: DistillConfig) -> TrainState:
    """A fresh state: weights from `key`, step 0."""
    return start(policy.init(key), config)


def largest_budget(config: DistillConfig, length: int) -> int:
    """The most tokens that any decision keeps after prompts of at most `length` tokens."""
    return max(tokens_kept(ratio, length + config.horizon, config.minimum) for ratio in config.ratios)


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
    returns = pg.discounted_returns(-rolled.kl * weight[None], config.gamma, config.evict_every or rolled.kl.shape[1])
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
      kl_deviation (over samples) and surprise (-log pi per kept token), relaxed also temperature. Without students there is
      no kl; the reward is the share of future attention, and the ranker's loss is there.
    """
    key_ratio, key_sample = jax.random.split(jax.random.fold_in(key, state.step))
    ratio = jax.random.choice(key_ratio, jnp.asarray(config.ratios, jnp.float32))
    cache = kv.select(trajectories.cache, index)
    continuation, weight = trajectories.continuation[index], trajectories.weight[index]
    student = (params, model_config, policy)
    if config.foresees:
        grads, found = _foreseen_gradient(state, policy, cache, ratio, key_sample, config, most)
    elif config.estimator == "relaxed":
        teacher = teacher_log_probs(params, model_config, cache, continuation)
        grads, found = _relaxed_gradient(state, student, cache, continuation, weight, teacher, ratio, config)
    else:
        teacher = teacher_log_probs(params, model_config, cache, continuation)
        grads, found = _reinforce_gradient(
            state, student, cache, continuation, weight, teacher, ratio, key_sample, config, most
        )
    decay = jnp.where(state.step == 0, 0.0, config.baseline_decay)
    baseline = decay * state.baseline + (1.0 - decay) * found["reward"]
    rates = {"reader": config.reader_rate} if policy.reads else None
    new = dataclasses.replace(advance(state, grads, config, rates), baseline=baseline)
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
    returns = pg.discounted_returns(-(kl * weight)[None], config.gamma, kl.shape[0])
    return grads, {"reward": returns[0, 0], "kl": loss, "temperature": temperature}


def _foreseen_gradient(state, policy, cache, ratio, key, config, most):
    """Gradient and metrics of what learns from the attention that the text to come pays."""
    filled = signals.filled(cache)[0]
    future = Oracle(granularity="sequence").scores((), cache, key)[0]  # its own key is not used
    share = jnp.where(filled, future, 0.0) / jnp.maximum(jnp.sum(jnp.where(filled, future, 0.0)), 1e-20)
    budgets = tokens_kept_traced(ratio, cache.length, config.minimum)
    features, budget = policy.features(cache, budgets)[0], budgets[0]
    if config.estimator == "ranker":
        best = keep_top(share, filled, budget)

        def loss_of(policy_params):
            scores = policy.scores_of(policy_params, features)
            return pairwise_loss(scores, best, filled & ~best), keep_top(scores, filled, budget)

        (loss, kept), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return grads, {"loss": loss, "reward": jnp.sum(jnp.where(kept, share, 0.0))}
    count = jnp.sum(filled, dtype=jnp.int32) if config.reward == "ranking" else budget
    scores = policy.scores_of(state.params, features)
    keys = jax.random.split(key, config.samples)
    order = jax.vmap(lambda k: subset.sample("plackett_luce", k, scores, filled, count, most))(keys)
    if config.reward == "ranking":
        rewards = ranking_reward(order, share, count)
    else:
        rewards = kept_share(jnp.argsort(order, axis=1), share, budget)

    def surrogate(policy_params):
        scores = policy.scores_of(policy_params, features)
        log_prob = jax.vmap(lambda o: subset.log_prob("plackett_luce", scores, o, filled, count, most))(order)
        surprise = -jax.lax.stop_gradient(log_prob) / count.astype(jnp.float32)
        value = pg.leave_one_out(rewards + config.entropy_bonus * surprise)
        return pg.reinforce_loss(log_prob[:, None], value[:, None]), surprise

    grads, surprise = jax.grad(surrogate, has_aux=True)(state.params)
    return grads, {"reward": jnp.mean(rewards), "surprise": jnp.mean(surprise)}


def pairwise_loss(scores: Array, better: Array, worse: Array) -> Array:
    """Mean of log(1 + exp(s_j - s_i)) over all pairs of a better token i and a worse one j (RankNet).

    Args:
      scores: f32[S]. better, worse: bool[S].
    """
    pair = (better[:, None] & worse[None]).astype(jnp.float32)
    loss = jax.nn.softplus(scores[None] - scores[:, None])
    return jnp.sum(pair * loss) / jnp.maximum(jnp.sum(pair), 1.0)


def kept_share(rank: Array, share: Array, budget: Array) -> Array:
    """Share of the attention that goes to the first `budget` tokens: rank int32[A, S], share f32[S] -> f32[A]."""
    return jnp.sum(jnp.where(rank < budget, share[None], 0.0), axis=1)


def ranking_reward(order: Array, share: Array, count: Array) -> Array:
    """`kept_share` averaged over the budgets 1 to `count`: order int32[A, S], share f32[S] of sum 1 -> f32[A]."""
    cost = jax.vmap(pg.ranking_cost, in_axes=(None, 0))(share, order)
    return 1.0 - cost / count.astype(jnp.float32)


Config = DistillConfig


class Learner(PromptLearner):
    """DistillCache in the training loop."""

    step = staticmethod(train_step)

    def __init__(self, experiment, workdir, load):
        """Reads the policy that training starts from.

        Raises:
          ConfigError: it is none that fits.
        """
        super().__init__(experiment, workdir, load)
        self.reader: Any = ()
        if experiment.learn.start:
            policy, found = experiment.policy, checkpoint.load_policy(experiment.learn.start)
            wanted = (KVzap.name, policy.heads, policy.reads)
            given = (found.policy.name, *(getattr(found.policy, name, ()) for name in ("heads", "width", "hidden")))
            if given != (wanted[0], wanted[1], *wanted[2]):
                raise ConfigError(
                    f"learn.start holds {found.policy}; policy.heads is {policy.heads} and policy.reads {policy.reads}: give a "
                    "kvzap policy with these heads, width and hidden units."
                )
            self.reader = jax.tree.map(jnp.asarray, found.params)
            self.identity["start"] = checkpoint.weights_digest(found.params)

    def init(self, key):
        """Fresh weights; those that read hidden states from where training starts."""
        weights = self.experiment.policy.init(key)
        if self.reader:
            weights = {**weights, "reader": jax.tree.map(jnp.copy, self.reader)}
        return start(weights, self.experiment.learn)

    def observers(self):
        """The policy, and the oracle where the method learns from what it sees."""
        foreseen = (Oracle(granularity="sequence"),) if self.experiment.learn.foresees else ()
        return (self.experiment.policy, *foreseen)

    def hides(self, number):
        """Every block, none, or every other one."""
        question = self.experiment.learn.question
        return question == "hidden" or (question == "both" and number % 2 == 1)

    def static(self):
        """The largest budget."""
        return {"most": largest_budget(self.experiment.learn, self.experiment.data.length)}

    def tokens_read(self, prompt):
        """Prompt and continuation by the teacher, the continuation by every student."""
        learn = self.experiment.learn
        students = 0 if learn.foresees else 1 if learn.estimator == "relaxed" else learn.samples
        return len(prompt.tokens) + (1 + students) * learn.horizon
