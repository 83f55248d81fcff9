"""Each heuristic against its definition: dense attention, hand-made numbers, slots out of order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import cache as kv
from dcache.attention import Stats, StatsRequest
from dcache.errors import BudgetError, ConfigError
from dcache.policies import make
from dcache.policies.base import keep_set
from tests import naive
from tests.naive import TINY

L, K, G = TINY.num_layers, TINY.num_kv_heads, TINY.group_size
KINDS = ["prefill", "plain", "sequence", "head", "unrolled"]
KEY = jax.random.key(0)
keep_jit = jax.jit(keep_set, static_argnums=0)


def kept_tokens(policy, cache, budget, sequence, count):
    """bool[L, K, count]: tokens of one sequence that the policy keeps."""
    keep = np.asarray(keep_jit(policy, (), cache, jnp.asarray(budget, jnp.int32), KEY))
    position = np.asarray(kv.positions(cache))
    return naive.by_position(keep[:, sequence] * 1.0, position[:, sequence], count) == 1


def grouped(x):
    """[L, N, T] -> mean over the query heads of a key/value head, [L, K, T]."""
    return x.reshape(L, K, G, -1).mean(2)


def check(policy, kind, score_of, protected_of=None, budget=(30, 9)):
    """Kept tokens equal the best of `score_of(dense, prompt)` [L, K, T], after `protected_of(count, budget)` [T]."""
    cache, dense, alive, lengths = naive.decoded(kind)
    for b, prompt in enumerate(lengths):
        count = alive[b].shape[-1]
        scores = score_of(dense[b], prompt)
        protected = None
        if protected_of is not None:
            protected = np.broadcast_to(protected_of(count, budget[b]), alive[b].shape)
        want = naive.top(scores, alive[b], budget[b], protected)
        np.testing.assert_array_equal(kept_tokens(policy, cache, budget, b, count), want)


def recent(share):
    return lambda count, budget: np.arange(count) >= count - int(share * budget)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.5, 0.0, 0.3])
def test_h2o(kind, share):
    # Attention received, summed over all queries so far; the recent share of the budget stays.
    policy = make("h2o", recent_share=share)
    check(policy, kind, lambda dense, _: grouped(dense.probs.sum(2)), recent(share))


@pytest.mark.parametrize("kind", ["prefill", "sequence"])
def test_h2o_averaged(kind):
    def over(axes):
        return lambda dense, _: np.broadcast_to(
            dense.probs.sum(2).mean(axes, keepdims=True), (L, K, dense.probs.shape[-1])
        )

    check(make("h2o", granularity="sequence"), kind, over((0, 1)), recent(0.5))
    check(make("h2o", granularity="layer"), kind, over((1,)), recent(0.5))


def test_h2o_settings():
    for bad in (-0.1, 1.5):
        with pytest.raises(ConfigError, match="recent_share"):
            make("h2o", recent_share=bad)


@pytest.mark.parametrize("kind", ["prefill", "plain", "sequence", "unrolled"])
def test_tova(kind):
    # Attention of the last query, averaged over the heads of a layer; the last token stays.
    def score(dense, _):
        last = dense.probs[:, :, -1].mean(1, keepdims=True)
        return np.broadcast_to(last, (L, K, last.shape[-1]))

    check(make("tova"), kind, score, lambda count, _: np.arange(count) == count - 1)


@pytest.mark.parametrize("kind", ["prefill", "plain", "sequence", "unrolled"])
def test_streaming_llm(kind):
    def score(dense, _):
        return np.broadcast_to(np.arange(dense.probs.shape[-1]) * 1.0, (L, K, dense.probs.shape[-1]))

    check(make("streaming_llm"), kind, score, lambda count, _: np.arange(count) < 4)
    check(make("streaming_llm", sinks=0), kind, score)


def test_streaming_llm_by_hand():
    cache, *_ = naive.decoded("prefill")
    kept = kept_tokens(make("streaming_llm", sinks=2), cache, (6, 5), 0, 70)
    assert np.flatnonzero(kept[0, 0]).tolist() == [0, 1, 66, 67, 68, 69]
    kept = kept_tokens(make("streaming_llm", sinks=2), cache, (6, 5), 1, 41)
    assert np.flatnonzero(kept[1, 1]).tolist() == [0, 1, 38, 39, 40]


@pytest.mark.parametrize("kind", KINDS)
def test_keydiff(kind):
    cache, dense, alive, lengths = naive.decoded(kind)
    for b, prompt in enumerate(lengths):
        want = naive.top(naive.signal("key_distinct", dense[b], alive[b], prompt, "head"), alive[b], (30, 9)[b])
        got = kept_tokens(make("keydiff"), cache, (30, 9), b, alive[b].shape[-1])
        np.testing.assert_array_equal(got, want)


def snapkv_score(window, kernel, pooling):
    def score(dense, prompt):
        count = dense.probs.shape[-1]
        total = naive.window_sum(dense.probs, prompt, window) / window
        out = np.zeros((L, K, count))
        for l in range(L):
            for k in range(K):
                tokens = [t for t in range(count) if dense.alive[l, k, t]]  # neighbours among those that are left
                for n in range(k * G, (k + 1) * G):
                    row = [0.0 if t >= count - window else total[l, n, t] for t in tokens]
                    for i, t in enumerate(tokens):
                        near = row[max(0, i - kernel // 2) : i + kernel // 2 + 1]
                        value = max(near) if pooling == "max" else sum(near) / kernel
                        out[l, k, t] += value / G
        return out

    return score


@dataclasses.dataclass(frozen=True)
class Known:
    probs: np.ndarray
    alive: np.ndarray


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window, kernel, pooling", [(32, 7, "max"), (4, 3, "avg")])
def test_snapkv(kind, window, kernel, pooling):
    cache, dense, alive, lengths = naive.decoded(kind, StatsRequest(windows=(4, 32)))
    policy = make("snapkv", window=window, kernel=kernel, pooling=pooling)
    budget = (40, 36)
    for b, prompt in enumerate(lengths):
        count = alive[b].shape[-1]
        scores = snapkv_score(window, kernel, pooling)(Known(dense[b].probs, alive[b]), prompt)
        protected = np.broadcast_to(np.arange(count) >= count - window, alive[b].shape)
        # Max pooling gives neighbours the same score: compare scores, and the number of protected tokens kept.
        got = np.asarray(policy.scores((), cache, KEY))
        got = naive.by_position(got[:, b], np.asarray(kv.positions(cache))[:, b], count)
        np.testing.assert_allclose(got[alive[b]], scores[alive[b]], rtol=2e-3, atol=1e-6)
        kept = kept_tokens(policy, cache, budget, b, count)
        assert (kept.sum(-1) == np.minimum(budget[b], alive[b].sum(-1))).all()
        assert kept[alive[b] & protected].all()


def test_snapkv_pools_before_the_mean_over_heads():
    # One key/value head with two query heads whose maxima lie apart: pooling the mean would give another result.
    window = jnp.asarray([[[[4.0, 0, 0, 0, 2, 0, 0, 9]], [[0.0, 0, 0, 0, 0, 6, 0, 9]]]]).reshape(1, 1, 2, 8)
    position = jnp.arange(8, dtype=jnp.int32)[None, None, None]
    layer = kv.LayerCache(jnp.zeros((1, 1, 1, 8, 2)), jnp.zeros((1, 1, 1, 8, 2)), position, jnp.ones((1, 1, 1, 8)),
                          Stats(windows={1: window}))  # fmt: skip
    cache = kv.Cache(layer, None, jnp.asarray([8], jnp.int32))
    got = make("snapkv", window=1, kernel=3).scores((), cache, KEY)
    np.testing.assert_allclose(got[0, 0, 0], [2, 2, 0, 1, 4, 4, 3, 0])
    got = make("snapkv", window=1, kernel=3, pooling="avg").scores((), cache, KEY)
    np.testing.assert_allclose(got[0, 0, 0], np.asarray([2, 2, 0, 1, 4, 4, 3, 0]) / 3, rtol=1e-6)
    # The same tokens in another order of slots, and an empty one between.
    shuffle = np.asarray([5, 1, 7, 0, 3, 2, 6, 4])
    layer = dataclasses.replace(
        layer, position=jnp.where(position[..., shuffle] == 3, -1, position[..., shuffle]),
        stats=Stats(windows={1: window[..., shuffle]}),
    )  # fmt: skip
    got = make("snapkv", window=1, kernel=3).scores((), dataclasses.replace(cache, layers=layer), KEY)
    by_token = naive.by_position(got[0, 0, 0], layer.position[0, 0, 0], 8)
    np.testing.assert_allclose(by_token[[0, 1, 2, 4, 5, 6, 7]], [2, 2, 1, 4, 4, 3, 0])  # 2 and 4 are neighbours now


def test_snapkv_window_rule():
    # Method note 1.2.13: the default window is min(32, B // 4), an explicit one must leave room.
    policy = make("snapkv")
    assert [policy.fit(b).width for b in (1, 4, 8, 64, 127, 128, 129, 4000)] == [1, 1, 2, 16, 31, 32, 32, 32]
    explicit = make("snapkv", window=64)
    assert explicit.fit(65) == explicit and explicit.needs.windows == (64,)
    for budget in (64, 10):
        with pytest.raises(BudgetError, match=f"64.*{budget}"):
            explicit.fit(budget)
    assert policy.fit(64).needs.windows == (16,)


@pytest.mark.parametrize("bad", [{"pooling": "mean"}, {"kernel": 4}, {"kernel": 0}, {"kernel": -1}, {"window": 0}])
def test_snapkv_settings(bad):
    with pytest.raises(ConfigError, match=f"snapkv: {next(iter(bad))}"):
        make("snapkv", **bad)


def test_random_is_a_function_of_the_key():
    cache, _, alive, _ = naive.decoded("prefill")
    policy = make("random")
    scores = [np.asarray(policy.scores((), cache, jax.random.key(k))) for k in (1, 1, 2)]
    np.testing.assert_array_equal(scores[0], scores[1])
    assert (scores[0] != scores[2]).mean() > 0.99
    assert (scores[0][0, :41] != scores[0][1, :41]).mean() > 0.99  # sequences draw for themselves
    assert scores[0].min() >= 0 and scores[0].max() < 1 and abs(scores[0].mean() - 0.5) < 0.1
    keep = np.asarray(keep_jit(policy, (), cache, jnp.asarray([10, 10], jnp.int32), KEY))
    assert (keep == keep[:1, :, :1]).all() and not keep[:, 1, :, 41:].any()
    del alive


def test_full_keeps_everything_whatever_the_budget():
    cache, *_ = naive.decoded("sequence")
    keep = keep_jit(make("full"), (), cache, jnp.asarray([1, 2], jnp.int32), KEY)
    np.testing.assert_array_equal(keep, kv.positions(cache) >= 0)
    assert make("full").fit(1) == make("full")
