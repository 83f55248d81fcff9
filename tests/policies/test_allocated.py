"""Budget allocation around another policy: the four ways, their bounds, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import cache as kv
from dcache.errors import ConfigError
from dcache.policies import make, parse
from tests import naive
from tests.naive import TINY
from tests.policies.helpers import KEY, KINDS, K, L, fixed_tokens, keep_jit, kept_tokens

BUDGETS = (30, 9)
scores_jit = jax.jit(lambda policy, cache: policy.scores((), cache, KEY), static_argnums=0)


@pytest.mark.parametrize(
    ("text", "same", "kinds"),
    [
        ("allocated(h2o, by='adaptive', floor=0.3)", "adakv(h2o, floor=0.3)", KINDS),
        ("allocated(pyramidkv, floor=0)", "adakv(pyramidkv, floor=0)", ["prefill", "head"]),
        ("allocated(adakv(h2o), by='uniform')", "h2o", ["prefill", "head"]),
        # Where all of the window is still there.
        ("allocated(snapkv, by='pyramid')", "pyramidkv", ["prefill", "plain"]),
    ],
)
def test_ways_that_other_policies_have(text, same, kinds):
    """Adaptive is Ada-KV; a pyramid around SnapKV is PyramidKV; uniform undoes any allocation."""
    policy, other = parse(text), parse(same)
    assert policy.most_kept(45, 70, TINY) == other.most_kept(45, 70, TINY)
    for kind in kinds:
        keeps = [
            keep_jit(p, (), naive.decoded(kind)[0], jnp.asarray((45, 36), jnp.int32), KEY) for p in (policy, other)
        ]
        np.testing.assert_array_equal(*keeps)


@pytest.mark.parametrize("kind", ["prefill", "head", "unrolled"])
@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_global(kind, floor):
    inside = make("protected", base=make("h2o", recent_share=0.0), first=2, last=1)
    policy = make("allocated", base=inside, by="global", floor=floor)
    cache, _, alive, _ = naive.decoded(kind)
    scores, position = np.asarray(scores_jit(policy, cache)), np.asarray(kv.positions(cache))
    for b, budget in enumerate(BUDGETS):
        count = alive[b].shape[-1]
        of = naive.by_position(scores[:, b], position[:, b], count)
        marks = np.broadcast_to(fixed_tokens(inside, count, count), of.shape) & alive[b]
        safe = naive.top(of, alive[b], int(floor * budget), marks) | marks
        rest = sorted(zip(*np.nonzero(alive[b] & ~safe), strict=True), key=lambda at: -of[at])
        want = safe.copy()
        for at in rest[: L * K * budget - safe.sum()]:
            want[at] = True
        got = kept_tokens(policy, cache, BUDGETS, b, count)
        np.testing.assert_array_equal(got, want)
        assert got.sum() == min(L * K * budget, alive[b].sum())
        assert (got.sum(-1) >= np.minimum(int(floor * budget), alive[b].sum(-1))).all()
        assert got.sum(-1).max() <= policy.most_kept(budget, count, TINY)


@pytest.mark.parametrize("cap", [1.0, 1.25, 2.0, 100.0])
def test_cap(cap):
    policy = make("allocated", base=make("keydiff"), by="global", floor=0.1, cap=cap)
    free = dataclasses.replace(policy, cap=0.0)
    scores = jax.random.normal(KEY, (7, 2, K, 200)) + jnp.arange(7, dtype=jnp.float32)[:, None, None, None]
    filled = jnp.broadcast_to(jnp.arange(200) < 180, scores.shape)
    budget, config = jnp.asarray([40, 13], jnp.int32), dataclasses.replace(TINY, num_layers=7)
    capped, wanted = (np.asarray(p.allocate((), None, scores, filled, budget, None)) for p in (policy, free))
    for b, size in enumerate((40, 13)):
        most = policy.most_kept(size, 180, config)
        assert most == min(free.most_kept(size, 180, config), int(cap * size))
        assert capped[:, b].sum() == 7 * K * size and capped[:, b].max() <= most
        # The best tokens of all heads, none of which gives more than its cap.
        eligible = np.sort(np.asarray(scores)[:, b, :, :180], -1)[..., ::-1][..., : int(cap * size)]
        safe = int(0.1 * size)
        rest = np.sort(eligible[..., safe:], axis=None)[::-1][7 * K * (size - safe) - 1]
        np.testing.assert_array_equal(capped[:, b], safe + (eligible[..., safe:] >= rest).sum(-1))
    if cap == 1.0:
        assert (capped == np.asarray(budget)[None, :, None]).all()
    if cap == 100.0:
        np.testing.assert_array_equal(capped, wanted)


@pytest.mark.parametrize("way", ["uniform", "pyramid", "adaptive", "global"])
def test_budgets_sum_to_the_budget(way):
    """On many layers, with protection that a pyramid's last layers would not have room for."""
    scores = jax.random.normal(KEY, (7, 2, K, 200)) + jnp.arange(7, dtype=jnp.float32)[:, None, None, None]
    filled = jnp.broadcast_to(jnp.arange(200) < 180, scores.shape)
    policy = make("allocated", base=make("keydiff"), by=way, floor=0.25)
    budget = jnp.asarray([40, 13], jnp.int32)
    config = dataclasses.replace(TINY, num_layers=7)
    allocate = jax.jit(lambda protected: policy.allocate((), None, scores, filled, budget, protected))
    for marked in (0, 9):
        got = np.asarray(allocate(jnp.broadcast_to(jnp.arange(200) < marked, scores.shape)))
        for b, size in enumerate((40, 13)):
            assert got[:, b].sum() == 7 * K * size
            assert got[:, b].max() <= policy.most_kept(size, 180, config)
            least = {"uniform": size, "pyramid": 0}.get(way, int(0.25 * size))
            assert got[:, b].min() >= max(least, marked)
            if way == "pyramid":
                assert (np.diff(got[:, b, 0]) <= 0).all() and got[0, b, 0] > got[-1, b, 0]
            if way == "global":
                assert (got[-1, b] > got[0, b]).all()  # its scores are higher


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"by": "fair"}, "by is 'fair'; use one of uniform, pyramid, adaptive, global"), ({"floor": 1.5}, "floor is 1.5"),
        ({"cap": 0.5, "by": "global"}, "cap is 0.5"), ({"cap": 2.0, "by": "adaptive"}, "cap is 2.0; .* all layers"),
        ({"base": make("tova")}, "allocated: tova decides per layer"),
        ({"base": make("criticalkv")}, r"criticalkv\(allocated\("),
    ],
)  # fmt: skip
def test_allocated_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        make("allocated", **settings)
