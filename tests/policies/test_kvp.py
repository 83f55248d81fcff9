"""KVP's agents against plain numpy, in all layouts; what stays in any case; refusals."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import cache as kv
from dcache import checkpoint
from dcache.attention import StatsRequest
from dcache.errors import BudgetError, ConfigError
from dcache.policies import make
from tests import naive
from tests.naive import TINY
from tests.policies.helpers import KEY, K, L

H = TINY.head_dim
POLICY = make("kvp", heads=(L, K), width=H, hidden=5, recent=3)
scores_jit = jax.jit(POLICY.scores)


def some_weights():
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(POLICY.init, KEY)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), shapes)


def by_hand(weights, l, k, keys, values, positions):
    """Scores of one agent, token by token: keys, values [S, H], positions [S]."""
    w = {name: np.asarray(value[l, k], np.float64) for name, value in weights.items()}
    out = []
    for key, value, position in zip(keys, values, positions, strict=True):
        sizes = [math.sqrt((x**2).mean() + 1e-6) for x in (key, value)]
        x = np.concatenate([key / sizes[0], value / sizes[1], np.log(sizes), [position / 1024]])
        hidden = x @ w["inner"] + w["inner_bias"]
        hidden = 0.5 * hidden * (1 + np.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        out.append(hidden @ w["outer"])
    return np.asarray(out)


@pytest.mark.parametrize("kind", ["prefill", "head", "unrolled"])
def test_scores(kind):
    cache, dense, alive, _ = naive.decoded(kind)
    weights = some_weights()
    got = np.asarray(scores_jit(weights, cache, KEY))
    for b in range(2):
        count = alive[b].shape[-1]
        have = naive.by_position(got[:, b], np.asarray(kv.positions(cache))[:, b], count)
        for l in range(L):
            for k in range(K):
                want = by_hand(weights, l, k, dense[b].keys[l, k], dense[b].values[l, k], range(count))
                there = alive[b][l, k]
                np.testing.assert_allclose(have[l, k][there], want[there], rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("students, unrolled", [(1, False), (3, True)])
def test_scores_of_a_shared_prompt(students, unrolled):
    # As many slots of its own as in the prompt, and one sequence or more: nothing may depend on telling sizes apart.
    _, cache = naive.read([naive.some_tokens(12)], StatsRequest())
    weights = some_weights()
    alone = np.asarray(scores_jit(weights, cache, KEY))
    shared = naive.share(cache, students, 12)
    keep = np.random.default_rng(0).random((L, students, K, 24)) < 0.6
    shared = naive.evict(shared, jnp.asarray(keep))
    fed = jnp.asarray(naive.some_tokens(students * 2, seed=5).reshape(students, 2))
    _, shared = naive.extend(naive.weights(), TINY, fed, shared, jnp.int32(0))
    whole = kv.stacked(shared)
    own = dataclasses.replace(
        whole,
        k=jnp.concatenate([jnp.broadcast_to(shared.prompt.k, (L, students, K, 12, H)), whole.k], axis=3),
        v=jnp.concatenate([jnp.broadcast_to(shared.prompt.v, (L, students, K, 12, H)), whole.v], axis=3),
    )
    want = np.asarray(scores_jit(weights, dataclasses.replace(shared, layers=own, prompt=None), KEY))
    got = np.asarray(scores_jit(weights, kv.unstack(shared) if unrolled else shared, KEY))
    filled = np.asarray(kv.positions(shared)) >= 0
    assert filled[..., 12:14].all() and not filled[..., :12].all()
    np.testing.assert_allclose(got[filled], want[filled], rtol=1e-5, atol=1e-5)
    first = np.broadcast_to(alone, (L, students, K, 12))[filled[..., :12]]
    np.testing.assert_allclose(got[..., :12][filled[..., :12]], first, rtol=1e-5, atol=1e-5)


def test_what_stays():
    cache, _, alive, lengths = naive.decoded("prefill")
    protected = np.asarray(POLICY.protects(cache, jnp.asarray([20, 20], jnp.int32)))
    for b, count in enumerate(lengths):
        got = naive.by_position(protected[:, b] * 1.0, np.asarray(kv.positions(cache))[:, b], count) == 1
        want = (np.arange(count) < 4) | (np.arange(count) >= count - 3)
        np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))
    del alive


@pytest.mark.parametrize("budget, recent", [(4, 0), (5, 1), (8, 2), (32, 8), (64, 16), (400, 16)])
def test_the_last_tokens_take_no_more_than_a_quarter(budget, recent):
    fitted = make("kvp").fit(budget)
    assert fitted.recent == recent and fitted.protected_tokens(budget) == 4 + recent
    assert fitted.fit(budget) == fitted


def test_refusals():
    with pytest.raises(BudgetError, match="kvp always keeps 20 tokens.*19"):
        make("kvp", recent=16).fit(19)
    assert make("kvp", recent=16).fit(20).recent == 16
    for bad in ({"heads": ()}, {"heads": (2, 0)}, {"width": 0}, {"hidden": 0}):
        with pytest.raises(ConfigError, match="heads is .*width .*hidden"):
            make("kvp", **bad)
    for bad in ({"sinks": -1}, {"recent": -1}):
        with pytest.raises(ConfigError, match="sinks is .*recent"):
            make("kvp", **bad)
    assert POLICY.observe((), None, TINY, "cache", None, None) == "cache"
    with pytest.raises(ConfigError, match=r"30 layers of 3 .*dimension 64.*2 of 2 of dimension 8.*\(2, 2\).*to 8"):
        make("kvp").observe((), None, TINY, None, None, None)
    with pytest.raises(ConfigError, match="dimension 16"):
        dataclasses.replace(POLICY, width=16).observe((), None, TINY, None, None, None)


def test_saved_and_loaded(tmp_path):
    weights = some_weights()
    checkpoint.save_policy(tmp_path, POLICY, weights, {})
    trained = checkpoint.load_policy(tmp_path)
    assert trained.policy == POLICY
    jax.tree.map(np.testing.assert_array_equal, trained.params, weights)
