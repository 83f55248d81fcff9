"""The learned policy: size of the network, features, granularities, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import signals
from dcache.errors import ConfigError
from dcache.policies import make
from dcache.policies.distillcache import parameter_count
from tests import naive


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
    with pytest.raises(ConfigError, match="entropy"):
        make("distillcache", granularity="head")
    with pytest.raises(ConfigError, match="layer_reduce"):
        make("distillcache", layer_reduce="sum")
