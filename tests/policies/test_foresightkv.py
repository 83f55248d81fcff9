"""ForesightKV's policy: statistics, scores and replay against plain numpy; what came later; refusals."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dcache
from dcache import cache as kv
from dcache import model
from dcache.errors import ConfigError
from dcache.policies import Trained, foresightkv, make
from dcache.policies.base import keep_set
from tests import naive
from tests.naive import TINY

L, K, G, N, H = TINY.num_layers, TINY.num_kv_heads, TINY.group_size, TINY.num_heads, TINY.head_dim
KEY = jax.random.key(0)
BLOCK, PAD = 12, 56
POLICY = make("foresightkv", block=BLOCK, shape=(L, K, G, H))
WEIGHTS = jax.tree.map(lambda x: x + 0.1, POLICY.init(KEY))
# The last block of the first text is short; the second ends long before the padding; the third is shorter than a block.
TEXTS = [naive.some_tokens(50, seed=1), naive.some_tokens(24, seed=2), naive.some_tokens(7, seed=3)]
ROUNDS = math.ceil(PAD / BLOCK)
keep_jit = jax.jit(keep_set, static_argnums=0)


@functools.cache
def dense(which):
    return naive.forward(naive.weights(), TINY, TEXTS[which])


@functools.cache
def prompts():
    """The cache of TEXTS in one padded batch."""
    return naive.read(TEXTS, POLICY.needs, pad=PAD)[1]


@functools.cache
def observed():
    """The same after the policy's look."""
    see = jax.jit(lambda weights, params, cache: POLICY.observe(weights, params, TINY, cache, None, None))
    return see(WEIGHTS, naive.weights(), prompts())


def ends_of(count):
    return [min((r + 1) * BLOCK, count) for r in range(ROUNDS)]


def naive_statistics(probs):
    """[R, N, T, 8] of one layer's attention [N, T, T]."""
    n, count, _ = probs.shape
    out, total, decayed, start = [], np.zeros((n, count)), np.zeros((n, count)), 0
    for end in ends_of(count):
        rows = probs[:, max(0, end - BLOCK) : end]
        fresh = probs[:, start:end].sum(1)
        total = total + fresh
        if end > start:
            decayed = 0.9 * decayed + fresh
        tails = [rows[:, -width:].sum(1) for width in (8, 16, 32)]
        out.append(np.stack([rows.max(1), rows.min(1), rows.sum(1), *tails, total, decayed], -1))
        start = end
    return np.stack(out)


def standard(x):
    """[T, F] -> zero mean and unit variance along T."""
    return (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-6)


def naive_scores(which):
    """[R, L, K, T]; tokens after a block's end hold NaN."""
    d = dense(which)
    weights = jax.tree.map(lambda x: np.asarray(x, np.float64), WEIGHTS)
    count = d.probs.shape[-1]
    out = np.full((ROUNDS, L, K, count), np.nan)
    for l in range(L):
        found = naive_statistics(d.probs[l])
        for h in range(K):
            key, value = standard(d.keys[l, h]), standard(d.values[l, h])
            for r, end in enumerate(ends_of(count)):
                logs = np.log(found[r, h * G : (h + 1) * G, :end] + 1e-6)  # [G, end, 8]
                logs = standard(logs.transpose(1, 0, 2).reshape(end, -1))
                x = np.concatenate([key[:end], value[:end], logs], -1)
                w = np.concatenate([weights[name][l, h] for name in ("key", "value", "attention")])
                hidden = x @ w + weights["bias"][l, h]
                hidden = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
                out[r, l, h, :end] = -hidden @ weights["out"][l, h]
    return out


def naive_replay(scores, count, budget, block=BLOCK):
    """bool[T]: one head's survivors. scores: [R, T]."""
    alive, newest = np.zeros(count, bool), min(block, budget // 4)
    start = 0
    for r, end in enumerate(min((r + 1) * block, count) for r in range(len(scores))):
        alive[start:end] = True
        while alive.sum() > budget:
            candidates = [i for i in np.flatnonzero(alive) if i < end - newest]
            alive[min(candidates, key=lambda i: (scores[r, i], -i))] = False
        start = end
    return alive


def test_statistics():
    def stacked(found, k, v, position):
        return found

    got = jax.jit(lambda params, cache: foresightkv.look(params, TINY, cache, BLOCK, stacked))(
        naive.weights(), prompts()
    )
    assert got.shape == (L, ROUNDS, len(TEXTS), N, PAD, foresightkv.STATISTICS)
    for b, text in enumerate(TEXTS):
        for l in range(L):
            want = naive_statistics(dense(b).probs[l])
            np.testing.assert_allclose(got[l, :, b, :, : len(text)], want, rtol=1e-3, atol=1e-6)


def test_scores():
    got = np.asarray(jax.jit(POLICY.rounds)(observed()))
    assert got.shape == (ROUNDS, L, len(TEXTS), K, PAD) and np.isfinite(got).all()
    for b, text in enumerate(TEXTS):
        want = naive_scores(b)
        np.testing.assert_allclose(
            np.where(np.isnan(want), 0, got[:, :, b, :, : len(text)]), np.nan_to_num(want), rtol=5e-3, atol=5e-3
        )
    np.testing.assert_array_equal(POLICY.scores((), observed(), KEY), got[-1])


@pytest.mark.parametrize("budget", [(16, 9, 4), (30, 24, 7), (1, 2, 3), (60, 60, 60)])
def test_replay(budget):
    cache = observed()
    keep = np.asarray(keep_jit(POLICY, (), cache, jnp.asarray(budget, jnp.int32), KEY))
    scores = np.asarray(POLICY.rounds(cache))
    for b, text in enumerate(TEXTS):
        count = len(text)
        assert not keep[:, b, :, count:].any()
        assert (keep[:, b].sum(-1) == min(count, budget[b])).all()
        newest = min(BLOCK, budget[b] // 4, count)
        assert keep[:, b, :, count - newest : count].all()
        for l in range(L):
            for h in range(K):
                want = naive_replay(scores[:, l, b, h, :count], count, budget[b])
                np.testing.assert_array_equal(keep[l, b, h, :count], want)


def test_evictions_on_the_way_matter():
    # A token that only the last block looks at has gone by then.
    cache = observed()
    keep = np.asarray(keep_jit(POLICY, (), cache, jnp.asarray([16, 16, 16], jnp.int32), KEY))
    last = np.asarray(POLICY.scores((), cache, KEY))[:, 0, :, :50]
    at_once = naive.top(last, np.ones(last.shape, bool), 16, np.arange(50) >= np.full(last.shape, 46))
    assert (keep[:, 0, :, :50] != at_once).any()


def test_what_came_later_stays_in_both_layouts():
    budget = jnp.asarray([16, 9, 6], jnp.int32)
    bare = kv.restrict(observed(), POLICY.needs)
    first = keep_jit(POLICY, (), bare, budget, KEY)
    cache = kv.compact(bare, first, 16, 4)
    fed = jnp.asarray([[4, 5], [6, 7], [8, 9]], jnp.int32)
    for unrolled in (False, True):
        now, params = (kv.unstack(cache), model.unstack(naive.weights())) if unrolled else (cache, naive.weights())
        for t in range(2):
            _, now = naive.extend(params, TINY, fed[:, t : t + 1], now)
        keep = np.asarray(keep_jit(POLICY, (), now, budget, KEY))
        position = np.asarray(kv.positions(now))
        assert (keep.sum(-1) == np.asarray(budget)[None, :, None]).all()
        for b, text in enumerate(TEXTS):
            assert keep[:, b][position[:, b] >= len(text)].all()
        # Two more had to go, those of the lowest scores after the last block.
        scores = np.asarray(POLICY.scores((), now, KEY))
        assert np.isfinite(scores).all()
        gone = (position >= 0) & ~keep
        assert (gone[:, :2].sum(-1) == 2).all()
        older = keep & (position < np.asarray([46, 22, 6])[None, :, None, None])
        assert (np.where(gone, scores, -np.inf).max(-1) <= np.where(older, scores, np.inf).min(-1)).all()


def test_a_policy_around_it_protects_the_same():
    budget = jnp.asarray([16, 9, 4], jnp.int32)
    guarded = np.asarray(POLICY.protects(observed(), budget))
    assert (guarded.sum(-1) == np.asarray([4, 2, 1])[None, :, None]).all()
    assert [POLICY.protected_tokens(b) for b in (3, 16, 400)] == [0, 4, BLOCK]


def test_a_trained_one_in_the_api(tiny):
    trained = Trained(POLICY, WEIGHTS)
    tokens = naive.some_tokens(40, seed=5)
    kept = dcache.keep(tiny, tokens, trained, 10)
    assert kept.shape[-1] == 40 and (np.asarray(kept).sum(-1) == 10).all()
    text = dcache.generate(tiny, [tokens], trained, 10, max_new_tokens=4)
    assert text is not None


def test_refusals(tiny):
    with pytest.raises(ConfigError, match=r"shape is \(1, 2\)"):
        make("foresightkv", shape=(1, 2))
    with pytest.raises(ConfigError, match="block is 0"):
        make("foresightkv", block=0)
    other = make("foresightkv", shape=(3, K, G, H))
    with pytest.raises(ConfigError, match=r"\(3, 2, 2, 8\); the model has \(2, 2, 2, 8\). Train one"):
        dcache.keep(tiny, TEXTS[0], Trained(other, other.init(KEY)), 10)
