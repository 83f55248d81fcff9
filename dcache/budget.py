"""How many tokens may stay, and which: ratio or count -> B_t -> keep-set."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from dcache.errors import BudgetError

MINIMUM = 32
"""B_min of DistillCache: a ratio never asks for fewer tokens than this (an explicit count does)."""


def check(budget: float | int) -> float | int:
    """Returns the budget if it is a ratio in (0, 1] or a positive count, as a Python float or int.

    Raises:
      BudgetError: otherwise.
    """
    if isinstance(budget, bool) or not isinstance(budget, int | float | np.integer | np.floating):
        raise BudgetError(f"budget is {budget!r}; give a ratio (float in (0, 1]) or a number of tokens (int >= 1).")
    if isinstance(budget, int | np.integer):
        if budget < 1:
            raise BudgetError(f"budget is {budget} tokens; give at least 1, or a ratio (float in (0, 1]).")
        return int(budget)
    if not 0.0 < budget <= 1.0:
        raise BudgetError(f"budget is the ratio {budget}; give a float in (0, 1], or a number of tokens as an int.")
    return float(budget)


def tokens_kept(budget: float | int, seen: int, minimum: int = MINIMUM) -> int:
    """B_t = max(floor(ratio * seen), minimum), or the count itself; never more than `seen` tokens."""
    budget = check(budget)
    wanted = budget if isinstance(budget, int) else max(int(np.floor(budget * seen + 1e-9)), minimum)
    return min(wanted, seen)


def encode(budget: float | int) -> float:
    """A budget as one number for traced code: a ratio as it is, a count of tokens as its negative."""
    return budget if isinstance(budget, float) else -float(budget)


def tokens_kept_traced(budget: Array, seen: Array, minimum: int = MINIMUM) -> Array:
    """`tokens_kept` for traced values: budget f32[...] as `encode` gives it, seen int32[...] -> int32[...]."""
    by_ratio = jnp.maximum(jnp.floor(budget * seen.astype(jnp.float32) + 1e-4).astype(jnp.int32), minimum)
    return jnp.minimum(jnp.where(budget < 0, (-budget).astype(jnp.int32), by_ratio), seen)


def keep_top(scores: Array, filled: Array, budget: Array, protected: Array | None = None) -> Array:
    """The keep-set: the `budget` filled slots of highest score, protected ones before all others.

    Args:
      scores: f32[..., S], higher = keep, finite on filled slots. filled: bool[..., S]. budget: int32[...].
      protected: bool[..., S] or None. Of more protected slots than the budget allows, those of highest score stay.

    Returns:
      bool[..., S] with min(budget, filled slots) true values; ties go to the lower slot.
    """
    if protected is None:
        return _top(scores, filled, budget)
    first = _top(scores, filled & protected, budget)
    rest = budget - jnp.sum(first, axis=-1, dtype=jnp.int32)
    return first | _top(scores, filled & ~protected, rest)


def _top(scores: Array, candidates: Array, budget: Array) -> Array:
    """The `budget` candidates of highest score; one sort, ties to the lower slot."""
    scores = jnp.where(candidates, scores, jnp.finfo(jnp.float32).min)
    descending = -jnp.sort(-scores, axis=-1)
    last = jnp.clip(budget - 1, 0, scores.shape[-1] - 1)
    threshold = jnp.take_along_axis(descending, last[..., None], axis=-1)
    above = scores > threshold
    ties = (scores == threshold) & candidates
    room = budget[..., None] - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    keep = above | (ties & (jnp.cumsum(ties, axis=-1, dtype=jnp.int32) <= room))
    return keep & candidates & (budget[..., None] > 0)
