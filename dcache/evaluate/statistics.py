"""Bootstrap intervals over prompts. Comparisons are paired: both methods are resampled on the same prompts."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dcache.errors import ConfigError

DRAWS = 10_000
LEVEL = 0.95
WIDEST = 0.20
"""A share whose interval is wider than this (20 points) says too little to be read as a number."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with its 95% bootstrap interval.

    Attributes:
      value: on all prompts. low, high: the interval; infinite for a single prompt, which says nothing about others.
      n: number of prompts.
    """

    value: float
    low: float
    high: float
    n: int

    def excludes(self, reference: float) -> bool:
        """Whether the interval lies wholly on one side of a reference; if not, n prompts are too few to decide."""
        return not self.low <= reference <= self.high

    @property
    def bounded(self) -> bool:
        """Whether there is an interval; a single prompt has none."""
        return not (self.low == -np.inf and self.high == np.inf)

    def map(self, function: Callable[[float], float]) -> "Estimate":
        """The estimate of an increasing function of the number."""
        if not self.bounded:
            return dataclasses.replace(self, value=function(self.value))
        return Estimate(function(self.value), function(self.low), function(self.high), self.n)


_CACHED = 500  # Counts for more prompts would fill the memory.


@functools.lru_cache(maxsize=16)
def _counts(n: int, seed: int) -> np.ndarray:
    """How often each of n prompts is drawn in each resample, f64[DRAWS, n]; the same for all numbers of a table."""
    index = np.random.default_rng(seed).integers(0, n, (DRAWS, n)) + n * np.arange(DRAWS)[:, None]
    return np.bincount(index.ravel(), minlength=DRAWS * n).reshape(DRAWS, n).astype(np.float64)


def _resampled_means(values: np.ndarray, seed: int) -> np.ndarray:
    """Means over prompts resampled with replacement: f64[M, n] -> f64[DRAWS, M]."""
    n = values.shape[1]
    if n <= _CACHED:
        return _counts(n, seed) @ values.T / n
    rng = np.random.default_rng(seed)
    return np.stack([values[:, rng.integers(0, n, n)].mean(axis=1) for _ in range(DRAWS)])


def _estimate(value: float, draws: np.ndarray, n: int) -> Estimate:
    if n < 2:
        return Estimate(value, -np.inf, np.inf, n)
    tail = 100 * (1 - LEVEL) / 2
    # An observed draw, not a point between two: a ratio may be infinite.
    low, high = np.percentile(draws, [tail, 100 - tail], method="closest_observation")
    return Estimate(value, float(low), float(high), n)


def _check(values: Sequence[float], others: Sequence[float]) -> np.ndarray:
    if len(values) != len(others):
        raise ConfigError(
            f"A paired comparison was given {len(values)} and {len(others)} numbers; pair them by prompt."
        )
    both = np.asarray([values, others], np.float64)
    if not both.shape[1] or not np.all(np.isfinite(both)):
        raise ConfigError("An interval needs one or more finite numbers; leave out prompts without a result.")
    return both


def mean(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean over prompts.

    Raises:
      ConfigError: no number, or one that is not finite.
    """
    array = _check(values, values)[:1]
    return _estimate(float(array.mean()), _resampled_means(array, seed)[:, 0], array.shape[1])


def difference(values: Sequence[float], others: Sequence[float], seed: int = 0) -> Estimate:
    """Mean of `values - others`, paired by prompt; below 0 if `values` are smaller. Raises as `mean`."""
    both = _check(values, others)
    return mean((both[0] - both[1]).tolist(), seed)


def ratio(values: Sequence[float], others: Sequence[float], seed: int = 0) -> Estimate:
    """Mean of `values` over mean of `others`, both on the same resampled prompts. Raises as `mean`.

    If the mean of `others` is 0, on all prompts or in a resample, the ratio is infinite there.
    """
    both = _check(values, others)
    means = np.concatenate([both.mean(axis=1)[None], _resampled_means(both, seed)])
    ratios = np.divide(means[:, 0], means[:, 1], out=np.full(len(means), np.inf), where=means[:, 1] != 0)
    return _estimate(float(ratios[0]), ratios[1:], both.shape[1])


def combined(function: Callable[..., Any], groups: Sequence[Sequence[Sequence[float]]], seed: int = 0) -> Estimate:
    """A function of means over prompts, where the means are averaged over groups of prompts, such as the tasks of a benchmark.

    Every group counts the same, however many prompts it has, and is resampled for itself, all series on the same prompts. A
    group of n prompts makes the interval too narrow by a factor of about sqrt(1 - 1 / n), so groups of one or two prompts
    belong pooled.

    Args:
      function: of one mean per series; it is given arrays of the means of all resamples.
      groups: group -> series -> one number per prompt.

    Returns:
      The estimate, without bounds if a group has a single prompt; n is the number of prompts in all groups.

    Raises:
      ConfigError: no group, series of different lengths, no number, or one that is not finite.
    """
    if not groups:
        raise ConfigError("An average over groups of prompts was given no group; give one or more.")
    parts = []
    for i, group in enumerate(groups):
        both = np.concatenate([_check(series, group[0])[:1] for series in group])
        parts.append(np.concatenate([both.mean(axis=1)[None], _resampled_means(both, seed + i)]))
    values = np.broadcast_to(function(*np.mean(parts, axis=0).T), DRAWS + 1)
    n = sum(len(group[0]) for group in groups)
    smallest = min(len(group[0]) for group in groups)
    return dataclasses.replace(_estimate(float(values[0]), values[1:], smallest), n=n)


def undecided(difference: Estimate) -> str:
    """Says "undecided (n=24)" if the interval of a difference includes no difference, else ""."""
    if not difference.bounded:
        return _alone(difference)
    return "" if difference.excludes(0.0) else f"undecided (n={difference.n})"


def too_wide(share: Estimate, widest: float = WIDEST) -> str:
    """Says "too wide to decide (n=24)" if the interval of a share (accuracy, retention) is wider than `widest`, else ""."""
    if not share.bounded:
        return _alone(share)
    return "" if share.high - share.low <= widest else f"too wide to decide (n={share.n})"


def _alone(estimate: Estimate) -> str:
    """Why a number has no interval."""
    return "n=1 decides nothing" if estimate.n == 1 else f"no interval, a task has n=1 (n={estimate.n} in all)"
