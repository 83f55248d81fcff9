"""Policies that share budgets out unequally, or refine another one's: PyramidKV, Ada-KV, CriticalKV."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import cache as kv
from dcache.errors import ConfigError
from dcache.policies import make
from tests import naive
from tests.naive import TINY
from tests.policies.helpers import KEY, KINDS, K, L, grouped, keep_jit, kept_tokens


def layer_budgets(policy, layers, held, budget):
    """int[layers] of one sequence with `held` tokens."""
    shape = (layers, 1, K, held) if policy.granularity == "head" else (layers, 1, held)
    got = policy.allocate((), None, jnp.zeros(shape), jnp.ones(shape, bool), jnp.asarray([budget], jnp.int32), None)
    got = np.asarray(got).reshape(layers, -1)
    assert (got == got[:, :1]).all()
    return got[:, 0]


@pytest.mark.parametrize("granularity", ["head", "layer"])
@pytest.mark.parametrize("layers", [2, 7, 30, 32])
def test_pyramid_budgets_fall_and_sum_to_the_budget(layers, granularity):
    policy = make("pyramidkv", granularity=granularity)
    for held in (64, 100, 512, 513, 4096):
        for budget in (32, 50, 64, held // 4, held // 2, held - 1):
            if not 1 <= budget < held:
                continue
            fitted = policy.fit(budget)
            got = layer_budgets(fitted, layers, held, budget)
            assert got.sum() == layers * budget and (np.diff(got) <= 0).all()
            assert got[0] <= min(held, fitted.most_kept(budget, held, TINY)) and got[-1] >= min(fitted.width, budget)
            if budget - fitted.width >= 40:
                assert got[0] > got[-1]  # at every length, not only where the last layer's share exceeds the window


def test_pyramid_budgets_by_hand():
    # Window 8 of a budget of 48 leaves 40: the last layer gets 40 / 20 = 2 beside it, the first 78, in steps of 38.
    assert layer_budgets(make("pyramidkv", window=8), 3, 500, 48).tolist() == [86, 48, 10]
    # Of 60 tokens the window leaves 52, so the first layer gets all of them and the last 80 - 52.
    assert layer_budgets(make("pyramidkv", window=8), 3, 60, 48).tolist() == [60, 48, 36]
    # kvpress counts the window inside: 128 / 20 < 64, so all budgets are equal; with 4,096 tokens they fall.
    theirs = make("pyramidkv", window=64, kvpress=True)
    assert layer_budgets(theirs, 30, 512, 128).tolist() == [128] * 30
    assert layer_budgets(theirs, 3, 8192, 2048).tolist() == [3994, 2048, 102]


@pytest.mark.parametrize("bad", [{"beta": 0.5}, {"granularity": "sequence"}])
def test_pyramid_settings(bad):
    with pytest.raises(ConfigError, match=f"pyramidkv: {next(iter(bad))}"):
        make("pyramidkv", **bad)


@pytest.mark.parametrize("kind", ["prefill", "head", "unrolled"])
@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("base", ["keydiff", "h2o"])
def test_adakv(kind, floor, base):
    cache, _, alive, _ = naive.decoded(kind)
    inside = make(base)
    policy = make("adakv", base=inside, floor=floor)
    scores = np.asarray(inside.scores((), cache, KEY))
    position = np.asarray(kv.positions(cache))
    for b, budget in enumerate((30, 9)):
        count = alive[b].shape[-1]
        of = naive.by_position(scores[:, b], position[:, b], count)
        newest = np.arange(count) >= count - (budget // 2 if base == "h2o" else 0)
        got = kept_tokens(policy, cache, (30, 9), b, count)
        for l in range(L):
            # Each head's own best first, then the best of what is left, wherever it is.
            safe = naive.top(of[l], alive[b][l], int(floor * budget), np.broadcast_to(newest, of[l].shape))
            safe |= newest & alive[b][l]
            rest = sorted(zip(*np.nonzero(alive[b][l] & ~safe), strict=True), key=lambda at: -of[l][at])
            want = safe.copy()
            for at in rest[: K * budget - safe.sum()]:
                want[at] = True
            np.testing.assert_array_equal(got[l], want)
            assert got[l].sum() == min(K * budget, alive[b][l].sum())
            assert got[l].sum(-1).max() <= policy.most_kept(budget, count, TINY)


def test_adakv_with_all_of_the_floor_is_its_base():
    cache, *_ = naive.decoded("prefill")
    budget = jnp.asarray([30, 9], jnp.int32)
    same = keep_jit(make("adakv", base=make("h2o"), floor=1.0), (), cache, budget, KEY)
    np.testing.assert_array_equal(same, keep_jit(make("h2o"), (), cache, budget, KEY))


@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_adakv_shares_what_its_base_gives_a_layer(floor):
    policy = make("adakv", base=make("pyramidkv", window=8), floor=floor)
    scores = jax.random.normal(KEY, (3, 1, K, 500)) + 2.0 * jnp.arange(K, dtype=jnp.float32)[None, None, :, None]
    budget = jnp.asarray([48], jnp.int32)
    got = np.asarray(policy.allocate((), None, scores, jnp.ones(scores.shape, bool), budget, None))[:, 0]
    assert got.sum(1).tolist() == [K * 86, K * 48, K * 10]  # see test_pyramid_budgets_by_hand
    assert (got[:, -1] > got[:, 0]).all()  # the head of higher scores gets more of it
    assert (got >= floor * np.asarray([[86], [48], [10]]) - 1).all()
    assert got.max() <= policy.most_kept(48, 500, TINY)


def test_adakv_settings():
    with pytest.raises(ConfigError, match="floor is 1.5"):
        make("adakv", floor=1.5)
    with pytest.raises(ConfigError, match="tova decides per layer"):
        make("adakv", base=make("tova"))
    with pytest.raises(ConfigError, match="base is 'h2o'.*make"):
        make("adakv", base="h2o")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["h2o", "adakv"])
def test_criticalkv(kind, share, name):
    base = make("h2o") if name == "h2o" else make("adakv", base=make("observed_attention"))
    policy = make("criticalkv", base=base, first_share=share)
    cache, dense, alive, lengths = naive.decoded(kind)
    for b, budget in enumerate((30, 9)):
        count = alive[b].shape[-1]
        if name == "h2o":
            first = grouped(dense[b].probs.sum(2))
            newest = np.broadcast_to(np.arange(count) >= count - budget // 2, alive[b].shape)
        else:
            first, newest = (
                naive.signal("alpha", dense[b], alive[b], lengths[b], "head"),
                np.zeros(alive[b].shape, bool),
            )
        second = (first + 1e-4) * grouped(dense[b].projected)
        sizes = kept_tokens(base, cache, (30, 9), b, count).sum(-1)  # what the policy inside gives each head
        got = kept_tokens(policy, cache, (30, 9), b, count)
        for l in range(L):
            for k in range(K):
                part = int(share * sizes[l, k])
                stays = naive.top(first[l, k], alive[b][l, k], part, newest[l, k]) | newest[l, k]
                want = naive.top(second[l, k], alive[b][l, k], sizes[l, k], stays)
                np.testing.assert_array_equal(got[l, k], want)


@pytest.mark.parametrize("bad", [{"first_share": 1.1}, {"epsilon": -1.0}])
def test_criticalkv_settings(bad):
    with pytest.raises(ConfigError, match="criticalkv: first_share"):
        make("criticalkv", **bad)
    with pytest.raises(ConfigError, match="tova decides per layer"):
        make("criticalkv", base=make("tova"))
