"""Keep-set distributions by complete enumeration: frequencies, probabilities, entropy, gradients; large sizes."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import subset
from dcache.errors import ConfigError
from dcache.learn import policy_gradient as pg

SCORES = np.asarray([2.0, 1.0, 0.0, -1.0], np.float32)
# name -> scores, filled, budget. Scores of empty slots are large: they must not matter.
CASES = {
    "four": (SCORES, np.ones(4, bool), 2),
    "holes": (np.asarray([0.5, 50.0, -0.3, 1.2, 99.0, 0.1], np.float32), np.asarray([1, 0, 1, 1, 0, 1], bool), 2),
    "all": (SCORES, np.ones(4, bool), 4),
    "one": (np.asarray([0.0, 3.0, 1.0], np.float32), np.ones(3, bool), 1),
    "all_but_one": (np.asarray([0.3, -0.8, 0.0, 2.0, 1.0], np.float32), np.ones(5, bool), 4),
}
MOST = 4


def keep_sets(filled, budget):
    return list(itertools.combinations(np.flatnonzero(filled).tolist(), budget))


def orders(filled, budget):
    """All ordered draws, as `sample` represents them: kept slots first, then the rest."""
    for front in itertools.permutations(np.flatnonzero(filled).tolist(), budget):
        yield front, np.asarray([*front, *(i for i in range(len(filled)) if i not in front)], np.int32)


def plackett_luce_probability(scores, filled, front):
    left, p = [i for i in np.flatnonzero(filled)], 1.0
    for i in front:
        p *= math.exp(scores[i]) / sum(math.exp(scores[j]) for j in left)
        left.remove(i)
    return p


def subset_probability(scores, filled, keep):
    weight = {a: math.exp(sum(float(scores[i]) for i in a)) for a in keep_sets(filled, len(keep))}
    return weight[tuple(sorted(keep))] / sum(weight.values())


def exact(law, scores, filled, budget):
    """Probability of every keep-set under the sampling of a law."""
    if law == "subset":
        return {a: subset_probability(scores, filled, a) for a in keep_sets(filled, budget)}
    total = dict.fromkeys(keep_sets(filled, budget), 0.0)
    for front, _ in orders(filled, budget):
        total[tuple(sorted(front))] += plackett_luce_probability(scores, filled, front)
    return total


@functools.partial(jax.jit, static_argnums=(0, 5))
def draw(law, keys, scores, filled, budget, most=MOST):
    return jax.vmap(lambda k: subset.sample(law, k, scores, filled, budget, most))(keys)


@functools.partial(jax.jit, static_argnums=0)
def log_probs(law, scores, order, filled, budget):
    return jax.vmap(lambda o: subset.log_prob(law, scores, o, filled, budget, MOST))(order)


value_and_grad = jax.jit(jax.value_and_grad(subset.log_prob, argnums=1), static_argnums=(0, 5))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("law", subset.LAWS)
def test_sampling_frequencies(getkey, law, case):
    scores, filled, budget = CASES[case]
    count = 20_000
    order = np.asarray(draw(law, jax.random.split(getkey(), count), scores, filled, jnp.int32(budget)))
    np.testing.assert_array_equal(np.sort(order, axis=1), np.broadcast_to(np.arange(len(scores)), order.shape))
    keep = np.sort(order[:, :budget], axis=1)
    assert filled[keep].all()
    for a, p in exact(law, scores, filled, budget).items():
        seen = (keep == np.asarray(a)).all(1).mean()
        assert abs(seen - p) <= 5 * math.sqrt(p * max(1 - p, 0) / count) + 1e-9, (a, seen, p)


def test_order_of_the_draw(getkey):
    # Plackett-Luce: the kept slots stand in the order in which they were drawn.
    count = 20_000
    order = np.asarray(draw("plackett_luce", jax.random.split(getkey(), count), SCORES, np.ones(4, bool), jnp.int32(2)))
    for front, _ in orders(np.ones(4, bool), 2):
        p = plackett_luce_probability(SCORES, np.ones(4, bool), front)
        seen = (order[:, :2] == np.asarray(front)).all(1).mean()
        assert abs(seen - p) <= 5 * math.sqrt(p * (1 - p) / count), front


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("law", subset.LAWS)
def test_log_probabilities(law, case):
    scores, filled, budget = CASES[case]
    fronts, all_orders = zip(*orders(filled, budget), strict=True)
    got = np.exp(log_probs(law, scores, np.stack(all_orders), filled, jnp.int32(budget)))
    if law == "plackett_luce":
        want = [plackett_luce_probability(scores, filled, f) for f in fronts]
        assert got.sum() == pytest.approx(1, abs=1e-5)
    else:
        want = [subset_probability(scores, filled, f) for f in fronts]
        assert got.sum() == pytest.approx(math.factorial(budget), rel=1e-5)  # every set stands there in all its orders
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("law", subset.LAWS)
def test_log_probability_ignores_the_rest_of_the_order(law):
    scores, filled, _ = CASES["holes"]
    a = np.asarray([[3, 0, 2, 5, 1, 4], [3, 0, 5, 2, 4, 1]], np.int32)
    got = log_probs(law, scores, a, filled, jnp.int32(2))
    assert float(got[0]) == pytest.approx(float(got[1]), abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_entropy_is_exact(case):
    scores, filled, budget = CASES[case]
    want = -sum(p * math.log(p) for p in exact("subset", scores, filled, budget).values())
    assert float(subset.entropy(scores, filled, jnp.int32(budget), MOST)) == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_log_partition(case):
    scores, filled, budget = CASES[case]
    want = math.log(sum(math.exp(sum(float(scores[i]) for i in a)) for a in keep_sets(filled, budget)))
    assert float(subset.log_partition(scores, filled, jnp.int32(budget), MOST)) == pytest.approx(want, abs=1e-5)


def test_paper_numbers():
    # Method note 1.2.2: for s = (2, 1, 0, -1), B = 2 the two laws give {0, 1} the probabilities 0.628 and 0.586.
    filled = np.ones(4, bool)
    assert exact("plackett_luce", SCORES, filled, 2)[0, 1] == pytest.approx(0.628, abs=5e-4)
    order = np.asarray([[0, 1, 2, 3]], np.int32)
    for law in ("subset", "paper"):
        assert math.exp(float(log_probs(law, SCORES, order, filled, jnp.int32(2))[0])) == pytest.approx(0.586, abs=5e-4)
    both = np.asarray([[0, 1, 2, 3], [1, 0, 2, 3]], np.int32)
    assert np.exp(log_probs("plackett_luce", SCORES, both, filled, jnp.int32(2))).sum() == pytest.approx(
        0.628, abs=5e-4
    )


def reward_of(front):
    """Any function of the kept set."""
    return 1.0 + 0.7 * sum(front) - 2.0 * (0 in front) * (3 in front) + 0.3 * (1 in front)


def expected_reinforce(law, scores, filled, budget, value_of):
    """Expectation over all draws of the gradient of minus `reinforce_loss`, and the exact gradient of E[reward].

    `value_of(front, log_prob)` is what multiplies the score function.
    """
    fronts, all_orders = zip(*orders(filled, budget), strict=True)
    all_orders = np.stack(all_orders)
    if law == "subset":  # in the sampler a set has one order only: spread its probability evenly over all of them
        p = np.asarray([subset_probability(scores, filled, f) / math.factorial(budget) for f in fronts])
    else:
        p = np.asarray([plackett_luce_probability(scores, filled, f) for f in fronts])
    lp = log_probs(law, scores, all_orders, filled, jnp.int32(budget))
    advantages = jnp.asarray([value_of(f, float(l)) for f, l in zip(fronts, lp, strict=True)], jnp.float32)

    def minus_loss(s):  # the mean over draws, weighted by how likely each is
        lp = log_probs(law, s, all_orders, filled, jnp.int32(budget))[:, None]
        weight = jnp.asarray(p * len(p), jnp.float32)
        return -pg.reinforce_loss(lp, (advantages * weight)[:, None])

    return np.asarray(jax.jit(jax.grad(minus_loss))(jnp.asarray(scores)))


def numerical_gradient(function, scores):
    out = []
    for i in range(len(scores)):
        up, down = (np.asarray(scores, np.float64).copy() for _ in range(2))
        up[i] += 1e-5
        down[i] -= 1e-5
        out.append((function(up) - function(down)) / 2e-5)
    return np.asarray(out)


@pytest.mark.parametrize("case", ["four", "holes"])
@pytest.mark.parametrize("law", ["plackett_luce", "subset"])
def test_reinforce_is_unbiased(law, case):
    scores, filled, budget = CASES[case]

    def expected(s):
        return sum(p * reward_of(a) for a, p in exact(law, s, filled, budget).items())

    want = numerical_gradient(expected, scores)
    for baseline in (0.0, 5.0):  # a constant baseline changes nothing in the mean
        got = expected_reinforce(law, scores, filled, budget, lambda f, _, b=baseline: reward_of(f) - b)
        np.testing.assert_allclose(got, want, atol=2e-5)
    assert (got[~filled] == 0).all()


def test_paper_is_biased():
    filled = np.ones(4, bool)
    want = numerical_gradient(lambda s: sum(p * reward_of(a) for a, p in exact("paper", s, filled, 2).items()), SCORES)
    got = expected_reinforce("paper", SCORES, filled, 2, lambda f, _: reward_of(f))
    assert np.abs(got - want).max() > 0.05
    # And it depends on a baseline, which no unbiased estimator does.
    shifted = expected_reinforce("paper", SCORES, filled, 2, lambda f, _: reward_of(f) - 5.0)
    assert np.abs(got - shifted).max() > 0.05


@pytest.mark.parametrize("law", ["plackett_luce", "subset"])
def test_entropy_bonus(law):
    # Method note 1.2.9. The detached surprise as a reward has the entropy's gradient; differentiating the surprise
    # itself has the gradient zero in the mean.
    filled = np.ones(4, bool)

    def entropy(s):
        if law == "subset":
            p = np.asarray(list(exact(law, s, filled, 2).values()))
        else:  # of the ordered draw
            p = np.asarray([plackett_luce_probability(s, filled, f) for f, _ in orders(filled, 2)])
        return -np.sum(p * np.log(p))

    score = expected_reinforce(law, SCORES, filled, 2, lambda _, lp: -lp)
    np.testing.assert_allclose(score, numerical_gradient(entropy, SCORES), atol=2e-5)
    direct = -expected_reinforce(law, SCORES, filled, 2, lambda *_: 1.0)
    np.testing.assert_allclose(direct, 0, atol=1e-5)
    assert np.abs(score).max() > 0.1


@pytest.mark.parametrize("law", subset.LAWS)
def test_gradient_of_the_log_probability(law):
    scores, filled, budget = CASES["holes"]
    order = np.asarray([3, 0, 2, 5, 1, 4], np.int32)

    def value(s):
        p = (plackett_luce_probability if law == "plackett_luce" else subset_probability)(s, filled, (3, 0))
        return math.log(p)

    _, got = value_and_grad(law, jnp.asarray(scores), order, filled, jnp.int32(budget), MOST)
    want = numerical_gradient(lambda s: value(np.where(filled, s, 0.0)), scores)
    np.testing.assert_allclose(np.where(filled, got, 0), np.where(filled, want, 0), atol=1e-5)
    assert (np.asarray(got)[~filled] == 0).all()


@pytest.mark.parametrize("law", subset.LAWS)
def test_kept_is_the_front_of_the_order(getkey, law):
    scores, filled, budget = CASES["holes"]
    order = draw(law, jax.random.split(getkey(), 20), scores, filled, jnp.int32(budget))
    keep = np.asarray(jax.vmap(lambda o: subset.kept(o, filled, jnp.int32(budget)))(order))
    for row, mask in zip(np.asarray(order), keep, strict=True):
        assert set(np.flatnonzero(mask)) == set(row[:budget].tolist())


def test_same_key_same_draw(getkey):
    keys = jnp.repeat(jax.random.split(getkey(), 1), 2)
    for law in subset.LAWS:
        order = np.asarray(draw(law, keys, SCORES, np.ones(4, bool), jnp.int32(2)))
        np.testing.assert_array_equal(order[0], order[1])


def test_paper_draws_like_plackett_luce(getkey):
    keys = jax.random.split(getkey(), 10)
    a, b = (draw(law, keys, SCORES, np.ones(4, bool), jnp.int32(2)) for law in ("paper", "plackett_luce"))
    np.testing.assert_array_equal(a, b)


def test_unknown_law():
    with pytest.raises(ConfigError, match="gumbel"):
        subset.check_law("gumbel")


LARGE, LARGE_BUDGET = 4096, 1024


def log_partition_float64(scores, budget):
    table = np.full(budget + 1, -np.inf)
    table[0] = 0.0
    for s in np.asarray(scores, np.float64):
        table[1:] = np.logaddexp(table[1:], table[:-1] + s)
    return table[budget]


@pytest.mark.parametrize("spread, tolerance", [(1.0, 2e-3), (30.0, 0.05)])
def test_large_and_stable(getkey, spread, tolerance):
    # log Z of scores with deviation 30 is in the tens of thousands, where float32 steps by 0.001: 4,096 roundings leave
    # a few percent on the gradient of the `subset` law.
    scores = jax.random.normal(getkey(), (LARGE,)) * spread
    filled = jax.random.bernoulli(getkey(), 0.95, (LARGE,))
    budget = jnp.int32(LARGE_BUDGET)
    for law in ("plackett_luce", "subset"):
        order = draw(law, jax.random.split(getkey(), 1), scores, filled, budget, LARGE_BUDGET)[0]
        keep = np.asarray(subset.kept(order, filled, budget))
        assert keep.sum() == LARGE_BUDGET and not keep[~np.asarray(filled)].any()
        value, grad = value_and_grad(law, scores, order, filled, budget, LARGE_BUDGET)
        assert np.isfinite(value) and value < 0 and np.isfinite(grad).all()
        assert (np.asarray(grad)[~np.asarray(filled)] == 0).all()
        if law == "subset":  # 1 - inclusion probability where kept, minus it where not: sums to zero
            inclusion = keep - np.asarray(grad)
            assert inclusion.min() > -tolerance and inclusion.max() < 1 + tolerance
            assert inclusion.sum() == pytest.approx(LARGE_BUDGET, rel=tolerance)
            got = float(np.asarray(scores, np.float64)[keep].sum() - value)
        else:
            ordered = np.asarray(scores, np.float64)[np.asarray(order)[: int(filled.sum())]]
            tail = np.logaddexp.accumulate(ordered[::-1])[::-1]
            assert float(value) == pytest.approx(np.sum((ordered - tail)[:LARGE_BUDGET]), rel=1e-5)
    want = log_partition_float64(np.asarray(scores)[np.asarray(filled)], LARGE_BUDGET)
    assert got == pytest.approx(want, rel=1e-5)


def test_large_scores_stay_finite():
    scores = jnp.asarray([1e4, -1e4, 0.0, 5e3])
    for law in subset.LAWS:
        for order in ([0, 3, 2, 1], [1, 2, 0, 3]):
            value, grad = value_and_grad(law, scores, np.asarray(order, np.int32), np.ones(4, bool), jnp.int32(2), MOST)
            assert np.isfinite(value) and np.isfinite(grad).all()
