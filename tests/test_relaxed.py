"""Relaxed keep-sets: thresholds, extents and their slopes, and the student that has one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import cache as kv
from dcache import model, relaxed, rollout
from dcache.attention import weighted_softmax
from dcache.policies import make
from dcache.policies.base import keep_set
from tests import naive
from tests.naive import TINY

P, T = 40, 6
TEXT = naive.some_tokens(P + T, seed=4)
soft_keep = jax.jit(relaxed.soft_keep, static_argnames="straight_through")
student_jit = jax.jit(rollout.relaxed_student, static_argnums=(1, 2), static_argnames=("straight_through", "minimum"))


def some_scores(shape=(3, 50), seed=0):
    rng = np.random.default_rng(seed)
    filled = rng.random(shape) < 0.8
    return jnp.asarray(rng.normal(size=shape), jnp.float32), jnp.asarray(filled), filled.sum(-1)


@pytest.mark.parametrize("temperature", [0.01, 0.3, 5.0])
def test_extents_sum_to_the_budget(temperature):
    scores, filled, held = some_scores()
    count = jnp.asarray([1, 10, held[2] - 1], jnp.int32)
    soft = np.asarray(soft_keep(scores, filled, count, jnp.float32(temperature), straight_through=False))
    np.testing.assert_allclose(soft.sum(-1), count, rtol=1e-3)
    assert (soft[~np.asarray(filled)] == 0).all() and (soft >= 0).all() and (soft <= 1).all()
    for row, s, f in zip(soft, np.asarray(scores), np.asarray(filled), strict=True):
        order = np.argsort(-s[f])
        assert (np.diff(row[f][order]) <= 1e-6).all()  # in the order of the scores


def test_cold_extents_are_the_keep_set_and_straight_through_is_it_at_every_temperature():
    scores, filled, _ = some_scores()
    count = jnp.asarray([5, 20, 7], jnp.int32)
    want = np.stack(
        [naive.top(s, f, int(c)) for s, f, c in zip(np.asarray(scores), np.asarray(filled), count, strict=True)]
    )  # fmt: skip
    cold = soft_keep(scores, filled, count, jnp.float32(1e-4), straight_through=False)
    np.testing.assert_allclose(cold, want, atol=0.02)
    for temperature in (0.1, 3.0):
        hard = soft_keep(scores, filled, count, jnp.float32(temperature), straight_through=True)
        np.testing.assert_allclose(hard, want, atol=1e-6)


def test_everything_is_kept_where_the_budget_is_not_smaller():
    scores, filled, held = some_scores()
    for straight in (True, False):
        got = soft_keep(scores, filled, jnp.asarray(held, jnp.int32), jnp.float32(0.5), straight_through=straight)
        np.testing.assert_allclose(got, filled, atol=1e-5)


def test_slopes_are_those_of_the_extents():
    scores, filled, _ = some_scores(shape=(1, 12))
    count, temperature = jnp.asarray([4], jnp.int32), jnp.float32(0.7)
    value = np.random.default_rng(1).normal(size=(1, 12)).astype(np.float32)

    def total(s, straight):
        return jnp.sum(value * relaxed.soft_keep(s, filled, count, temperature, straight_through=straight))

    got = np.asarray(jax.grad(total)(scores, False))
    step = 1e-2
    for i in range(12):
        move = jnp.zeros_like(scores).at[0, i].set(step)
        slope = (total(scores + move, False) - total(scores - move, False)) / (2 * step)
        assert float(got[0, i]) == pytest.approx(float(slope), abs=2e-3)
    np.testing.assert_allclose(jax.grad(total)(scores, True), got, rtol=1e-5)  # the same on the way back
    assert abs(got.sum()) < 1e-5  # raising all scores changes nothing


def test_weighted_softmax_of_whole_entries_is_the_softmax_of_those():
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.normal(0, 30, (4, 9)), jnp.float32)
    weight = jnp.asarray(rng.random((4, 9)) < 0.5, jnp.float32).at[:, 0].set(1.0)
    want = jax.nn.softmax(jnp.where(weight > 0, logits, -jnp.inf), axis=-1)
    np.testing.assert_allclose(weighted_softmax(logits, weight), want, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        weighted_softmax(logits, jnp.full((4, 9), 0.5)), jax.nn.softmax(logits, axis=-1), rtol=1e-5, atol=1e-7
    )


def test_weighted_softmax_slopes():
    logits = jnp.asarray([0.3, -1.0, 2.0, 0.5, 50.0], jnp.float32)
    weight = jnp.asarray([1.0, 0.6, 0.0, 1.0, 0.0], jnp.float32)
    value = jnp.asarray([1.0, -2.0, 0.5, 3.0, 4.0], jnp.float32)

    def mixed(w):
        return jnp.sum(weighted_softmax(logits, w) * value)

    got = np.asarray(jax.grad(mixed)(weight), np.float64)
    e = np.exp(np.asarray(logits, np.float64))
    z = (e * np.asarray(weight)).sum()
    out = (e * np.asarray(weight) * np.asarray(value)).sum() / z
    there = e / z * (np.asarray(value) - out)
    returned = e / (z + e) * (np.asarray(value) - out)  # the change if a token that is gone came back
    np.testing.assert_allclose(got, np.where(np.asarray(weight) > 0, there, returned), rtol=1e-4)


def test_slots_of_no_weight_are_evicted_slots():
    params = naive.weights()
    _, cache = naive.read([TEXT[:P]])
    rng = np.random.default_rng(3)
    keep = jnp.asarray(rng.random(kv.positions(cache).shape) < 0.4)
    extend = jax.jit(model.extend, static_argnums=1)
    want, _ = extend(params, TINY, jnp.asarray(TEXT[P:])[None], kv.evict(naive.grow(cache, T), pad(keep, True)), 40)
    watched = jax.jit(
        lambda w: model.extend_watched(
            params, TINY, jnp.asarray(TEXT[P:])[None], naive.grow(cache, T), jnp.int32(P), lambda p, q: None, w
        )[0]
    )
    np.testing.assert_allclose(watched(pad(keep.astype(jnp.float32), 1.0)), want, rtol=1e-4, atol=1e-5)


def pad(x, value):
    return jnp.pad(x, [(0, 0)] * 3 + [(0, T)], constant_values=value)


SIGNALS = ("alpha", "last", "pos", "last_upper_near", "vnorm")


def policy_of(granularity, scope="head", heads=()):
    return make("distillcache", granularity=granularity, scope=scope, heads=heads, signals=SIGNALS, hidden=8)


SHAPES = [
    ("sequence", "head", ()), ("layer", "head", ()), ("head", "head", ()), ("head", "layer", ()), ("head", "model", ()),
    ("head", "model", (TINY.num_layers, TINY.num_kv_heads)),
]  # fmt: skip


@functools.cache
def setting(policy):
    params, weights = naive.weights(), policy.init(jax.random.key(1))
    weights = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), weights)
    _, cache = naive.read([TEXT[:P]], policy.needs)
    cache = policy.observe((), params, TINY, cache, None, None)
    teacher = jax.jit(rollout.teacher_log_probs, static_argnums=1)(params, TINY, cache, jnp.asarray(TEXT[P:]))
    return params, weights, cache, teacher


def student(policy, weights, **settings):
    params, _, cache, teacher = setting(policy)
    return student_jit(
        params, TINY, policy, weights, cache, jnp.asarray(TEXT[P:]), teacher, jnp.float32(0.25), minimum=4, **settings
    )


@pytest.mark.parametrize("granularity, scope, heads", SHAPES)
def test_a_straight_through_student_is_the_student_that_is_evaluated(granularity, scope, heads):
    policy = policy_of(granularity, scope, heads)
    params, weights, cache, teacher = setting(policy)
    follow = jax.jit(rollout.follow, static_argnums=(1, 2), static_argnames=("evict_every", "minimum"))
    log_q, keep = follow(
        params, TINY, policy, weights, cache, jnp.asarray(TEXT[P:]), jnp.asarray([0.25], jnp.float32), jax.random.key(0),
        evict_every=0, minimum=4,
    )  # fmt: skip
    want = np.sum(np.exp(teacher) * (np.asarray(teacher) - np.asarray(log_q[0])), -1)
    got = student(policy, weights, temperature=jnp.float32(0.5), straight_through=True)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)
    assert want.max() > 1e-2  # eviction changes something
    per_head = np.asarray(keep[:, 0]).sum(-1)
    if scope == "head":
        assert (per_head == P // 4).all()
    elif scope == "layer":
        assert (per_head.sum(1) == TINY.num_kv_heads * P // 4).all() and (per_head != P // 4).any()
    else:
        assert per_head.sum() == TINY.num_layers * TINY.num_kv_heads * P // 4


@pytest.mark.parametrize("granularity, scope, heads", [SHAPES[0], SHAPES[2], SHAPES[5]])
def test_the_gradient_of_a_soft_student_is_that_of_its_kl(granularity, scope, heads):
    policy = policy_of(granularity, scope, heads)
    weights = setting(policy)[1]

    def loss(w):
        return jnp.mean(student(policy, w, temperature=jnp.float32(0.8), straight_through=False))

    grads = jax.jit(jax.grad(loss))(weights)
    norm = float(jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads))))
    step = 2e-3 / norm  # along the gradient itself, where the slope is largest
    moved = [jax.tree.map(lambda x, g, s=s: x + s * g, weights, grads) for s in (step, -step)]
    measured = float(loss(moved[0]) - loss(moved[1])) / (2 * step)
    assert norm > 1e-3 and norm**2 == pytest.approx(measured, rel=0.05)


def test_scores_that_follow_the_slope_keep_what_lowers_the_kl():
    # One head-level policy whose scores are free: descending the straight-through slope must find a better keep-set.
    policy = policy_of("head", "model", (TINY.num_layers, TINY.num_kv_heads))
    weights = setting(policy)[1]
    settings = dict(temperature=jnp.float32(1.0), straight_through=True)
    slope = jax.jit(jax.value_and_grad(lambda w: jnp.mean(student(policy, w, **settings))))
    first, _ = slope(weights)
    best = first
    for _ in range(60):
        value, grads = slope(weights)
        best = jnp.minimum(best, value)
        weights = jax.tree.map(lambda w, g: w - 0.3 * g / (1e-8 + jnp.linalg.norm(g)), weights, grads)
    assert float(best) < 0.6 * float(first)


def test_keep_set_of_later_tokens():
    # Signals that average over layers are taken once: tokens that come later stay, and the sum of the others shrinks.
    policy = policy_of("head", "model")
    params, weights, cache, _ = setting(policy)
    cache = naive.grow(cache, T)
    _, cache = jax.jit(model.extend, static_argnums=1)(params, TINY, jnp.asarray(TEXT[P:])[None], cache, jnp.int32(P))
    keep = np.asarray(keep_set(policy, weights, cache, jnp.asarray([12], jnp.int32), jax.random.key(0)))
    assert keep[..., P:].all() and keep.sum() == 12 * TINY.num_layers * TINY.num_kv_heads
