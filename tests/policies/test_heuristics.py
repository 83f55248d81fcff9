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
from tests import naive
from tests.naive import TINY
from tests.policies.helpers import KEY, KINDS, G, K, L, grouped, keep_jit, kept_tokens


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
    keys, norms = jnp.zeros((1, 1, 1, 8, 2)), jnp.ones((1, 1, 1, 8))
    layer = kv.LayerCache(keys, keys, position, norms, norms, Stats(windows={1: window}))
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


@pytest.mark.parametrize("kind", KINDS)
def test_knorm(kind):
    # The scores: a token that occurs twice has keys of the same norm in the first layer.
    cache, dense, alive, _ = naive.decoded(kind)
    got = np.asarray(make("knorm").scores((), cache, KEY))
    for b in range(2):
        have = naive.by_position(got[:, b], np.asarray(kv.positions(cache))[:, b], alive[b].shape[-1])
        want = -np.sqrt((dense[b].keys ** 2).sum(-1))
        np.testing.assert_allclose(have[alive[b]], want[alive[b]], rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granularity", ["head", "layer", "sequence"])
def test_observed_attention(kind, granularity):
    if kind == "head" and granularity != "head":
        pytest.skip("tokens differ between heads")
    # Attention received divided by the number of queries that could see the token.
    axes = {"head": (), "layer": (1,), "sequence": (0, 1)}[granularity]

    def score(dense, _):
        count = dense.probs.shape[-1]
        rate = grouped(dense.probs.sum(2) / (count - np.arange(count)))
        return np.broadcast_to(rate.mean(axes, keepdims=True), (L, K, count))

    check(make("observed_attention", granularity=granularity), kind, score)


def lagkv_score(keys, values, sinks, lag):
    """[T, H] keys and values in order -> [T], written token by token."""
    count = len(keys)
    out = np.ones(count)
    blocks = (count - sinks) // lag
    if count < sinks + 2 * lag:
        for t in range(sinks, count):
            out[t] = (t - sinks) / (count - sinks)
        return out
    for b in range(blocks - 1):
        here = range(sinks + b * lag, sinks + (b + 1) * lag)
        after = slice(sinks + (b + 1) * lag, sinks + (b + 2) * lag)
        total = np.zeros(lag)
        for x in (keys, values):
            low, high = x[after].min(0), x[after].max(0)
            spread = np.asarray([np.std((x[t] - low) / (high - low), ddof=1) for t in here])
            total += np.exp(spread) / np.exp(spread).sum() / 2
        for i, t in enumerate(here):
            out[t] = (total < total[i]).sum() / lag
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sinks, lag", [(4, 8), (0, 5), (2, 60)])
def test_lagkv(kind, sinks, lag):
    cache, dense, alive, _ = naive.decoded(kind)
    got = np.asarray(make("lagkv", sinks=sinks, lag=lag).scores((), cache, KEY))
    for b in range(2):
        have = naive.by_position(got[:, b], np.asarray(kv.positions(cache))[:, b], alive[b].shape[-1])
        for l in range(L):
            for k in range(K):
                held = alive[b][l, k]  # neighbours are those that are left
                want = lagkv_score(dense[b].keys[l, k][held], dense[b].values[l, k][held], sinks, lag)
                np.testing.assert_allclose(have[l, k][held], want, atol=1e-6)


@pytest.mark.parametrize("bad", [{"sinks": -1}, {"lag": 1}])
def test_lagkv_settings(bad):
    with pytest.raises(ConfigError, match="lagkv: sinks is.*lag"):
        make("lagkv", **bad)


def scores_close(policy, kind, score_of, rtol=2e-3):
    """The policy's scores of the tokens that are left equal `score_of(dense, alive)` [L, K, T], NaN where free."""
    cache, dense, alive, _ = naive.decoded(kind)
    got = np.asarray(jax.jit(lambda c: policy.scores((), c, KEY))(cache))
    for b in range(2):
        count = alive[b].shape[-1]
        have = naive.by_position(got[:, b], np.asarray(kv.positions(cache))[:, b], count)
        want = np.where(alive[b], score_of(dense[b], alive[b]), np.nan)
        checked = ~np.isnan(want)
        np.testing.assert_allclose(have[checked], want[checked], rtol=rtol, atol=1e-6)


def expected_attention(dense, alive, future, sinks, covariance, value_norm, epsilon):
    layers, heads, count, width = dense.queries.shape
    out = np.full(alive.shape, np.nan)
    for l in range(layers):
        of_heads = np.zeros((heads, count))
        for n in range(heads):
            # Rotating is linear: the average rotation of a vector, and of every row and column of a matrix.
            def turned(x):  # [rows, H] -> every row under the average rotation
                rows = np.broadcast_to(x[None], (future, *x.shape))
                return naive.rotate(rows, TINY, start=count).mean(0)

            q = dense.queries[l, n, 4:]
            mean = turned(q.mean(0)[None])[0]
            spread = turned(turned(np.cov(q.T, bias=True)).T)
            keys = dense.keys[l, n // G]
            logit = keys @ mean / np.sqrt(width)
            if covariance:
                logit += np.einsum("th,hi,ti->t", keys, spread, keys) / (2 * width)
            counted = alive[l, n // G] & (np.arange(count) >= sinks)
            of_heads[n] = np.where(counted, np.exp(logit), 0) / np.exp(logit[counted]).sum()
        attention = of_heads.reshape(K, G, count).mean(1)
        if value_norm:
            attention = (attention + epsilon) * np.sqrt((dense.values[l] ** 2).sum(-1))
        out[l] = np.where(np.arange(count) >= sinks, attention, np.nan)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [dict(epsilon=0.5), dict(future=3, sinks=6, covariance=False, value_norm=False)])
def test_expected_attention(kind, settings):
    policy = make("expected_attention", **settings)
    known = {name: getattr(policy, name) for name in ("future", "sinks", "covariance", "value_norm", "epsilon")}
    scores_close(policy, kind, lambda dense, alive: expected_attention(dense, alive, **known))
    cache, _, alive, _ = naive.decoded(kind)
    for b in range(2):
        kept = kept_tokens(policy, cache, (30, 9), b, alive[b].shape[-1])
        assert kept[..., : policy.sinks].sum() == alive[b][..., : policy.sinks].sum()  # the sinks stay


def test_expected_attention_of_a_cache_of_sinks():
    _, cache = naive.read([naive.some_tokens(3)], naive.MORE)
    assert np.isfinite(make("expected_attention").scores((), cache, KEY)).all()


@pytest.mark.parametrize("bad", [{"future": 0}, {"sinks": -1}, {"epsilon": -1.0}])
def test_expected_attention_settings(bad):
    with pytest.raises(ConfigError, match="expected_attention: future is"):
        make("expected_attention", **bad)


def rkv_score(dense, alive, prompt, window, kernel, share, threshold):
    count = alive.shape[-1]
    total = naive.window_sum(dense.probs, prompt, window)
    out = np.full(alive.shape, np.nan)
    for l in range(L):
        for k in range(K):
            tokens = np.flatnonzero(alive[l, k])
            before = tokens < count - window
            rows = np.where(before, total[l, k * G : (k + 1) * G][:, tokens], 0)
            best = (rows / rows.sum(-1, keepdims=True)).max(0)
            near = [best[max(0, i - kernel // 2) : i + kernel // 2 + 1].max() for i in range(len(tokens))]
            unit = dense.keys[l, k, tokens] / np.sqrt((dense.keys[l, k, tokens] ** 2).sum(-1, keepdims=True))
            cosine = unit @ unit.T
            for i in range(len(tokens)):
                cosine[i, i] = 0
                same = np.flatnonzero(cosine[i] > threshold)
                if len(same):
                    cosine[i, same[-1]] = 0  # the latest repetition of token i is not redundant on its account
            repeats = np.exp(cosine.mean(0)) / np.exp(cosine.mean(0)).sum()
            out[l, k, tokens] = share * np.asarray(near) - (1 - share) * repeats
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, dict(window=32, kernel=3, share=0.7, threshold=0.2)])
def test_rkv(kind, settings):
    policy = make("rkv", **settings)
    cache, dense, alive, lengths = naive.decoded(kind, naive.MORE | StatsRequest(windows=(8,)))
    got = np.asarray(jax.jit(lambda c: policy.scores((), c, KEY))(cache))
    for b, prompt in enumerate(lengths):
        count = alive[b].shape[-1]
        have = naive.by_position(got[:, b], np.asarray(kv.positions(cache))[:, b], count)
        want = rkv_score(
            dense[b], alive[b], prompt, policy.width, policy.kernel, policy.share, policy.threshold
        )  # fmt: skip
        np.testing.assert_allclose(have[alive[b]], want[alive[b]], rtol=2e-3, atol=1e-6)
        kept = kept_tokens(policy, cache, (40, 36), b, count)
        newest = alive[b] & (np.arange(count) >= count - policy.width)
        assert kept[newest].all() and (kept.sum(-1) == np.minimum((40, 36)[b], alive[b].sum(-1))).all()


def test_rkv_keeps_the_latest_of_repeated_keys():
    k = jnp.asarray(np.eye(8)[[0, 1, 0, 2, 0, 3, 4, 5]], jnp.float32)  # token 0 comes again at 2 and 4
    redundancy = np.asarray(make("rkv")._redundancy(k, k, jnp.int32(8)))
    assert redundancy[0] > redundancy[4] and redundancy[2] > redundancy[4] and redundancy[4] >= redundancy[1]
    np.testing.assert_allclose(redundancy.sum(), 1, rtol=1e-5)


@pytest.mark.parametrize("bad", [{"window": 0}, {"kernel": 2}, {"share": 1.5}, {"threshold": 2.0}])
def test_rkv_settings(bad):
    with pytest.raises(ConfigError, match="rkv: "):
        make("rkv", **bad)
    with pytest.raises(BudgetError, match="window of 8.*8"):
        make("rkv", window=8).fit(8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, dict(kernel=3, gamma=5.0, tau1=1.6, tau2=0.4)])
def test_cake(kind, settings):
    policy = make("cake", window=32, **settings)
    cache, dense, alive, lengths = naive.decoded(kind)
    got = np.asarray(jax.jit(lambda c: policy.scores((), c, KEY))(cache))
    preferred = np.asarray(jax.jit(policy.preferences)(cache))
    for b, prompt in enumerate(lengths):
        count = alive[b].shape[-1]
        probs = dense[b].probs
        of_probs = np.where(probs > 0, -probs * np.log(np.where(probs > 0, probs, 1)), 0)
        outside = np.repeat(alive[b] & (np.arange(count) < count - 32), G, axis=1)
        mean, squares, surprisal = (
            np.where(outside, naive.window_sum(x, prompt, 32) / 32, 0) for x in (probs, probs**2, of_probs)
        )
        variance = (squares - mean**2) * 32 / 31
        want = (32 * surprisal.sum((1, 2))) ** (1 / policy.tau1) * variance.sum((1, 2)) ** (1 / policy.tau2)
        np.testing.assert_allclose(preferred[:, b], want, rtol=5e-3)
        have = naive.by_position(got[:, b], np.asarray(kv.positions(cache))[:, b], count)
        raw = mean + policy.gamma * variance
        for l in range(L):
            for k in range(K):
                tokens = np.flatnonzero(alive[b][l, k])
                rows, side = raw[l, k * G : (k + 1) * G][:, tokens], policy.kernel // 2
                near = [rows[:, max(0, i - side) : i + side + 1].sum() / policy.kernel / G for i in range(len(tokens))]
                np.testing.assert_allclose(have[l, k, tokens], near, rtol=5e-3, atol=1e-6)
        kept = kept_tokens(policy, cache, (40, 36), b, count).sum(-1)
        budget, held = (40, 36)[b], alive[b].sum(-1).max(-1)
        assert kept.max() <= policy.most_kept(budget, count, TINY)
        if kind != "head":
            assert kept.sum() == K * min(L * budget, held.sum()) and (kept == kept[:, :1]).all()


def test_cake_shares_in_proportion():
    from dcache.policies.cake import proportional

    def shares(weights, limit, total):
        got = proportional(
            jnp.asarray(weights, jnp.float32)[:, None],
            jnp.asarray(limit, jnp.int32)[:, None],
            jnp.asarray([total], jnp.int32),
        )
        return np.asarray(got)[:, 0].tolist()

    assert shares([1, 2, 3], [100, 100, 100], 60) == [10, 20, 30]
    assert shares([1, 2, 3], [100, 100, 15], 60) == [15, 30, 15]  # what the third cannot take goes to the others
    assert shares([1, 1, 1], [9, 9, 9], 11) == [4, 4, 3]
    assert shares([1, 2, 3], [4, 5, 6], 100) == [4, 5, 6]
    assert shares([1, 2, 3], [4, 5, 6], 0) == [0, 0, 0]
    assert shares([0, 0, 0], [9, 9, 9], 6) == [2, 2, 2]
    rng = np.random.default_rng(0)
    for _ in range(50):
        limit = rng.integers(0, 500, 30)
        total = int(rng.integers(0, limit.sum() + 1))
        weights = np.exp(rng.normal(0, 4, 30))
        got = np.asarray(shares(weights, limit, total))
        assert got.sum() == total and (got <= limit).all() and (got >= 0).all()


@pytest.mark.parametrize("bad", [{"window": 1}, {"kernel": 2}, {"gamma": -1.0}, {"tau1": 0.0}, {"tau2": -1.0}])
def test_cake_settings(bad):
    with pytest.raises(ConfigError, match="cake: "):
        make("cake", **bad)
    with pytest.raises(BudgetError, match="window of 32.*32"):
        make("cake", window=32).fit(32)


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
