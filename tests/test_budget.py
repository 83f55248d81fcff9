"""Budgets: ratio or count -> tokens, and the keep-set of the highest scores."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import budget as budgets
from dcache.errors import BudgetError
from tests import naive

keep_top = jax.jit(budgets.keep_top)


@pytest.mark.parametrize("bad", [0, -1, 1.5, 0.0, -0.25, True, False, "x", "0.25", None, math.nan, math.inf, 1 + 1e-6,
                                 np.float32(1.5), np.int64(0), [0.25], np.asarray([0.5])])  # fmt: skip
def test_check_refuses(bad):
    with pytest.raises(BudgetError, match="budget"):
        budgets.check(bad)
    with pytest.raises(BudgetError):
        budgets.tokens_kept(bad, 100)


@pytest.mark.parametrize("good", [1, 7, 10**6, 0.25, 1.0, 1e-3, np.float32(0.5), np.float64(0.125), np.int32(3)])
def test_check_accepts(good):
    result = budgets.check(good)
    assert result == good and type(result) in (int, float)
    assert isinstance(result, int) == isinstance(good, int | np.integer)  # 1 is a token, 1.0 is everything


def test_tokens_kept_by_hand():
    assert budgets.tokens_kept(0.25, 512) == 128
    assert budgets.tokens_kept(0.25, 515) == 128  # floor
    assert budgets.tokens_kept(0.25, 100) == 32  # B_min
    assert budgets.tokens_kept(0.25, 100, minimum=1) == 25
    assert budgets.tokens_kept(0.25, 20) == 20  # never more than there is
    assert budgets.tokens_kept(1.0, 20) == 20
    assert budgets.tokens_kept(5, 100) == 5  # a count knows no minimum
    assert budgets.tokens_kept(1, 100) == 1
    assert budgets.tokens_kept(500, 100) == 100
    assert budgets.tokens_kept(0.29, 100, minimum=1) == 29  # 0.29 * 100 is 28.999... in binary
    assert budgets.tokens_kept(0.0001, 100, minimum=0) == 0


RATIOS = sorted(
    {0.5, 0.25, 0.125, 0.0625, 0.9, 0.99, 1.0, 1 / 3, 2 / 3, *(i / 20 for i in range(1, 20)), 0.07, 0.29, 0.57, 0.58}
)


@pytest.mark.parametrize("minimum", [1, 32])
def test_traced_equals_python(minimum):
    seen = np.arange(1, 5001)
    exact = [Fraction(r).limit_denominator(1000) for r in RATIOS]
    traced = jax.jit(jax.vmap(lambda r: budgets.tokens_kept_traced(r, jnp.asarray(seen, jnp.int32), minimum)))(
        jnp.asarray(RATIOS, jnp.float32)
    )
    for ratio, fraction, got in zip(RATIOS, exact, np.asarray(traced), strict=True):
        want = np.minimum(np.maximum(seen * fraction.numerator // fraction.denominator, minimum), seen)
        python = [budgets.tokens_kept(ratio, int(n), minimum) for n in seen]
        np.testing.assert_array_equal(python, want, err_msg=f"tokens_kept, ratio {ratio}")
        np.testing.assert_array_equal(got, want, err_msg=f"tokens_kept_traced, ratio {ratio}")


def test_traced_counts():
    seen = jnp.asarray([1, 5, 40, 5000], jnp.int32)
    for budget in (1, 2, 5, 33, 4999, 6000, 0.25, 1.0):  # one token, and a ratio of one, are different things
        got = budgets.tokens_kept_traced(jnp.float32(budgets.encode(budget)), seen)
        np.testing.assert_array_equal(got, [budgets.tokens_kept(budget, int(n)) for n in seen])
        assert got.dtype == jnp.int32


def test_keep_top_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(40):
        scores = rng.choice([-2.0, -1.0, 0.0, 0.5, 3.0], (2, 3, 9)).astype(np.float32)  # many ties
        filled = rng.random((2, 3, 9)) < rng.choice([0.0, 0.3, 0.9])
        protected = rng.random((2, 3, 9)) < 0.3
        budget = rng.integers(0, 11, (2, 3)).astype(np.int32)
        for guard in (None, protected):
            got = np.asarray(keep_top(scores, filled, budget, guard))
            for index in np.ndindex(2, 3):
                want = naive.top(scores[index], filled[index], budget[index], None if guard is None else guard[index])
                np.testing.assert_array_equal(got[index], want)


def test_keep_top_ignores_what_empty_slots_hold():
    scores = jnp.asarray([1e30, -5.0, -1e30, 2.0])
    filled = jnp.asarray([False, True, True, True])
    for budget, want in [(1, [0, 0, 0, 1]), (2, [0, 1, 0, 1]), (3, [0, 1, 1, 1]), (4, [0, 1, 1, 1])]:
        np.testing.assert_array_equal(keep_top(scores, filled, jnp.int32(budget)), np.asarray(want, bool))


def test_keep_top_counts_with_random_scores(getkey):
    scores = jax.random.normal(getkey(), (4, 2000))
    filled = jax.random.bernoulli(getkey(), 0.9, (4, 2000))
    budget = jnp.asarray([1, 500, 1999, 2000], jnp.int32)
    keep = np.asarray(keep_top(scores, filled, budget))
    np.testing.assert_array_equal(keep.sum(-1), np.minimum(budget, np.asarray(filled).sum(-1)))
    assert not keep[~np.asarray(filled)].any()
    for row in range(2):
        assert (
            np.asarray(scores)[row][keep[row]].min()
            > np.asarray(scores)[row][~keep[row] & np.asarray(filled)[row]].max()
        )


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-9, 1e6, 1e30])
def test_protection_at_any_scale(size):
    # Protected slots come before all others, and among themselves in the order of their scores, whatever the scale
    # (attention masses of a long prompt are tiny).
    scores = jnp.asarray([3.0, -3.0, -1.0, 2.0, -2.0, 1.0]) * size
    protected = jnp.asarray([False, True, True, False, True, False])
    filled = jnp.ones(6, bool)
    for budget, want in [(1, {2}), (2, {2, 4}), (3, {1, 2, 4}), (4, {0, 1, 2, 4})]:
        keep = keep_top(scores, filled, jnp.int32(budget), protected)
        assert set(np.flatnonzero(keep)) == want, budget


def test_protection_of_empty_slots_is_void():
    filled = jnp.asarray([True, False, True])
    keep = keep_top(jnp.asarray([1.0, 9.0, 2.0]), filled, jnp.int32(1), jnp.asarray([False, True, False]))
    np.testing.assert_array_equal(keep, [False, False, True])
