"""ForesightKV's learning: rank tokens by the attention that they will receive; then GRPO on the text that follows.

Dong et al., arXiv 2602.03203. The first stage replays golden evictions: after each block those tokens go that later blocks
look at least. The second samples evictions and rewards those after which confident predictions stay good. Both stages use the
statistics of attention over the full cache (see `ForesightKV`), so one reading of a prompt serves all replays; the authors'
code reads it again with each keep-set.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from dcache import budget as budgets
from dcache import cache as kv
from dcache import checkpoint, model
from dcache.attention import StatsRequest
from dcache.config import ModelConfig
from dcache.errors import ConfigError
from dcache.learn import policy_gradient as pg
from dcache.learn.learner import PromptLearner
from dcache.learn.state import LearnConfig, TrainState, advance, start
from dcache.policies.base import Policy
from dcache.policies.foresightkv import STATISTICS, ForesightKV, keep_best, layer_scores, look, replay
from dcache.rollout import Trajectories, teacher_log_probs

_RECEIVED, _FUTURE = "foresight/received", "foresight/future"
_TOTAL = 6  # place of the running sum among the statistics
_NEVER = -1e30  # score of a place in a draw that holds no token; finite, so that its gradient is 0 and not NaN


@dataclasses.dataclass(frozen=True)
class ForesightConfig(LearnConfig):
    """Everything that the learning depends on, beside `LearnConfig`. Defaults are the paper's first stage.

    One prompt makes one update (the paper: 4 in the first stage, 32 in the second).

    Attributes:
      stage: "ranking" or "grpo". start: folder of the policy of the first stage, from which "grpo" starts.
      horizon: T, continuation tokens: the last block that the labels look at, and the text whose loss is the reward.
      ratios: budget ratios; one is drawn per step. minimum: B_min.
      margin: of the ranking loss.
      samples: A, replays sampled per prompt. clip: of the ratio of probabilities.
      kl_weight, kl_steps: of the penalty for leaving the first stage, and for how many steps it holds.
      rise: nats; smaller rises of a token's loss are not punished. confident: share of the continuation that counts, the tokens
        before which the full-cache model has the lowest entropy.
    """

    steps: int = 1000
    learning_rate: float = 1e-2
    warmup_steps: int = 10
    weight_decay: float = 0.0
    stage: Literal["ranking", "grpo"] = "ranking"
    start: str = ""
    horizon: int = 64
    ratios: tuple[float, ...] = (0.25,)
    minimum: int = 32
    margin: float = 0.01
    samples: int = 8
    clip: float = 0.2
    kl_weight: float = 0.05
    kl_steps: int = 100
    rise: float = 1.5
    confident: float = 0.8

    def __post_init__(self):
        super().__post_init__()
        if self.stage not in ("ranking", "grpo"):
            raise ConfigError(f"stage is {self.stage!r}; use 'ranking' or 'grpo'.")
        if self.horizon < 2:
            raise ConfigError(f"horizon is {self.horizon}; give 2 or more continuation tokens.")
        if not self.ratios or not all(0.0 < r <= 1.0 for r in self.ratios):
            raise ConfigError(f"ratios are {self.ratios}; give one or more budget ratios in (0, 1].")
        if self.samples < 2:
            raise ConfigError(f"samples is {self.samples}; a group needs 2 or more.")
        if not 0.0 < self.confident <= 1.0:
            raise ConfigError(f"confident is {self.confident}; give a share in (0, 1].")


@dataclasses.dataclass(frozen=True)
class Trace(Policy):
    """Not a method: takes what both stages learn from, the statistics after each block and the continuation's attention."""

    name = "trace"

    block: int

    @property
    def needs(self):
        """Hidden states, and its own two."""
        return StatsRequest(hidden=True, extra=(_FUTURE, _RECEIVED))

    def observe(self, weights, params, config, cache, tokens, continuation):
        """Feeds the continuation to the full cache; takes the mean attention over its real tokens, per key/value head."""
        del weights, tokens

        def flat(found, k, v, position):
            del k, v, position
            rounds, b, n, s, _ = found.shape
            return found.transpose(1, 2, 0, 4, 3).reshape(b, n * rounds * STATISTICS, s)

        received = look(params, config, cache, self.block, flat)
        bare = kv.restrict(cache, StatsRequest())
        slots, real = kv.positions(cache).shape[-1], (continuation >= 0).astype(jnp.float32)
        real = real / jnp.maximum(jnp.sum(real, axis=1, keepdims=True), 1.0)

        def attention(probs, position):
            b, heads, _ = position.shape
            per_head = jnp.einsum("bnts,bt->bns", probs[..., :slots], real)
            return jnp.mean(per_head.reshape(b, heads, -1, slots), axis=2)

        grown = kv.grow(bare, continuation.shape[1])
        _, _, future = model.extend_watched(
            params, config, jnp.maximum(continuation, 0), grown, jnp.int32(slots), attention
        )
        cache = dataclasses.replace(cache, hidden=None)  # nobody looks after this one
        return kv.with_extra(kv.with_extra(cache, _RECEIVED, received), _FUTURE, future)


def received(cache: kv.Cache, block: int) -> Array:
    """The statistics that `Trace` took: f32[L, R, B, N, S, 8]."""
    flat = cache.layers.stats.extra[_RECEIVED]
    l, b, _, s = flat.shape
    return flat.reshape(l, b, -1, -(-s // block), STATISTICS, s).transpose(0, 3, 1, 2, 5, 4)


def scores_of(weights: Any, found: Array, cache: kv.Cache, block: int) -> Array:
    """Scores after each block, differentiable in the weights: f32[R, L, B, K, S]. found: see `received`."""
    layers = cache.layers

    def one(xs):
        own, seen, k, v, position = xs
        return layer_scores(own, seen, k, v, position, block)

    scores = jax.lax.map(one, (weights, found, layers.k, layers.v, layers.position))
    return scores.swapaxes(0, 1)


def golden_scores(found: Array, continuation: Array, length: Array, block: int) -> Array:
    """What later blocks will pay: after each block the maximum over those to come of their mean attention.

    Args:
      found: f32[L, R, B, N, S, 8], see `received`. continuation: f32[L, B, K, S], mean attention of the last block, which is
        the text that follows. length: int32[B], of the prompts.

    Returns:
      f32[R, L, B, K, S].
    """
    l, rounds, b, n, s, _ = found.shape
    heads = continuation.shape[2]
    total = jnp.mean(found[..., _TOTAL].reshape(l, rounds, b, heads, n // heads, s), axis=4).swapaxes(0, 1)
    edges = jnp.minimum(block * jnp.arange(rounds + 1, dtype=jnp.int32)[:, None], length[None])
    queries = jnp.maximum(jnp.diff(edges, axis=0), 1).astype(jnp.float32)
    fresh = total - jnp.concatenate([jnp.zeros_like(total[:1]), total[:-1]])
    per_block = fresh / queries[:, None, :, None, None]
    to_come = jnp.concatenate([per_block[1:], continuation[None]])
    return jax.lax.cummax(to_come, axis=0, reverse=True)


def pairwise_hinge(scores: Array, golden: Array, there: Array, margin: float) -> Array:
    """Mean over all pairs of different golden score of max(0, margin - (better's score - worse's)): f32[..., W] -> f32[...].

    There: bool[..., W], which tokens take part. 0 without such a pair.
    """
    better = (golden[..., :, None] > golden[..., None, :]) & there[..., :, None] & there[..., None, :]
    loss = jnp.maximum(margin - (scores[..., :, None] - scores[..., None, :]), 0.0)
    total = jnp.sum(jnp.where(better, loss, 0.0), axis=(-2, -1))
    return total / jnp.maximum(jnp.sum(better, axis=(-2, -1)), 1).astype(jnp.float32)


def ranking_loss(
    scores: Array, golden: Array, position: Array, budget: Array, *, block: int, margin: float, most: int
) -> tuple[Array, Array]:
    """Loss of scores along the golden replay, and the share of golden evictions that they would make too: f32 scalars.

    All pairs of tokens that compete count, not only those of an evicted and a kept one, as in the authors' code. Rounds in
    which nothing has to go do not count.

    Args:
      scores, golden: f32[R, L, B, K, S]. position: int32[L, B, K, S]. budget: int32[B], at most `most`.
    """

    def watched(score, competing, guarded, allowed):
        kept, _ = keep_best(score, competing, guarded, allowed)
        return kept, (competing & ~guarded, competing & ~kept)

    _, (older, gone) = replay(golden, position, jnp.zeros_like(position, bool), block, budget, watched)

    def one(xs):
        score, future, older_r, gone_r = xs
        # Few tokens compete at once: gather them, for pairs grow with the square.
        width = min(most + block, score.shape[-1])
        order = jnp.argsort(~older_r, axis=-1, stable=True)[..., :width]
        score_n, future_n, there = (jnp.take_along_axis(x, order, axis=-1) for x in (score, future, older_r))
        count = jnp.sum(gone_r, axis=-1)
        kept = budgets.keep_top(score, older_r, jnp.sum(older_r, axis=-1, dtype=jnp.int32) - count)
        both = jnp.sum(gone_r & ~kept, axis=-1).astype(jnp.float32)
        counts = (count > 0).astype(jnp.float32)
        agreement = both / jnp.maximum(count, 1).astype(jnp.float32)
        return (
            jnp.sum(pairwise_hinge(score_n, future_n, there, margin) * counts),
            jnp.sum(agreement * counts),
            jnp.sum(counts),
        )

    loss, agreement, counts = jax.lax.map(one, (scores, golden, older, gone))
    rankings = jnp.maximum(jnp.sum(counts), 1.0)
    return jnp.sum(loss) / rankings, jnp.sum(agreement) / rankings


def sample_replay(
    key: Array, scores: Array, position: Array, budget: Array, block: int
) -> tuple[Array, tuple[Array, Array, Array]]:
    """Replays sampled evictions: of n that must go, n are drawn one by one among the 2 n of lowest score.

    The chance of each draw is the softmax of minus the scores over what is left to draw from.

    Args:
      scores: f32[R, L, B, K, S]. position: int32[L, B, K, S]. budget: int32[B].

    Returns:
      Who stays, bool[L, B, K, S]; and of each round order int32[R, L, B, K, W], slots in the order of the draw, those that
      could have been drawn after those that were; size int32[R, L, B, K], how many these are; drawn int32[R, L, B, K], n.
    """
    keys = jax.random.split(key, scores.shape[0])
    width = min(2 * block, scores.shape[-1])

    def drawing(score_and_key, competing, guarded, allowed):
        score, key_r = score_and_key
        older = competing & ~guarded
        count = jnp.maximum(jnp.sum(competing, axis=-1, dtype=jnp.int32) - allowed, 0)
        size = jnp.minimum(2 * count, jnp.sum(older, axis=-1, dtype=jnp.int32))
        lowest, slot = jax.lax.top_k(jnp.where(older, -score, _NEVER), width)
        noisy = lowest + jax.random.gumbel(key_r, lowest.shape, jnp.float32)
        draw = jnp.argsort(jnp.where(_first(size, width), -noisy, jnp.inf), axis=-1)
        order = jnp.take_along_axis(slot, draw, axis=-1)
        gone = jnp.put_along_axis(
            jnp.zeros_like(competing), order, _first(count, width), axis=-1, inplace=False
        )  # fmt: skip
        return competing & ~gone, (order, size, count)

    later = jnp.zeros_like(position, bool)
    return replay((scores, keys), position, later, block, budget, drawing)


def _first(count: Array, width: int) -> Array:
    """bool[..., W]: the first `count` (int32[...]) places."""
    return jax.lax.broadcasted_iota(jnp.int32, (*count.shape, width), count.ndim) < count[..., None]


def draw_log_probs(scores: Array, order: Array, size: Array) -> Array:
    """Log-probability of each draw given those before it, differentiable in the scores: f32[..., W].

    Args:
      scores: f32[..., S]. order: int32[..., W], size: int32[...], as `sample_replay` returns them. Places from the n-th on
        were not drawn; what stands there means nothing.
    """
    logits = -jnp.take_along_axis(scores, order, axis=-1)
    logits = jnp.where(_first(size, order.shape[-1]), logits, _NEVER)
    return logits - jax.lax.cumlogsumexp(logits, axis=logits.ndim - 1, reverse=True)


def rewards_of(
    teacher: Array, students: Array, continuation: Array, weight: Array, *, rise: float, confident: float
) -> Array:  # fmt: skip
    """Minus the mean squared rise of the loss, over the confident tokens, of rises above `rise`: f32[A].

    Args:
      teacher: f32[T, V], students: f32[A, T, V], log-probabilities after each continuation token.
      continuation: int32[T]. weight: f32[T], see `Trajectories`.
    """
    following = continuation[1:]
    counted = (weight[:-1] > 0) & (weight[1:] > 0)
    entropy = -jnp.sum(jnp.exp(teacher) * teacher, axis=-1)[:-1]
    real = jnp.sum(counted)
    sure = real - jnp.floor((1.0 - confident) * real.astype(jnp.float32) + 1e-4).astype(jnp.int32)
    taken = budgets.keep_top(-entropy, counted, sure).astype(jnp.float32)
    before = jnp.take_along_axis(teacher[:-1], following[:, None], axis=-1)[:, 0]
    after = jnp.take_along_axis(students[:, :-1], following[None, :, None], axis=-1)[..., 0]
    grown = before[None] - after
    punished = jnp.where(grown > rise, grown**2, 0.0) * taken[None]
    return -jnp.sum(punished, axis=-1) / jnp.maximum(jnp.sum(taken), 1.0)


def train_step(
    state: TrainState, params: model.Params, trajectories: Trajectories, index: Array, key: Array, reference: Any, *,
    model_config: ModelConfig, policy: ForesightKV, config: ForesightConfig, most: int,
) -> tuple[TrainState, dict[str, Array]]:  # fmt: skip
    """One update on one prompt.

    Args:
      state: donated. params: the frozen language model, stacked. trajectories: of a batch of prompts, as `Trace` sees them.
      index: int32 scalar, which of them. key: random key of the run; the step is folded in.
      reference: weights of the first stage; "ranking" does not look at them. most: static upper bound of the budgets.

    Returns:
      The new state and metrics (f32 scalars): ratio, grad_norm; ranking: loss, agreement; grpo: reward, reward_deviation (over
      samples), leaving (the estimate of the KL to the first stage, per draw).
    """
    key_ratio, key_sample = jax.random.split(jax.random.fold_in(key, state.step))
    ratio = jax.random.choice(key_ratio, jnp.asarray(config.ratios, jnp.float32))
    cache = kv.select(trajectories.cache, index)
    budget = budgets.tokens_kept_traced(ratio, cache.length, config.minimum)
    found = received(cache, policy.block)
    if config.stage == "ranking":
        golden = golden_scores(found, cache.layers.stats.extra[_FUTURE], cache.length, policy.block)

        def loss_of(weights):
            scores = scores_of(weights, found, cache, policy.block)
            position = cache.layers.position
            loss, agreement = ranking_loss(
                scores, golden, position, budget, block=policy.block, margin=config.margin, most=most
            )
            return loss, {"loss": loss, "agreement": agreement}
    else:
        following = (trajectories.continuation[index], trajectories.weight[index])
        loss_of = _grpo(
            state, (params, model_config), policy, config, cache, found, following, budget, key_sample, reference
        )
    grads, metrics = jax.grad(loss_of, has_aux=True)(state.params)
    return advance(state, grads, config), {**metrics, "ratio": ratio, "grad_norm": optax.tree.norm(grads)}


def _grpo(state, frozen, policy, config, cache, found, following, budget, key, reference):
    """Samples replays, feeds the continuation to what they leave, and returns the loss as a function of the weights."""
    params, model_config = frozen
    continuation, weight = following
    horizon, samples = continuation.shape[0], config.samples
    old = scores_of(state.params, found, cache, policy.block)
    draw = functools.partial(
        sample_replay, scores=old, position=cache.layers.position, budget=budget, block=policy.block
    )
    keep, (order, size, count) = jax.vmap(draw)(jax.random.split(key, samples))

    students = kv.share_prompt(kv.restrict(cache, StatsRequest()), samples, horizon)
    room = ((0, 0), (0, 0), (0, 0), (0, horizon))
    students = kv.evict(students, jnp.pad(keep[:, :, 0].swapaxes(0, 1), room))
    fed = jnp.broadcast_to(continuation[None], (samples, horizon))
    hidden, _ = model.extend(params, model_config, fed, students, jnp.int32(0))
    log_q = jax.nn.log_softmax(model.unembed(params, hidden, model_config))
    teacher = teacher_log_probs(params, model_config, cache, continuation)
    rewards = rewards_of(teacher, log_q, continuation, weight, rise=config.rise, confident=config.confident)
    advantages = pg.group_advantages(rewards).reshape(samples, *[1] * (order.ndim - 1))

    def log_probs_of(weights):
        scores = scores_of(weights, found, cache, policy.block)
        return jax.vmap(lambda o, n: draw_log_probs(scores, o, n))(order, size)

    drawn = _first(count, order.shape[-1]).astype(jnp.float32)
    draws = jnp.maximum(jnp.sum(drawn), 1.0)
    first = log_probs_of(reference)
    bound = jnp.where(state.step < config.kl_steps, config.kl_weight, 0.0)

    def loss_of(weights):
        log_probs = log_probs_of(weights)
        gain = pg.clipped_surrogate(log_probs, jax.lax.stop_gradient(log_probs), advantages, config.clip)
        leaving = jnp.sum(pg.kl_penalty(log_probs, first) * drawn) / draws
        loss = bound * leaving - jnp.sum(gain * drawn) / draws
        return loss, {"reward": jnp.mean(rewards), "reward_deviation": jnp.std(rewards), "leaving": leaving}

    return loss_of


Config = ForesightConfig


class Learner(PromptLearner):
    """ForesightKV in the training loop."""

    step = staticmethod(train_step)

    def __init__(self, experiment, workdir, load):
        """Reads the first stage's policy where the second starts from it.

        Raises:
          ConfigError: the policy is for a model of another shape, or not like the one to start from.
        """
        super().__init__(experiment, workdir, load)
        policy, learn = experiment.policy, experiment.learn
        self.reference: Any = ()
        if learn.stage == "ranking":
            return
        if not learn.start:
            raise ConfigError(
                "learn.start is empty; stage 'grpo' goes on from a policy of stage 'ranking': give its folder."
            )
        first = checkpoint.load_policy(learn.start)
        if first.policy != policy:
            raise ConfigError(
                f"learn.start holds {first.policy}; the experiment's policy is {policy}: they must agree."
            )
        self.reference = first.params
        self.identity["start"] = checkpoint.weights_digest(first.params)

    def observers(self):
        """What both stages learn from; the policy's own look is not needed."""
        return (Trace(self.experiment.policy.block),)

    def static(self):
        """The largest budget."""
        learn = self.experiment.learn
        length = self.experiment.data.length
        return {"most": max(budgets.tokens_kept(r, length, learn.minimum) for r in learn.ratios)}

    def init(self, key):
        """Fresh weights, or those of the first stage."""
        if self.experiment.learn.stage == "ranking":
            return super().init(key)
        return start(jax.tree.map(jnp.asarray, self.reference), self.experiment.learn)

    def update(self, state, work, key):
        """One compiled step, beside the first stage's weights."""
        return self.compiled(state, self.lm.params, *work.data, key, self.reference)

    def tokens_read(self, prompt):
        """Prompt and continuation by the teacher, the continuation by every student."""
        learn = self.experiment.learn
        students = 0 if learn.stage == "ranking" else 1 + learn.samples
        return len(prompt.tokens) + (1 + students) * learn.horizon
