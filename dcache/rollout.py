"""Teacher and student passes over one trajectory.

The teacher never evicts. A student evicts after the prefill and every `evict_every` tokens; both are fed the same tokens.
Between two evictions a student's keep-set is fixed, so those tokens are fed in one chunk: for K samples and `evict_every` e
one forward pass over K * e rows, not e passes over K rows. The prompt's keys and values exist once (`Cache.prompt`).

What acts when (method note 1.2.11): the first generated token comes from the unpruned prompt, so the decision taken before
continuation token t is fed first shows in the distribution after token t.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dcache import budget as budgets
from dcache import cache as kv
from dcache import model, signals, subset
from dcache.attention import EMPTY, StatsRequest
from dcache.config import ModelConfig
from dcache.errors import ConfigError
from dcache.policies.base import Policy, keep_set, pooled, pooled_budget, shaped, spread, unpooled
from dcache.relaxed import soft_keep

_NOTHING = StatsRequest()


def check_schedule(horizon: int, evict_every: int) -> int:
    """Number of decisions over a horizon (tokens): 1 + one per `evict_every` tokens before the last chunk.

    Raises:
      ConfigError: the horizon is not a multiple of `evict_every`.
    """
    if horizon < 1 or evict_every < 0:
        raise ConfigError(
            f"horizon is {horizon} and evict_every {evict_every}; give horizon >= 1 and evict_every >= 0."
        )
    if evict_every == 0:
        return 1
    if horizon % evict_every:
        raise ConfigError(
            f"A horizon of {horizon} tokens is not a multiple of evict_every = {evict_every}; change either."
        )
    return horizon // evict_every


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trajectories:
    """A batch of prompts as the teacher sees them.

    Attributes:
      cache: of B prompts, stacked, full, with statistics.
      continuation: int32[B, T], the tokens that teacher and students are fed after the prompt.
      weight: f32[B, T], 1 where the distribution after that token counts, 0 from the end of the text on.
    """

    cache: kv.Cache
    continuation: Array
    weight: Array


def teach(
    params: model.Params, decode_params: model.Params, config: ModelConfig, tokens: Array, length: Array, given: Array,
    given_length: Array, own: Array, stop: Array, policies: tuple[Policy, ...], weights: tuple[Any, ...], *, decode: bool,
    asked: Array | None = None, unseen: int = 0, more: StatsRequest = _NOTHING,
) -> Trajectories:  # fmt: skip
    """Reads prompts and fixes the text that follows each: given, or the teacher's own greedy continuation.

    A prompt whose question is hidden ends before it; the question is then what is given first (`asked`, `unseen`), and what
    the model says on its own begins after it.

    Args:
      params: stacked. decode_params: the same weights in the layout for decoding (see `model.unstack`).
      tokens: int32[B, S], padded on the right. length: int32[B].
      given: int32[B, T], padded. given_length: int32[B], its real tokens. own: bool[B], ignore `given` and continue greedily.
      stop: int32[E], token ids that end a text. policies: static; the cache is to have what their scores look at (what
        counts of the continuation is shown to them, but only the oracle looks). weights: of each of them.
      decode: static; False if no `own` is set. asked: bool[B], prompts whose first `unseen` given tokens are their question;
        None for none. unseen: static, tokens of a question, padding included. more: static, further statistics to take.
    """
    request = functools.reduce(lambda a, b: a | b, (policy.needs for policy in policies), more)
    hidden, cache = model.prefill(params, config, tokens, length, request)
    horizon = given.shape[1]
    weight = (jnp.arange(horizon)[None] < given_length[:, None]).astype(jnp.float32)
    counted = jnp.ones_like(weight)
    if asked is not None:  # what comes before a question's last token is no answer, though the oracle sees it
        counted = ((jnp.arange(horizon)[None] >= unseen - 1) | ~asked[:, None]).astype(jnp.float32)
    if not decode:
        cache = _observed(params, config, cache, tokens, given, weight, policies, weights)
        return Trajectories(cache, given, weight * counted)
    room = kv.grow(kv.restrict(cache, StatsRequest()), horizon)
    if isinstance(decode_params["layers"], tuple):
        room = kv.unstack(room)
    if unseen:
        question = given[:, :unseen]
        last, room = model.extend(decode_params, config, question, room, jnp.int32(tokens.shape[1]))
        logits = model.unembed(decode_params, last[:, -1], config)
    else:
        logits = model.last_logits(params, config, hidden, length)
    first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    greedy = greedy_continuation(decode_params, config, first, room, horizon - unseen)
    ended = jnp.cumsum(jnp.any(greedy[..., None] == stop[None, None], axis=-1), axis=1, dtype=jnp.int32) > 0
    there = 1.0 - ended.astype(jnp.float32)
    if unseen:
        greedy = jnp.concatenate([question, greedy], axis=1)
        there = jnp.concatenate([jnp.ones((len(own), unseen), jnp.float32), there], axis=1)
    continuation = jnp.where(own[:, None], greedy, given)
    weight = jnp.where(own[:, None], there, weight)
    cache = _observed(params, config, cache, tokens, continuation, weight, policies, weights)
    return Trajectories(cache, continuation, weight * counted)


def _observed(params, config, cache, tokens, continuation, weight, policies, weights) -> kv.Cache:
    """The cache after each policy's own passes over the prompts."""
    future = jnp.where(weight > 0, continuation, EMPTY)
    for policy, own in zip(policies, weights, strict=True):
        cache = policy.observe(own, params, config, cache, tokens, future)
    return cache


def greedy(
    params: model.Params, config: ModelConfig, token: Array, cache: kv.Cache, count: int, start: Array | None = None
) -> tuple[Array, kv.Cache]:
    """The next `count` greedy tokens int32[B, count] of every sequence, and the cache with all that was fed.

    Args:
      params: unrolled (`model.unstack`) if the cache is. token: int32[B], not yet fed. cache: with `count` empty slots.
      start: of the first of them, see `model.extend`.
    """

    def step(carry, i):
        token, cache = carry
        hidden, cache = model.extend(params, config, token[:, None], cache, None if start is None else start + i)
        token = jnp.argmax(model.unembed(params, hidden[:, 0], config), axis=-1).astype(jnp.int32)
        return (token, cache), token

    (_, cache), tokens = jax.lax.scan(step, (token, cache), jnp.arange(count, dtype=jnp.int32))
    return tokens.T, cache


def greedy_continuation(
    params: model.Params, config: ModelConfig, first: Array, cache: kv.Cache, horizon: int
) -> Array:
    """Greedy tokens of every sequence of a cache from which nothing more is evicted.

    Args:
      params: unrolled (`model.unstack`) if the cache is. first: int32[B], the token that the prompt's logits choose.
      cache: with at least `horizon - 1` empty slots.

    Returns:
      int32[B, horizon], `first` included. Decoding does not stop at an end-of-text token.
    """
    tokens, _ = greedy(params, config, first, cache, horizon - 1)
    return jnp.concatenate([first[:, None], tokens], axis=1)


def teacher_log_probs(params: model.Params, config: ModelConfig, cache: kv.Cache, continuation: Array) -> Array:
    """Log-probabilities of the full-cache model after each continuation token.

    Args:
      cache: of one prompt (B = 1), stacked, nothing evicted. continuation: int32[T].

    Returns:
      f32[T, V].
    """
    bare = kv.restrict(cache, StatsRequest())
    hidden, _ = model.extend(
        params, config, continuation[None], kv.share_prompt(bare, 1, continuation.shape[0]), jnp.int32(0)
    )
    return jax.nn.log_softmax(model.unembed(params, hidden[0], config))


def kl_divergence(teacher: Array, student: Array, probs: Array | None = None) -> Array:
    """KL(teacher || student) in nats of log-probabilities f32[..., V] -> f32[...]; `probs` = exp(teacher) if at hand."""
    return jnp.sum((jnp.exp(teacher) if probs is None else probs) * (teacher - student), axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decisions:
    """What a learner needs of D successive evictions of A students.

    Attributes:
      features: f32[D, A, S, F] (or with [L, ...] or [L, K, ...] after A for finer granularities: see `distill`).
      order: int32[D, A, S], draws. filled: bool[D, A, S], slots that could be kept. budget: int32[D, A].
      kl: f32[A, T], nats, after each continuation token.
    """

    features: Array
    order: Array
    filled: Array
    budget: Array
    kl: Array


def sample_students(
    params: model.Params, config: ModelConfig, policy: Any, policy_params: Any, cache: kv.Cache, continuation: Array,
    teacher: Array, ratio: Array, key: Array, *, samples: int, evict_every: int, law: subset.Law, minimum: int, most: int,
) -> Decisions:  # fmt: skip
    """Runs A students with sampled keep-sets over one trajectory.

    Args:
      params: stacked. policy: a sequence-level learned policy (`features`, `scores_of`), with its weights.
      cache: of one prompt (B = 1), stacked, full, with the statistics that the policy needs.
      continuation: int32[T], fed to all. teacher: f32[T, V], see `teacher_log_probs`.
      ratio: f32 scalar, the budget ratio r. key: random key.
      samples: A. evict_every: 0 for once after the prefill. law: keep-set distribution. minimum: B_min.
      most: static upper bound of all budgets.
    """
    horizon = continuation.shape[0]
    decisions = check_schedule(horizon, evict_every)
    chunk = horizon // decisions
    students = kv.share_prompt(cache, samples, horizon)
    tokens = continuation.reshape(decisions, chunk)
    teacher = teacher.reshape(decisions, chunk, -1)
    probs = jnp.exp(teacher)  # once for all students

    def decide(students: kv.Cache, xs):
        tokens_d, teacher_d, probs_d, key_d, index = xs
        with jax.named_scope("policy"):
            budget = budgets.tokens_kept_traced(ratio, students.length, minimum)
            features = policy.features(students, budget)
            scores = policy.scores_of(policy_params, features)
            filled = signals.filled(students)
            keys = jax.random.split(key_d, samples)
            order = jax.vmap(lambda k, s, f, b: subset.sample(law, k, s, f, b, most))(keys, scores, filled, budget)
            keep = jax.vmap(subset.kept)(order, filled, budget)
            students = kv.evict(students, spread(keep, students, "sequence"))
        fed = jnp.broadcast_to(tokens_d[None], (samples, chunk))
        hidden, students = model.extend(params, config, fed, students, index * chunk)
        log_q = jax.nn.log_softmax(model.unembed(params, hidden, config))
        kl = kl_divergence(teacher_d[None], log_q, probs_d[None])
        return students, (features, order, filled, budget, kl)

    xs = (tokens, teacher, probs, jax.random.split(key, decisions), jnp.arange(decisions, dtype=jnp.int32))
    _, (features, order, filled, budget, kl) = jax.lax.scan(decide, students, xs)
    return Decisions(features, order, filled, budget, kl.swapaxes(0, 1).reshape(samples, horizon))


def relaxed_student(
    params: model.Params, config: ModelConfig, policy: Any, policy_params: Any, cache: kv.Cache, continuation: Array,
    teacher: Array, ratio: Array, temperature: Array, *, straight_through: bool, minimum: int,
) -> Array:  # fmt: skip
    """KL of a student with a relaxed keep-set, evicted once after the prefill: f32[T], differentiable in `policy_params`.

    Args:
      params: stacked. policy: a learned policy of any granularity, with its weights.
      cache, continuation, teacher, ratio, minimum: as in `sample_students`.
      temperature, straight_through: see `dcache.relaxed`.
    """
    horizon = continuation.shape[0]
    with jax.named_scope("policy"):
        budget = budgets.tokens_kept_traced(ratio, cache.length, minimum)
        scores = policy.differentiable_scores(policy_params, cache, budget)
        filled = signals.filled(cache, policy.granularity)
        counts = jnp.broadcast_to(shaped(budget, policy.granularity), scores.shape[:-1])
        extent = soft_keep(
            pooled(scores, policy.scope), pooled(filled, policy.scope), pooled_budget(counts, policy.scope), temperature,
            straight_through=straight_through,
        )  # fmt: skip
        extent = spread(unpooled(extent, scores.shape, policy.scope), cache, policy.granularity)
    student = kv.share_prompt(kv.restrict(cache, StatsRequest()), 1, horizon)
    there = jnp.concatenate([extent, jnp.ones((*extent.shape[:-1], horizon), jnp.float32)], axis=-1)
    hidden, _, _ = model.extend_watched(
        params, config, continuation[None], student, jnp.int32(0), lambda probs, position: None, there
    )
    log_q = jax.nn.log_softmax(model.unembed(params, hidden[0], config))
    return kl_divergence(teacher, log_q)


def follow(
    params: model.Params, config: ModelConfig, policy: Policy, policy_params: Any, cache: kv.Cache, continuation: Array,
    budget: Array, key: Array, *, evict_every: int, minimum: int = budgets.MINIMUM,
) -> tuple[Array, Array]:  # fmt: skip
    """Follows one trajectory under a policy's own (noiseless) keep-sets, for one or more budgets at once.

    Args:
      params: stacked. cache: of one prompt (B = 1), stacked, full, with at least the statistics that the policy needs.
      continuation: int32[T]. budget: f32[A], as `budgets.encode` gives them.
      evict_every: 0 for once after the prefill.

    Returns:
      Log-probabilities f32[A, T, V] after each continuation token, and the first keep-set bool[L, A, K, S] over the
      prompt's S slots.
    """
    log_q, keep = follow_closely(
        params,
        config,
        policy,
        policy_params,
        cache,
        continuation,
        budget,
        key,
        evict_every=evict_every,
        minimum=minimum,
    )
    return log_q, keep[0][..., : kv.positions(cache).shape[-1]]


def follow_closely(
    params: model.Params, config: ModelConfig, policy: Policy, policy_params: Any, cache: kv.Cache, continuation: Array,
    budget: Array, key: Array, *, evict_every: int, minimum: int = budgets.MINIMUM,
) -> tuple[Array, Array]:  # fmt: skip
    """`follow` that returns all D keep-sets, bool[D, L, A, K, S + T].

    The prompt's S slots come first; continuation token i lies in slot S + i once it was fed, and no slot is used twice.
    """
    horizon, arms = continuation.shape[0], budget.shape[0]
    decisions = check_schedule(horizon, evict_every)
    chunk = horizon // decisions
    students = kv.share_prompt(kv.restrict(cache, policy.needs), arms, horizon)

    def decide(students: kv.Cache, xs):
        tokens_d, key_d, index = xs
        allowed = budgets.tokens_kept_traced(budget, students.length, minimum)
        keep = keep_set(policy, policy_params, students, allowed, key_d)
        students = kv.evict(students, keep)
        fed = jnp.broadcast_to(tokens_d[None], (arms, chunk))
        hidden, students = model.extend(params, config, fed, students, index * chunk)
        return students, (jax.nn.log_softmax(model.unembed(params, hidden, config)), keep)

    xs = (
        continuation.reshape(decisions, chunk),
        jax.random.split(key, decisions),
        jnp.arange(decisions, dtype=jnp.int32),
    )
    _, (log_q, keep) = jax.lax.scan(decide, students, xs)
    return log_q.swapaxes(0, 1).reshape(arms, horizon, -1), keep
