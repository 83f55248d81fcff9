"""Distributions over keep-sets: sampling, log-probability, entropy.

A keep-set of B out of n tokens is drawn given scores s. Three laws (all unbatched; callers vmap):

* `plackett_luce`: Gumbel noise on the scores and the top B, with the exact log-probability of the *ordered* draw,
  O(S log S). Sampling and log-probability match, so REINFORCE is unbiased.
* `subset`: the exponential-family law p(a) = exp(sum_{i in a} s_i) / Z(s, B), sampled exactly through the dynamic programme
  that also gives log Z (the log of an elementary symmetric polynomial), O(S * B). Matched as well; its entropy is exact.
* `paper`: what DistillCache (arXiv 2608.08878) describes: the Gumbel sample of the first with the log-probability of the
  second. They differ (for s = (2, 1, 0, -1) and B = 2, P({0, 1}) is 0.628 against 0.586), so its gradient is biased.

A draw is represented by an `order`: int32[S], a permutation of the slots whose first B entries are the keep-set.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from dcache.errors import ConfigError

Law = Literal["plackett_luce", "subset", "paper"]
LAWS: tuple[Law, ...] = ("plackett_luce", "subset", "paper")

# Stands for minus infinity where gradients must stay finite.
_NEVER = -1e30


def check_law(law: str) -> None:
    """Raises ConfigError if `law` is not one of `LAWS`."""
    if law not in LAWS:
        raise ConfigError(f"The keep-set distribution is {law!r}; use one of {', '.join(LAWS)}.")


def sample(law: Law, key: Array, scores: Array, filled: Array, budget: Array, most: int) -> Array:
    """Draws a keep-set.

    Args:
      scores: f32[S]. filled: bool[S], slots that may be kept. budget: int32 scalar, B <= number of filled slots.
      most: static upper bound of the budget (the size of the dynamic programme; unused by `plackett_luce`).

    Returns:
      order: int32[S], the keep-set first. Under `plackett_luce` and `paper` the kept slots stand in the order of the draw.
    """
    if law == "subset":
        return _sample_subset(key, scores, filled, budget, most)
    noisy = scores + jax.random.gumbel(key, scores.shape, jnp.float32)
    return jnp.argsort(jnp.where(filled, -noisy, jnp.inf)).astype(jnp.int32)


def log_prob(law: Law, scores: Array, order: Array, filled: Array, budget: Array, most: int) -> Array:
    """Log-probability (nats, f32 scalar) that the law gives to a draw; differentiable in the scores.

    Arguments as in `sample`, `order` as it returns it.
    """
    picked = jnp.arange(scores.shape[0]) < budget
    ordered = jnp.where(filled[order], scores[order], _NEVER)
    if law == "plackett_luce":
        remaining = jax.lax.cumlogsumexp(ordered, reverse=True)
        return jnp.sum(jnp.where(picked, ordered - remaining, 0.0))
    return jnp.sum(jnp.where(picked, ordered, 0.0)) - log_partition(scores, filled, budget, most)


def kept(order: Array, filled: Array, budget: Array) -> Array:
    """The keep-set of a draw: order int32[S], filled bool[S], budget int32 scalar -> bool[S]."""
    rank = jnp.argsort(order)
    return (rank < budget) & filled


def entropy(scores: Array, filled: Array, budget: Array, most: int) -> Array:
    """Exact entropy (nats) of the `subset` law. For `plackett_luce` average `-log_prob` over draws."""
    log_z, inclusion = jax.value_and_grad(log_partition)(scores, filled, budget, most)
    return log_z - jnp.sum(jnp.where(filled, inclusion * scores, 0.0))


def log_partition(scores: Array, filled: Array, budget: Array, most: int) -> Array:
    """log Z(s, B) = log of the elementary symmetric polynomial e_B(exp(s)) over the filled slots, f32 scalar."""
    centre = _centre(scores, filled, budget)
    return _tables(scores - centre, filled, most, keep_all=False)[0][budget] + budget.astype(jnp.float32) * centre


def _centre(scores: Array, filled: Array, budget: Array) -> Array:
    """The B-th largest score. Subtracted from all, it keeps the table small, hence exact, for widely spread scores."""
    descending = -jnp.sort(jnp.where(filled, -scores, jnp.inf))
    return jax.lax.stop_gradient(jnp.where(budget > 0, descending[jnp.maximum(budget - 1, 0)], 0.0))


def _tables(scores: Array, filled: Array, most: int, *, keep_all: bool) -> tuple[Array, Any]:
    """Entry k of the table after i slots is log e_k of the first i: the last table f32[most + 1], and all before a slot."""
    start = jnp.where(jnp.arange(most + 1) == 0, 0.0, _NEVER)

    def step(table, slot):
        score, is_filled = slot
        with_it = jnp.concatenate([jnp.full((1,), _NEVER), table[:-1] + score])
        new = jnp.where(is_filled, jnp.logaddexp(table, with_it), table)
        return new, table if keep_all else None

    return jax.lax.scan(step, start, (scores, filled))


def _sample_subset(key: Array, scores: Array, filled: Array, budget: Array, most: int) -> Array:
    """Walks the slots backwards: slot i is kept with its exact probability given how many are still wanted."""
    scores = scores - _centre(scores, filled, budget)
    final, before = _tables(scores, filled, most, keep_all=True)
    after = jnp.concatenate([before[1:], final[None]])
    uniform = jax.random.uniform(key, scores.shape)

    def step(wanted, slot):
        score, is_filled, u, table, total = slot
        log_keep = score + table[jnp.maximum(wanted - 1, 0)] - total[wanted]
        keep = is_filled & (wanted > 0) & (jnp.log(u) < log_keep)
        return wanted - keep.astype(jnp.int32), keep

    _, keep = jax.lax.scan(step, budget, (scores, filled, uniform, before, after), reverse=True)
    return jnp.argsort(jnp.logical_not(keep), stable=True).astype(jnp.int32)
