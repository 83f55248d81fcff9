"""Relaxed keep-sets: the KL as a differentiable function of the scores, without sampling.

A keep-set of B out of n tokens is a step function of the scores. Here each token is kept to the extent
sigmoid((s_i - threshold) / temperature), with the threshold at which the extents sum to B. `straight_through` uses the
step function itself on the way forward and the slope of the sigmoid on the way back, so that what is optimised is what
will be used.
"""

import jax
import jax.numpy as jnp
from jax import Array

from dcache import budget as budgets

_BISECTIONS = 40


def threshold(scores: Array, filled: Array, count: Array, temperature: Array) -> Array:
    """The threshold at which sigmoid((s - threshold) / temperature) sums to `count` over the filled slots.

    Args:
      scores: f32[..., S]. filled: bool[..., S]. count: int32[...], fewer than the filled slots (else everything is kept and
        the threshold lies below all scores). temperature: f32 scalar > 0.

    Returns:
      f32[...], differentiable in the scores by the implicit function theorem: raising all scores raises it as much.
    """
    wanted = count.astype(jnp.float32)

    def kept(at: Array) -> Array:
        return jnp.sum(jnp.where(filled, jax.nn.sigmoid((scores - at[..., None]) / temperature), 0.0), axis=-1)

    # Beyond the outermost scores by as much as it takes for every sigmoid to be 0 or 1 in float32.
    margin = 20.0 * temperature
    low = jnp.min(jnp.where(filled, scores, jnp.inf), axis=-1) - margin
    high = jnp.max(jnp.where(filled, scores, -jnp.inf), axis=-1) + margin

    def halve(_, bounds):
        low, high = bounds
        middle = 0.5 * (low + high)
        too_many = kept(middle) > wanted
        return jnp.where(too_many, middle, low), jnp.where(too_many, high, middle)

    low, high = jax.lax.fori_loop(0, _BISECTIONS, halve, jax.lax.stop_gradient((low, high)))
    at = jax.lax.stop_gradient(0.5 * (low + high))
    extent = jax.nn.sigmoid((jax.lax.stop_gradient(scores) - at[..., None]) / temperature)
    slope = jnp.where(filled, extent * (1.0 - extent), 0.0)
    share = slope / jnp.maximum(jnp.sum(slope, axis=-1, keepdims=True), 1e-20)
    moved = jnp.where(filled, scores - jax.lax.stop_gradient(scores), 0.0)
    return at + jnp.sum(share * moved, axis=-1)


def soft_keep(
    scores: Array, filled: Array, count: Array, temperature: Array, *, straight_through: bool
) -> Array:  # fmt: skip
    """To what extent each slot is kept, f32[..., S] in [0, 1], differentiable in the scores.

    Arguments as in `threshold`. With `straight_through` the extents are 0 or 1, those of the `count` best slots 1.
    """
    at = threshold(scores, filled, count, temperature)
    soft = jnp.where(filled, jax.nn.sigmoid((scores - at[..., None]) / temperature), 0.0)
    if not straight_through:
        return soft
    hard = budgets.keep_top(jax.lax.stop_gradient(scores), filled, count).astype(jnp.float32)
    return hard + (soft - jax.lax.stop_gradient(soft))
