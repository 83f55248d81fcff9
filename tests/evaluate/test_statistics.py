import math

import numpy as np
import pytest

from dcache.errors import ConfigError
from dcache.evaluate import statistics
from dcache.evaluate.statistics import Estimate


def test_two_prompts_by_hand():
    """Resamples of (0, 1) have means 0, 0.5, 1 with probabilities 1/4, 1/2, 1/4: the interval is all of [0, 1]."""
    assert statistics.mean([0.0, 1.0]) == Estimate(0.5, 0.0, 1.0, 2)


def test_three_prompts_by_hand():
    """Of the 27 resamples of (0, 0, 3) 8 have mean 0, 12 mean 1, 6 mean 2 and 1 (3.7% > 2.5%) mean 3."""
    assert statistics.mean([0.0, 0.0, 3.0]) == Estimate(1.0, 0.0, 3.0, 3)


def test_paired_difference_ignores_what_prompts_share():
    difficulty = np.arange(50.0)
    found = statistics.difference((difficulty + 1).tolist(), difficulty.tolist())
    assert found == Estimate(1.0, 1.0, 1.0, 50) and found.excludes(0.0)
    assert not statistics.difference([1.0, -1.0], [0.0, 0.0]).excludes(0.0)


def test_ratio_is_of_means_and_paired():
    assert statistics.ratio([2.0, 6.0, 4.0], [1.0, 3.0, 2.0]) == Estimate(2.0, 2.0, 2.0, 3)
    assert statistics.ratio([1.0, 3.0], [1.0, 1.0]).value == 2.0  # the mean of the ratios is 2 as well, but not here:
    assert statistics.ratio([1.0, 1.0], [1.0, 3.0]).value == 0.5
    assert statistics.ratio([1.0, 1.0], [1.0, 3.0]).low == pytest.approx(1 / 3)


def test_ratio_to_nothing_is_infinite():
    assert statistics.ratio([1.0, 1.0], [0.0, 0.0]).value == math.inf
    some = statistics.ratio([1.0, 1.0], [0.0, 1.0])
    assert some.value == 2.0 and some.high == math.inf


def test_one_prompt_says_nothing_about_others():
    found = statistics.mean([0.3])
    assert (found.low, found.high, found.n) == (-math.inf, math.inf, 1) and not found.excludes(0.0)


@pytest.mark.parametrize("name", ["mean", "difference", "ratio"])
def test_coverage(name):
    """The interval holds the truth in 95% of data sets, a little less for the percentile bootstrap of 60 prompts."""
    rng = np.random.default_rng(1)
    hits, trials = 0, 400
    for _ in range(trials):
        shared = rng.gamma(4.0, 0.25, 60)  # mean 1
        ours, theirs = shared * rng.gamma(4.0, 0.25, 60), 2.0 * shared
        arguments = (ours,) if name == "mean" else (ours, theirs)
        found = getattr(statistics, name)(*arguments)
        hits += found.low <= {"mean": 1.0, "difference": -1.0, "ratio": 0.5}[name] <= found.high
    assert 0.90 <= hits / trials <= 0.98


def test_interval_shrinks_with_the_root_of_the_prompts():
    values = np.random.default_rng(0).normal(size=1600)
    widths = [found.high - found.low for found in (statistics.mean(values[:n]) for n in (100, 1600))]
    assert widths[0] / widths[1] == pytest.approx(4.0, rel=0.3)


def test_seeded():
    values = np.random.default_rng(0).normal(size=20)
    assert statistics.mean(values) == statistics.mean(values)
    assert statistics.mean(values) != statistics.mean(values, seed=1)


def test_map():
    assert Estimate(0.0, -1.0, 1.0, 9).map(math.exp) == Estimate(1.0, math.exp(-1), math.e, 9)


def test_bad_numbers():
    with pytest.raises(ConfigError, match="3 and 2"):
        statistics.difference([1, 2, 3], [1, 2])
    for wrong in ([], [1.0, math.nan], [math.inf]):
        with pytest.raises(ConfigError, match="finite"):
            statistics.mean(wrong)


def test_combined_averages_groups_whatever_their_size():
    groups = [[[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]]
    found = statistics.combined(lambda ours, theirs: ours - theirs, groups)
    assert found.value == pytest.approx((0.25 + 1.0) / 2 - 1.0) and found.n == 6
    # The second group does not vary: half the spread of the first group's mean alone.
    alone = statistics.mean([1.0, 0.0, 0.0, 0.0])
    assert found.high - found.low == pytest.approx((alone.high - alone.low) / 2)


def test_combined_agrees_with_the_plain_numbers():
    rng = np.random.default_rng(0)
    x, y = rng.random((2, 30)).tolist()
    assert statistics.combined(lambda m: m, [[x]]) == statistics.mean(x)
    assert statistics.combined(lambda a, b: a / b, [[x, y]]) == statistics.ratio(x, y)


def test_groups_are_resampled_each_for_itself():
    """Two groups of the same numbers: the spread of their average is that of one over the root of two, not the same."""
    x = np.random.default_rng(1).random(50).tolist()
    one, two = (statistics.combined(lambda m: m, [[x]] * k) for k in (1, 2))
    assert (two.high - two.low) / (one.high - one.low) == pytest.approx(1 / np.sqrt(2), abs=0.03)


def test_combined_needs_prompts():
    with pytest.raises(ConfigError, match="no group"):
        statistics.combined(lambda m: m, [])
    with pytest.raises(ConfigError, match="pair them by prompt"):
        statistics.combined(lambda a, b: a - b, [[[1.0, 2.0], [1.0]]])
    alone = statistics.combined(lambda m: m, [[[1.0, 2.0]], [[3.0]]])
    assert alone.value == 2.25 and np.isinf(alone.high) and alone.n == 3


def test_many_prompts_are_resampled_in_parts(monkeypatch):
    x = np.random.default_rng(2).random(200).tolist()
    at_once = statistics.mean(x)
    monkeypatch.setattr(statistics, "_CACHED", 100)
    in_parts = statistics.mean(x)
    assert in_parts.low == pytest.approx(at_once.low, abs=3e-3) and in_parts.high == pytest.approx(
        at_once.high, abs=3e-3
    )


def test_warnings():
    assert statistics.undecided(statistics.Estimate(0.1, -0.1, 0.3, 24)) == "undecided (n=24)"
    assert statistics.undecided(statistics.Estimate(0.1, 0.01, 0.3, 24)) == ""
    assert statistics.too_wide(statistics.Estimate(0.9, 0.8, 1.01, 24)) == "too wide to decide (n=24)"
    assert statistics.too_wide(statistics.Estimate(0.9, 0.85, 0.95, 24)) == ""
    assert statistics.too_wide(statistics.Estimate(0.9, -np.inf, np.inf, 1)) == "n=1 decides nothing"
    alone = statistics.Estimate(0.9, -np.inf, np.inf, 9)
    assert statistics.undecided(alone) == statistics.too_wide(alone) == "no interval, a task has n=1 (n=9 in all)"
    assert statistics.too_wide(statistics.ratio([1.0, 0.0], [0.0, 1.0])) == "too wide to decide (n=2)"  # up to infinity


def test_a_number_without_an_interval_keeps_none():
    alone = statistics.mean([3.0])
    assert not alone.bounded and alone.map(np.expm1) == statistics.Estimate(np.expm1(3.0), -np.inf, np.inf, 1)
    assert statistics.mean([1.0, 2.0]).bounded
