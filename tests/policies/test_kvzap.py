"""KVzap: hidden states, the prediction against numpy, what stays, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dcache
from dcache import cache as kv
from dcache.attention import LATER, StatsRequest
from dcache.data.prompts import Prompt
from dcache.errors import BudgetError, ConfigError
from dcache.evaluate import fidelity
from dcache.policies import Trained, make
from dcache.policies.base import keep_set
from tests import naive
from tests.naive import TINY

L, K, D = TINY.num_layers, TINY.num_kv_heads, TINY.embed_dim
TEXTS = [naive.some_tokens(40, seed=1), naive.some_tokens(23, seed=2)]


def ours(**settings):
    return make("kvzap", heads=(L, K), width=D, **{"hidden": 6, **settings})


def noisy(policy):
    """Weights of which none is zero."""
    start = policy.init(jax.random.key(0))
    return {name: x + 0.3 * jax.random.normal(jax.random.key(len(name)), x.shape) for name, x in start.items()}


def entering(text):
    """f64[L, T, D]: the normalised input of every layer's attention, by running the dense model up to that layer."""
    params = naive.weights()
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params["layers"])
    embedded = np.asarray(params["embed"], np.float64)[text]
    first = embedded / np.sqrt((embedded**2).mean(-1, keepdims=True) + TINY.norm_eps)
    out = [first * p["attn_norm"][0]]
    for layer in range(1, L):
        below = params | {"layers": jax.tree.map(lambda x, layer=layer: x[:layer], params["layers"])}
        # The dense reference of the layers below, with an output layer that shows the residual stream itself.
        shown = below | {"final_norm": jnp.ones(D), "head": jnp.eye(D), "embed": params["embed"]}
        config = dataclasses.replace(TINY, num_layers=layer, tie_embeddings=False, vocab_size=D)
        normed = naive.forward(shown, config, text).logits
        out.append(normed * p["attn_norm"][layer])
    return np.stack(out)


@pytest.fixture(scope="module")
def cache():
    return naive.read(TEXTS, StatsRequest(hidden=True), pad=44)[1]


def test_hidden_states(cache):
    assert cache.hidden.shape == (2, L, 44, D)
    for b, text in enumerate(TEXTS):
        np.testing.assert_allclose(cache.hidden[b, :, : len(text)], entering(text), rtol=2e-4, atol=2e-4)
    assert naive.read(TEXTS, StatsRequest(), pad=44)[1].hidden is None
    assert kv.restrict(cache, StatsRequest()).hidden is None


@pytest.mark.parametrize("hidden", [6, 0])
def test_prediction(cache, hidden):
    policy = ours(hidden=hidden)
    weights = noisy(policy)
    seen = jax.jit(lambda w, c: policy.observe(w, None, TINY, c, None, None))(weights, cache)
    got = np.asarray(policy.scores(weights, seen, None))
    w = {name: np.asarray(x, np.float64) for name, x in weights.items()}
    for layer in range(L):
        x = np.asarray(cache.hidden[:, layer], np.float64)
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        if hidden:
            x = x @ w["in"][layer] + w["in_bias"][layer]
            x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        want = -6 + 3 * (x @ w["out"][layer] + w["bias"][layer])
        np.testing.assert_allclose(got[layer], want.swapaxes(1, 2), rtol=1e-3, atol=1e-3)
    assert (
        len(np.unique(policy.scores(policy.init(jax.random.key(1)), seen, None))) > 1
    )  # of `seen`, not of new weights
    fresh = policy.observe(policy.init(jax.random.key(1)), None, TINY, cache, None, None)
    np.testing.assert_allclose(policy.scores((), fresh, None), -6.0, rtol=1e-6)


@pytest.mark.parametrize("scope", ["head", "layer", "model"])
def test_what_stays(cache, scope):
    policy = ours(scope=scope).fit(12)
    assert policy.window == 3
    seen = policy.observe(noisy(policy), None, TINY, cache, None, None)
    mark = seen.layers.stats.extra["kvzap"].at[:, 0, :, 7].set(LATER)  # as if token 7 had come after the prompt
    seen = kv.with_extra(seen, "kvzap", mark)
    keep = np.asarray(keep_set(policy, (), seen, jnp.asarray([12, 12], jnp.int32), jax.random.key(0)))
    assert keep[:, 0, :, 37:40].all() and keep[:, 1, :, 20:23].all() and keep[:, 0, :, 7].all()
    counts = keep.sum(-1)
    per = {"head": counts, "layer": counts.sum(2), "model": counts.sum((0, 2))}[scope]
    assert (per == 12 * {"head": 1, "layer": K, "model": K * L}[scope]).all()
    assert (counts <= policy.most_kept(12, 40, TINY)).all()


def test_refusals(cache):
    with pytest.raises(ConfigError, match=rf"30 layers of 3 key/value heads and width 576; the model has {L} of {K}"):
        make("kvzap").observe((), None, TINY, cache, None, None)
    for settings, says in (({"heads": (2,)}, "heads"), ({"window": -1}, "window"), ({"scope": "all"}, "scope")):
        with pytest.raises(ConfigError, match=says):
            make("kvzap", **settings)
    with pytest.raises(BudgetError, match="kvzap always keeps 64 tokens, more than the budget of 40"):
        ours(window=64).fit(40)


def test_generate_and_two_policies_in_one_evaluation():
    lm = dcache.load("tiny")
    policy = make("kvzap", heads=(2, 2), width=32, hidden=4)
    one, other = (Trained(policy, policy.init(jax.random.key(i))) for i in range(2))
    assert dcache.generate(lm, ["the cat sat on the mat " * 6], one, 0.5, max_new_tokens=6, evict_every=2).texts
    prompts = [Prompt(naive.some_tokens(40, config=lm.config), "text", naive.some_tokens(8), (), "a", "text")]
    arms = fidelity.make_arms({"one": one, "other": other}, [0.5], 40)
    settings = fidelity.Settings(length=40, horizon=4, new_tokens=0)
    with pytest.raises(ConfigError, match="'one' and 'other' are both trained kvzap policies"):
        next(fidelity.evaluate(lm, prompts, arms, settings))
    arms = fidelity.make_arms({"one": one}, [0.5, 1.0], 40)
    record = next(fidelity.evaluate(lm, prompts, arms, settings))
    assert record["arms"]["one"]["100%"]["kl"] < 1e-5 < record["arms"]["one"]["50%"]["kl"]
