"""What several methods evict from one prompt, when, and at what cost; what the retention viewer shows.

The teacher keeps everything and continues the prompt greedily. Each method is fed the same tokens under its own keep-sets,
evicting after the prefill and every few tokens, as in `dcache.rollout.follow`. Methods are traced one after the other, so
that memory does not grow with their number.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dcache import budget as budgets
from dcache import model, rollout, signals
from dcache.attention import EMPTY
from dcache.config import ModelConfig
from dcache.errors import ConfigError, DcacheError
from dcache.generate import check_tokens, generate, pad_prompts
from dcache.load import LanguageModel
from dcache.policies.base import Policy, Trained, read, spread
from dcache.sharding import on_its_mesh

SIGNALS = ("alpha", "vnorm", "sigma", "entropy")
"""Signals that are recorded of every prompt token, at granularity "sequence" (see `dcache.signals`)."""

NEVER = -1
"""In `MethodTrace.evicted_at`: the token stayed to the end."""


@dataclasses.dataclass(frozen=True, eq=False)
class MethodTrace:
    """What one method did.

    Attributes:
      policy: the policy as it was fitted to the budget, as text.
      evicted_at: int16[L, K, S + T], by token of prompt and continuation: how many continuation tokens had been fed when it was
        evicted, 0 for after the prefill, or `NEVER`.
      score: f32[L, K, S], the scores that the first eviction went by; higher = keep.
      kl: f32[T], KL(full || pruned) in nats after each continuation token was fed.
      agrees: bool[T], whether both then name the same most likely token. choice: int32[T], the method's.
      tokens: int32[n], what the method generates greedily on its own, an end-of-text token included. text: the same as text.
    """

    policy: str
    evicted_at: np.ndarray
    score: np.ndarray
    kl: np.ndarray
    agrees: np.ndarray
    choice: np.ndarray
    tokens: np.ndarray
    text: str


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """Several methods on one prompt under one budget.

    Attributes:
      model: its name. budget: ratio or count. evict_every: 0 for once after the prefill.
      tokens: int32[S], the prompt.
      continuation: int32[T], the full-cache model's own, up to where its text ends (one token at least).
      signals: f32[S, F], `SIGNALS` of the prompt's tokens as at the prefill.
      methods: label -> what it did.
    """

    model: str
    budget: float | int
    evict_every: int
    tokens: np.ndarray
    continuation: np.ndarray
    signals: np.ndarray
    methods: dict[str, MethodTrace]


@functools.partial(jax.jit, static_argnames=("config", "horizon"))
def _teacher(
    params: model.Params, decode_params: model.Params, config: ModelConfig, tokens: Array, length: Array, stop: Array, *,
    horizon: int,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """Greedy continuation int32[T], its weight f32[T], log-probabilities f32[T, V] and signals f32[S, F] of one prompt."""
    given = jnp.zeros((1, horizon), jnp.int32)
    taught = rollout.teach(
        params, decode_params, config, tokens, length, given, jnp.zeros(1, jnp.int32), jnp.ones(1, bool), stop, (), (),
        decode=True, more=signals.needs(SIGNALS),
    )  # fmt: skip
    continuation = taught.continuation[0]
    log_p = rollout.teacher_log_probs(params, config, taught.cache, continuation)
    return continuation, taught.weight[0], log_p, signals.compute(SIGNALS, taught.cache)[0]


@functools.partial(jax.jit, static_argnames=("config", "policy", "evict_every"))
def _student(
    params: model.Params, config: ModelConfig, policy: Policy, weights: Any, tokens: Array, length: Array,
    continuation: Array, count: Array, log_p: Array, budget: Array, key: Array, *, evict_every: int,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """One method along the continuation int32[T], of which `count` tokens are text.

    Returns:
      Keep-sets bool[D, L, K, S + T], scores f32[L, K, S], KL f32[T] and most likely tokens int32[T].
    """
    horizon = continuation.shape[0]
    future = jnp.where(jnp.arange(horizon) < count, continuation, EMPTY)
    _, cache = read(policy, weights, params, config, tokens, length, future[None])
    log_q, keep = rollout.follow_closely(
        params, config, policy, weights, cache, continuation, budget[None], key, evict_every=evict_every
    )
    first = jax.random.split(key, rollout.check_schedule(horizon, evict_every))[0]
    scores = policy.scores_at(weights, cache, budgets.tokens_kept_traced(budget, length), first)
    scores = spread(scores.astype(jnp.float32), cache, policy.granularity)
    choice = jnp.argmax(log_q[0], axis=-1).astype(jnp.int32)
    return keep[:, :, 0], scores[:, 0], rollout.kl_divergence(log_p, log_q[0]), choice


@on_its_mesh
def trace(
    lm: LanguageModel, prompt_tokens: Sequence[int] | np.ndarray, methods: Mapping[str, Trained], budget: float | int, *,
    new_tokens: int = 32, evict_every: int = 8, seed: int = 0,
) -> Trace:  # fmt: skip
    """Traces methods on one prompt.

    Args:
      prompt_tokens: int[S]. methods: label -> policy with its weights. budget: ratio or number of tokens, per head.
      new_tokens: T, continuation tokens, a multiple of `evict_every`. evict_every: 0 for one eviction after the prefill.
      seed: of policies that draw random numbers.

    Raises:
      ConfigError, BudgetError: bad tokens, no method, or a schedule or budget that does not fit.
      DcacheError: a KL is not finite.
    """
    if not methods:
        raise ConfigError("trace was given no method; give at least one, for instance {'h2o': dcache.resolve('h2o')}.")
    decisions = rollout.check_schedule(new_tokens, evict_every)
    budget = budgets.check(budget)
    prompt = check_tokens(prompt_tokens, lm.config, new_tokens, what="`prompt_tokens`")
    allowed = budgets.tokens_kept(budget, len(prompt))
    fitted = {label: Trained(t.policy.bind(lm.tokenizer).fit(allowed), t.params) for label, t in methods.items()}
    tokens, length = pad_prompts([prompt])
    stop = jnp.asarray(lm.tokenizer.eos_ids, jnp.int32)
    continuation, weight, log_p, raw = _teacher(
        lm.params, lm.decode_params, lm.config, tokens, length, stop, horizon=new_tokens
    )
    count = max(1, int(np.asarray(weight).sum()))
    best = np.asarray(jnp.argmax(log_p, axis=-1))[:count]
    found = {}
    for label, trained in fitted.items():
        keep, score, kl, choice = map(
            np.asarray,
            _student(
                lm.params, lm.config, trained.policy, trained.params, tokens, length, continuation, jnp.int32(count),
                log_p, jnp.float32(budgets.encode(budget)), jax.random.key(seed), evict_every=evict_every,
            ),
        )  # fmt: skip
        if not np.isfinite(kl[:count]).all():
            raise DcacheError(f"The KL of {label!r} is not finite; the model's or the policy's weights are damaged.")
        own = generate(
            lm, [prompt], trained, budget, max_new_tokens=new_tokens, temperature=0.0, top_p=1.0, seed=seed,
            evict_every=evict_every,
        )  # fmt: skip
        found[label] = MethodTrace(
            policy=repr(trained.policy),
            evicted_at=_evicted_at(keep, len(prompt), count, new_tokens // decisions),
            score=score[..., : len(prompt)],
            kl=kl[:count],
            agrees=choice[:count] == best,
            choice=choice[:count],
            tokens=own.tokens[0],
            text=own.texts[0],
        )
    return Trace(
        model=lm.name, budget=budget, evict_every=evict_every, tokens=prompt, continuation=np.asarray(continuation)[:count],
        signals=np.asarray(raw)[: len(prompt)], methods=found,
    )  # fmt: skip


def _evicted_at(keep: np.ndarray, length: int, count: int, chunk: int) -> np.ndarray:
    """int16[L, K, length + count], see `MethodTrace`, from keep-sets bool[D, L, K, S + T] of decisions `chunk` tokens apart.

    Evictions after the last of the `count` tokens act on nothing that is shown, and are left out.
    """
    decisions = keep.shape[0]
    padded = keep.shape[-1] - decisions * chunk
    shown = np.concatenate([np.arange(length), padded + np.arange(count)])
    found = np.full((*keep.shape[1:3], len(shown)), NEVER, np.int16)
    for step in range(0, min(decisions * chunk, count), chunk):
        there = shown < padded + step  # what was fed by then
        gone = there & ~keep[step // chunk][..., shown] & (found == NEVER)
        found[gone] = step
    return found
