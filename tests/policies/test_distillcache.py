"""The learned policy: size of the network, features, granularities, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import cache as kv
from dcache import signals
from dcache.errors import ConfigError
from dcache.policies import make, reader
from dcache.policies.distillcache import parameter_count
from tests import naive
from tests.naive import TINY
from tests.policies.helpers import keep_jit


def test_parameter_count():
    # Two hidden layers of 128 with LayerNorm, five signals: about 17 thousand, not the paper's 200 thousand.
    policy = make("distillcache", signals=signals.PAPER_SIGNALS)
    params = policy.init(jax.random.key(0))
    assert parameter_count(params) == (5 * 128 + 128) + 2 * 128 + (128 * 128 + 128) + 2 * 128 + (128 + 1)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    small = make("distillcache", signals=("pos",), hidden=4, layers=1)
    assert parameter_count(small.init(jax.random.key(0))) == (4 + 4) + 2 * 4 + (4 + 1)


def test_starts_with_equal_scores_and_learns_from_all_weights():
    policy = make("distillcache", hidden=8)
    params = policy.init(jax.random.key(0))
    cache = naive.decoded("prefill")[0]
    np.testing.assert_array_equal(policy.scores(params, cache, None), 0)
    params = jax.tree.map(lambda x: x + 0.1, params)
    features = policy.features(cache)
    grads = jax.grad(lambda p: jnp.sum(policy.scores_of(p, features) ** 2))(params)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))


def test_network_by_hand():
    policy = make("distillcache", signals=("pos", "vnorm"), hidden=3, layers=1)
    params = policy.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"])
    x = rng.normal(size=(5, 2)).astype(np.float32)
    h = x @ p["Dense_0"]["kernel"] + p["Dense_0"]["bias"]
    h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-6)
    h = np.maximum(h * p["LayerNorm_0"]["scale"] + p["LayerNorm_0"]["bias"], 0)
    want = (h @ p["Dense_1"]["kernel"] + p["Dense_1"]["bias"])[:, 0]
    np.testing.assert_allclose(policy.scores_of(params, jnp.asarray(x)), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("granularity", signals.GRANULARITIES)
def test_features(granularity):
    names = ("alpha", "pos", "window_max")
    policy = make("distillcache", granularity=granularity, signals=names)
    cache = naive.decoded("sequence")[0]
    mask = np.asarray(signals.filled(cache, granularity))
    got = np.asarray(policy.features(cache))
    assert got.shape == (*mask.shape, 3) and (got[~mask] == 0).all()
    for index in np.ndindex(mask.shape[:-1]):
        rows = got[index][mask[index]]
        np.testing.assert_allclose(rows.mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(rows.std(0), 1, rtol=1e-4)


def test_settings_reach_the_features():
    cache = naive.decoded("prefill")[0]

    def features(**settings):
        return np.asarray(make("distillcache", signals=("sigma", "vnorm"), **settings).features(cache))

    assert np.abs(features() - features(logs=False)).max() > 0.01
    assert np.abs(features() - features(layer_reduce="max")).max() > 0.01


def test_prior():
    # Fixed weights of the signals, on top of the network, which starts at zero.
    policy = make("distillcache", signals=("pos", "vnorm"), prior=(2.0, -0.5), hidden=4)
    params = policy.init(jax.random.key(0))
    x = np.random.default_rng(1).normal(size=(7, 2)).astype(np.float32)
    np.testing.assert_allclose(policy.scores_of(params, jnp.asarray(x)), x @ [2.0, -0.5], rtol=1e-5, atol=1e-6)
    moved = jax.tree.map(lambda p: p + 0.3, params)
    plain = make("distillcache", signals=("pos", "vnorm"), hidden=4).scores_of(moved, jnp.asarray(x))
    want = plain + x @ np.asarray([2.0, -0.5], np.float32)
    np.testing.assert_allclose(policy.scores_of(moved, jnp.asarray(x)), want, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="prior"):
        make("distillcache", signals=("pos", "vnorm"), prior=(1.0,))


def test_refusals():
    with pytest.raises(ConfigError, match="beta"):
        make("distillcache", signals=("beta",))
    with pytest.raises(ConfigError, match="none given"):
        make("distillcache", signals=())
    with pytest.raises(ConfigError, match="scope is 'heads'"):
        make("distillcache", granularity="head", scope="heads")
    with pytest.raises(ConfigError, match="granularity 'sequence'"):
        make("distillcache", scope="model")
    with pytest.raises(ConfigError, match="heads is"):
        make("distillcache", granularity="layer", heads=(2, 2))
    with pytest.raises(ConfigError, match="heads is"):
        make("distillcache", granularity="head", heads=(2,))
    with pytest.raises(ConfigError, match="layer_reduce"):
        make("distillcache", layer_reduce="sum")


HEADS = (TINY.num_layers, TINY.num_kv_heads)


@pytest.mark.parametrize("scope", ["head", "layer", "model"])
def test_features_are_standardised_over_what_competes(scope):
    names = ("alpha", "pos", "last_max", "vnorm")
    policy = make("distillcache", granularity="head", scope=scope, signals=names)
    cache, dense, alive, lengths = naive.decoded("head")
    got = np.asarray(policy.features(cache))
    for b, prompt in enumerate(lengths):
        count = alive[b].shape[-1]
        for f, name in enumerate(names):
            raw = naive.signal(name, dense[b], alive[b], prompt, "head")
            raw = np.log(raw + 1e-8) if signals.SIGNALS[name].is_mass else raw
            raw = np.where(alive[b], np.broadcast_to(raw, alive[b].shape), np.nan)
            axes = {"head": 2, "layer": (1, 2), "model": (0, 1, 2)}[scope]
            want = (raw - np.nanmean(raw, axes, keepdims=True)) / np.nanstd(raw, axes, keepdims=True)
            have = naive.by_position(got[:, b, ..., f], np.asarray(kv.positions(cache))[:, b], count)
            np.testing.assert_allclose(have[alive[b]], want[alive[b]], rtol=5e-3, atol=2e-3, err_msg=name)


@pytest.mark.parametrize("granularity", ["layer", "head"])
def test_signals_over_all_layers_are_taken_after_the_prefill(granularity):
    names = ("pos", "entropy", "alpha_all", "last_max_upper_near")
    policy = make("distillcache", granularity=granularity, signals=names)
    whole = make("distillcache", signals=names)
    text = naive.some_tokens(48, seed=3)
    _, cache = naive.read([text[:40]], policy.needs)
    cache = policy.observe((), None, TINY, cache, None, None)
    want = np.asarray(whole.features(cache))  # [B, S, F]
    got = np.asarray(policy.features(cache))
    np.testing.assert_allclose(got, np.broadcast_to(want[:, None] if granularity == "layer" else want[:, None, None],
                                                    (TINY.num_layers, *got.shape[1:])), rtol=1e-4, atol=1e-5)  # fmt: skip
    # They stay with their tokens when other tokens go and come; what comes later has none, and stays.
    keep = np.random.default_rng(0).random(kv.positions(cache).shape) < 0.5
    if granularity == "layer":
        keep = np.broadcast_to(keep[:, :, :1], keep.shape)
    smaller = naive.compact(cache, jnp.asarray(keep), 40, 8)
    _, smaller = naive.extend(naive.weights(), TINY, jnp.asarray(text[None, 40:]), smaller, jnp.int32(40))
    after = np.asarray(policy.features(smaller))
    position = np.asarray(kv.positions(smaller))
    position = position if granularity == "head" else position[:, :, 0]
    for index in np.ndindex(position.shape):
        if 0 <= position[index] < 40:
            np.testing.assert_allclose(after[index][1:], want[0, position[index], 1:], rtol=1e-4, atol=1e-5)
    stays = np.asarray(policy.protects(smaller, jnp.asarray([9], jnp.int32)))
    np.testing.assert_array_equal(stays, position >= 40)


def test_heads_have_terms_of_their_own():
    names = ("pos", "vnorm", "alpha")
    policy = make("distillcache", granularity="head", scope="model", heads=HEADS, signals=names, hidden=8)
    params = policy.init(jax.random.key(0))
    features = jnp.asarray(np.random.default_rng(0).normal(size=(*HEADS[:1], 3, HEADS[1], 7, 3)), jnp.float32)
    np.testing.assert_array_equal(policy.scores_of(params, features), 0)
    inner = dict(params["params"])
    slope, offset = (
        jax.random.normal(jax.random.key(i), inner[name].shape) for i, name in enumerate(("slope", "offset"))
    )
    moved = {"params": inner | {"slope": slope, "offset": offset}}
    want = np.einsum("lbksf,lkf->lbks", features, slope) + np.asarray(offset)[:, None, :, None]
    np.testing.assert_allclose(policy.scores_of(moved, features), want, rtol=1e-4, atol=1e-5)
    # With the network's last layer, the codes tell heads of equal features apart.
    noisy = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    noisy = {"params": noisy["params"] | {"slope": inner["slope"], "offset": inner["offset"]}}
    same = np.asarray(policy.scores_of(noisy, jnp.ones_like(features)))
    assert len(np.unique(same.round(4))) == HEADS[0] * HEADS[1]


def test_a_policy_with_heads_of_its_own_refuses_another_model():
    policy = make("distillcache", granularity="head", heads=(30, 3), signals=("pos",))
    with pytest.raises(ConfigError, match=f"30 layers of 3 key/value heads; the model has {HEADS[0]} of {HEADS[1]}"):
        policy.observe((), None, TINY, None, None, None)


def test_a_cap_bounds_each_head():
    policy = make("distillcache", granularity="head", scope="model", heads=HEADS, signals=("alpha", "vnorm"), cap=1.2)
    params = jax.tree.map(
        lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), policy.init(jax.random.key(0))
    )
    _, cache = naive.read([naive.some_tokens(40, seed=1), naive.some_tokens(24, seed=2)], policy.needs, pad=40)
    budget = jnp.asarray([12, 8], jnp.int32)
    keep = np.asarray(keep_jit(policy, params, cache, budget, jax.random.key(0)))
    same = make("allocated", base=dataclasses.replace(policy, cap=0.0), by="global", floor=0.0, cap=1.2)
    np.testing.assert_array_equal(keep, keep_jit(same, params, cache, budget, jax.random.key(0)))
    free = np.asarray(keep_jit(dataclasses.replace(policy, cap=0.0), params, cache, budget, jax.random.key(0)))
    for b, size in enumerate((12, 8)):
        assert keep[:, b].sum() == free[:, b].sum() == size * HEADS[0] * HEADS[1]
        assert keep[:, b].sum(-1).max() == policy.most_kept(size, 40, TINY) == int(1.2 * size)
        assert free[:, b].sum(-1).max() > int(1.2 * size)
    for bad in ({"cap": 0.5}, {"scope": "layer"}, {"scope": "head"}):
        with pytest.raises(ConfigError, match="cap is"):
            dataclasses.replace(policy, **bad)


def reading(**settings):
    return make("distillcache", **{"signals": ("pos", "alpha"), "granularity": "head", "scope": "model", "heads": HEADS,
                                   "reads": (TINY.embed_dim, 6), "hidden": 8, **settings})  # fmt: skip


def test_reading_hidden_states():
    policy = reading()
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape),
                          policy.init(jax.random.key(0)))  # fmt: skip
    text = naive.some_tokens(48, seed=3)
    _, cache = naive.read([text[:40]], policy.needs)
    looked = policy.observe(params, None, TINY, cache, None, None)
    want = np.asarray(reader.read(params["reader"], cache.hidden))
    assert policy.looks and want.shape == kv.positions(cache).shape and np.std(want) > 0.01
    features = np.asarray(policy.features(looked))
    np.testing.assert_allclose(features[..., 2], want, rtol=1e-5, atol=1e-6)
    # In training nothing is stored, and the slope reaches the network that reads.
    fresh = policy.observe((), None, TINY, cache, None, None)
    budget = jnp.asarray([10], jnp.int32)
    np.testing.assert_allclose(
        policy.differentiable_scores(params, fresh, budget), policy.scores(params, looked, None), rtol=1e-4, atol=1e-5
    )
    grads = jax.grad(lambda p: jnp.sum(policy.differentiable_scores(p, fresh, budget) ** 2))(params)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads["reader"]))
    # The reading stays with its token; what comes later has none, and stays.
    keep = jnp.asarray(np.random.default_rng(0).random(kv.positions(cache).shape) < 0.5)
    smaller = naive.compact(kv.restrict(looked, policy.needs), keep, 40, 8)
    smaller = dataclasses.replace(smaller, hidden=None)
    _, smaller = naive.extend(naive.weights(), TINY, jnp.asarray(text[None, 40:]), smaller, jnp.int32(40))
    position, after = np.asarray(kv.positions(smaller)), np.asarray(policy.features(smaller))
    for index in np.ndindex(position.shape):
        if 0 <= position[index] < 40:
            assert after[index][2] == pytest.approx(want[(*index[:-1], position[index])], rel=1e-4, abs=1e-5)
    np.testing.assert_array_equal(policy.protects(smaller, budget), position >= 40)


def test_reading_refusals():
    for bad in ({"reads": (32,)}, {"reads": (32, 0)}, {"heads": ()}):
        with pytest.raises(ConfigError, match="reads is"):
            reading(**bad)
    with pytest.raises(ConfigError, match="2 weights for 3 inputs; .* pos, alpha, the reading, or none"):
        reading(prior=(1.0, 1.0))
    with pytest.raises(ConfigError, match=f"width 99; the model's have {TINY.embed_dim}"):
        reading(reads=(99, 6)).check_model(TINY)
    assert not make("distillcache").looks
    with pytest.raises(ConfigError, match="hybrid: base sees the budget or reads"):
        make("hybrid", base=reading())


@pytest.mark.parametrize("granularity", signals.GRANULARITIES)
def test_the_budget_as_an_input(granularity):
    policy = make("distillcache", signals=("pos", "alpha"), granularity=granularity, sees_budget=True, hidden=8)
    params = jax.tree.map(lambda x: x + 0.5 * jax.random.normal(jax.random.key(x.size), x.shape),
                          policy.init(jax.random.key(0)))  # fmt: skip
    _, cache = naive.read([naive.some_tokens(40, seed=1), naive.some_tokens(24, seed=2)], policy.needs, pad=40)
    few, many = jnp.asarray([5, 3], jnp.int32), jnp.asarray([20, 12], jnp.int32)
    np.testing.assert_allclose(np.asarray(policy.features(cache, few))[..., 2], -3.0)
    np.testing.assert_allclose(np.asarray(policy.features(cache, many))[..., 2], -1.0)
    np.testing.assert_allclose(np.asarray(policy.features(cache))[..., 2], -2.0)
    scores = [np.asarray(policy.scores_at(params, cache, b, None)) for b in (few, many)]
    filled = np.asarray(signals.filled(cache, granularity))
    assert np.abs(scores[0] - scores[1])[filled].max() > 1e-3
    # Policies around it pass the budget on.
    wrappers = [make("protected", base=policy, first=2), make("smoothed", base=policy, kernel=1)]
    if granularity == "head":
        wrappers.append(make("allocated", base=policy, by="uniform"))
    for wrapper in wrappers:
        for budget, want in zip((few, many), scores, strict=True):
            got = np.asarray(wrapper.scores_at(params, cache, budget, None))
            np.testing.assert_allclose(got[filled], want[filled], rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="hybrid: base sees the budget or reads"):
        make("hybrid", base=policy)


@pytest.mark.parametrize("scope", ["head", "layer", "model"])
def test_keep_set_by_scope(scope):
    policy = make("distillcache", granularity="head", scope=scope, heads=HEADS, signals=("alpha", "vnorm"), hidden=8)
    params = jax.tree.map(
        lambda x: x + 0.5 * jax.random.normal(jax.random.key(x.size), x.shape), policy.init(jax.random.key(0))
    )
    cache, *_ = naive.decoded("prefill")
    scores = np.asarray(policy.scores(params, cache, None))
    filled = np.asarray(signals.filled(cache, "head"))
    got = np.asarray(policy.decide(params, cache, jnp.asarray([9, 12], jnp.int32), None))
    for b, budget in enumerate((9, 12)):
        for part in {"head": np.ndindex(HEADS), "layer": range(HEADS[0]), "model": [...]}[scope]:
            s, f, g = (x[:, b][part].reshape(1, -1) for x in (scores, filled, got))
            want = naive.top(s, f, budget * {"head": 1, "layer": HEADS[1], "model": HEADS[0] * HEADS[1]}[scope])
            np.testing.assert_array_equal(g, want)
        assert got[:, b].sum(-1).max() <= policy.most_kept(budget, int(cache.length[b]), TINY)
