"""Signals against the dense reference: after the prefill, while decoding, with and without eviction; standardised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import cache as kv
from dcache import signals
from dcache.attention import StatsRequest
from dcache.errors import ConfigError
from tests import naive
from tests.naive import TINY

L, K = TINY.num_layers, TINY.num_kv_heads
NAMES = tuple(signals.SIGNALS)
compute = jax.jit(signals.compute, static_argnums=(0, 2, 3))
standardise = jax.jit(signals.standardise, static_argnums=0, static_argnames="logs")
# Kinds of `naive.decoded` in which all heads hold the same tokens.
ONE_LAYOUT = ["prefill", "plain", "sequence", "unrolled"]


def check(names, kind, granularity, layer_reduce="mean"):
    cache, dense, alive, lengths = naive.decoded(kind)
    got = np.asarray(compute(names, cache, granularity, layer_reduce))
    mask = np.asarray(signals.filled(cache, granularity))
    assert got.shape == (*mask.shape, len(names)) and got.dtype == np.float32
    position = np.asarray(kv.positions(cache))
    position = {"head": position, "layer": position[:, :, 0], "sequence": position[0, :, 0]}[granularity]
    for b, prompt in enumerate(lengths):
        pick = (slice(None),) * (position.ndim - 2 - (granularity == "head")) + (b,)
        count = dense[b].logits.shape[0]
        held = alive[b] if granularity == "head" else alive[b][:, 0] if granularity == "layer" else alive[b][0, 0]
        np.testing.assert_array_equal(~np.isnan(naive.by_position(mask[pick] * 1.0, position[pick], count)), held)
        for f, name in enumerate(names):
            want = naive.signal(name, dense[b], alive[b], prompt, granularity, layer_reduce)
            have = naive.by_position(got[(*pick, ..., f)], position[pick], count)
            np.testing.assert_allclose(have[held], want[held], rtol=2e-3, atol=1e-5, err_msg=f"{name}, {kind}, {b}")


@pytest.mark.parametrize("kind", ONE_LAYOUT)
@pytest.mark.parametrize("granularity", ["sequence", "layer", "head"])
def test_signals(kind, granularity):
    check(NAMES, kind, granularity)


def test_head_signals_when_every_head_keeps_other_tokens():
    check(tuple(n for n in NAMES if n not in signals.SEQUENCE_ONLY), "head", "head")


def test_reduction_over_layers():
    check(("vnorm", "sigma"), "prefill", "sequence", "max")
    cache = naive.decoded("prefill")[0]
    mean, most = (np.asarray(compute(("vnorm", "sigma"), cache, "sequence", how)) for how in ("mean", "max"))
    assert (most[:, :41] >= mean[:, :41]).all() and (most[:, :41] > mean[:, :41]).any()


@pytest.mark.parametrize("students", [3, 1])  # of one student the batch axis looks like that of the shared prompt
def test_shared_prompt_signals(students):
    text, prompt = naive.some_tokens(20), 14
    _, cache = naive.read([text[:prompt]])
    keep = np.ones((students, 20), bool)
    keep[:, :prompt] = np.random.default_rng(1).random((students, prompt)) < 0.6
    shared = naive.share(cache, students, 20 - prompt)
    shared = naive.evict(shared, jnp.asarray(np.broadcast_to(keep[None, :, None], (L, students, K, 20))))
    _, shared = naive.extend(
        naive.weights(), TINY, jnp.asarray(np.tile(text[prompt:], (students, 1))), shared, jnp.int32(0)
    )
    got = np.asarray(compute(NAMES, shared, "sequence", "mean"))
    for a in range(students):
        alive = np.broadcast_to(keep[a], (L, K, 20))
        allowed = np.ones((L, K, 20, 20), bool)
        allowed[:, :, prompt:] = alive[:, :, None]
        dense = naive.forward(naive.weights(), TINY, text, allowed)
        for f, name in enumerate(NAMES):
            want = naive.signal(name, dense, alive, prompt)
            np.testing.assert_allclose(got[a, keep[a], f], want[keep[a]], rtol=2e-3, atol=1e-5, err_msg=name)


def test_alpha_is_a_mean_over_the_queries_that_could_see_the_token():
    # By hand: with uniform attention (all keys zero) query q gives 1 / (q + 1) to each token.
    params = naive.weights()
    params = params | {"layers": params["layers"] | {"k": params["layers"]["k"] * 0}}
    _, cache = naive.read([naive.some_tokens(4)], StatsRequest(mass=True), params=params)
    want = [(1 + 1 / 2 + 1 / 3 + 1 / 4) / 4, (1 / 2 + 1 / 3 + 1 / 4) / 3, (1 / 3 + 1 / 4) / 2, 1 / 4]
    got = compute(("alpha", "sigma"), cache, "sequence", "mean")
    np.testing.assert_allclose(got[0, :, 0], want, rtol=1e-5)
    np.testing.assert_allclose(got[0, :, 1], 0, atol=1e-10)


def test_entropy_by_hand():
    # Uniform attention again: query q has the entropy log(q + 1).
    params = naive.weights()
    params = params | {"layers": params["layers"] | {"k": params["layers"]["k"] * 0}}
    _, cache = naive.read([naive.some_tokens(3)], StatsRequest(rows=64), params=params)
    a, h = 1 / np.arange(1, 4), np.log(np.arange(1, 4))
    want = [a[i:] @ h[i:] / a[i:].sum() for i in range(3)]
    np.testing.assert_allclose(compute(("entropy",), cache, "sequence", "mean")[0, :, 0], want, rtol=1e-5, atol=1e-7)


def test_key_similarity_by_hand():
    keys = np.asarray([[[3.0, 0.0], [0.0, 2.0], [7.0, 7.0], [-9.0, 1.0]]], np.float32)  # [K, S, H]
    position = jnp.asarray([[[[0, 1, 2, -1]]]], jnp.int32)
    layer = kv.LayerCache(jnp.asarray(keys)[None, None], jnp.asarray(keys)[None, None], position,
                          kv.norms(jnp.asarray(keys))[None, None], jnp.ones((1, 1, 1, 4)), kv.Stats())  # fmt: skip
    got = signals.key_similarity(kv.Cache(layer, None, jnp.asarray([3], jnp.int32)))
    # Unit keys (1, 0), (0, 1), (r, r): their mean points along (1, 1). The empty slot does not count and gets 0.
    np.testing.assert_allclose(got[0, 0, 0], [0.5**0.5, 0.5**0.5, 1.0, 0.0], rtol=1e-6)


def test_pool_by_hand():
    x, position = jnp.asarray([[1.0, 5.0, 2.0, 0.0, 3.0]]), jnp.arange(5, dtype=jnp.int32)[None]
    np.testing.assert_allclose(signals.pool(x, position, 3, "max"), [[5, 5, 5, 3, 3]])
    np.testing.assert_allclose(signals.pool(x, position, 3, "avg"), np.asarray([[6, 8, 7, 5, 3]]) / 3, rtol=1e-6)
    np.testing.assert_allclose(signals.pool(x, position, 1, "max"), x)
    np.testing.assert_allclose(signals.pool(x, position, 9, "avg"), np.full((1, 5), 11 / 9), rtol=1e-6)
    # Slots in another order, and a hole whose content must not matter: neighbours are neighbours in position.
    x, position = jnp.asarray([3.0, 99.0, 1.0, 0.0, 5.0]), jnp.asarray([9, -1, 0, 7, 4], jnp.int32)
    got = np.asarray(signals.pool(x, position, 3, "max"))
    np.testing.assert_allclose(got[[2, 4, 3, 0]], [5, 5, 5, 3])


def test_needs():
    assert signals.needs(("pos", "vnorm", "key_distinct")) == StatsRequest()
    assert signals.needs(("alpha", "last")) == StatsRequest(mass=True, last=True)
    everything = signals.needs(NAMES)
    assert everything == StatsRequest(True, True, (signals.WINDOW,), signals.ENTROPY_QUERIES)
    assert signals.PAPER_SIGNALS == ("alpha", "vnorm", "sigma", "entropy", "pos")


@pytest.mark.parametrize("names", [(), ("alpha", "beta"), ("Alpha",)])
def test_unknown_names(names):
    for call in (lambda: signals.check_names(names), lambda: signals.needs(names)):
        with pytest.raises(ConfigError, match="alpha"):
            call()


def test_standardise_by_hand():
    raw = jnp.asarray([[[1.0, 100.0], [2.0, -1.0], [3.0, 7.0], [4.0, 7.0]]])
    mask = jnp.asarray([[True, True, True, False]])
    got = np.asarray(standardise(("pos", "vnorm"), raw, mask))
    np.testing.assert_allclose(got[0, :, 0], [-(1.5**0.5), 0, 1.5**0.5, 0], atol=1e-6)
    assert got[0, 3, 1] == 0
    np.testing.assert_allclose(got[0, :3].mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(got[0, :3].std(0), 1, rtol=1e-5)


def test_standardise_takes_logarithms_of_masses():
    raw = jnp.asarray([[1e-2, 1e-2], [1e-4, 1e-4]])
    mask = jnp.ones(2, bool)
    logged = np.asarray(
        standardise(("alpha", "vnorm"), jnp.concatenate([raw, jnp.asarray([[1e-6, 1e-6]])]), jnp.ones(3, bool))
    )
    np.testing.assert_allclose(logged[:, 0], [1.5**0.5, 0, -(1.5**0.5)], atol=5e-3)
    assert abs(logged[1, 1]) > 0.5  # not logged
    plain = np.asarray(standardise(("alpha", "vnorm"), raw, mask, logs=False))
    np.testing.assert_allclose(plain, [[1, 1], [-1, -1]], rtol=1e-4)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.3, 1e-9, 123456.7])
@pytest.mark.parametrize("count", [1, 2, 7, 4099])
def test_constant_signal_becomes_zero(value, count):
    raw = jnp.full((count, 2), value, jnp.float32)
    got = np.asarray(standardise(("alpha", "vnorm"), raw, jnp.ones(count, bool)))
    np.testing.assert_array_equal(got, 0)


def test_standardise_no_token_at_all_and_wild_empty_slots():
    raw = jnp.asarray([[1.0], [5.0], [jnp.finfo(jnp.float32).max]])
    np.testing.assert_array_equal(standardise(("vnorm",), raw, jnp.zeros(3, bool)), 0)
    got = np.asarray(standardise(("vnorm",), raw, jnp.asarray([True, True, False])))
    np.testing.assert_allclose(got[:, 0], [-1, 1, 0], rtol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 33])
def test_features_are_finite_for_any_length(length):
    _, cache = naive.read([naive.some_tokens(length)], pad=36)
    for granularity in signals.GRANULARITIES:
        raw = compute(NAMES, cache, granularity, "mean")
        mask = signals.filled(cache, granularity)
        got = np.asarray(standardise(NAMES, raw, mask))
        assert np.isfinite(got).all() and (got[~np.asarray(mask)] == 0).all()
        assert (got == 0).all() == (length == 1)
