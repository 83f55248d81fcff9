"""RLKV's and the hybrid's budgets by hand, what they keep, and how the hybrid is made, saved and read back."""

import dataclasses
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dcache
from dcache import cache as kv
from dcache import checkpoint
from dcache.data.prompts import Prompt
from dcache.errors import ConfigError
from dcache.evaluate import fidelity
from dcache.policies import make
from dcache.policies.base import Trained, keep_set, read
from dcache.policies.hybrid import compose
from dcache.policies.rlkv import shuffled
from tests import naive
from tests.naive import TINY

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADS = (TINY.num_layers, TINY.num_kv_heads)
GATES = {"gates": jnp.asarray([[0.1, 0.7], [0.9, 0.3]])}
keep_jit = jax.jit(keep_set, static_argnums=0)


def count(policy, budget, seen):
    return int(policy.full_heads(jnp.asarray([budget], jnp.int32), jnp.asarray([seen], jnp.int32))[0])


def sizes(policy, gates, budget, seen):
    """int[L, K]: tokens of each head after a prefill of `seen` tokens."""
    l, k = policy.heads
    cache = kv.Cache(None, None, jnp.asarray([seen], jnp.int32))
    scores = jnp.zeros((l, 1, k, seen))
    got = policy.allocate(
        {"gates": gates}, cache, scores, jnp.ones(scores.shape, bool), jnp.asarray([budget], jnp.int32), None
    )
    return np.asarray(got)[:, 0]


# 90 heads; a window of 80.
@pytest.mark.parametrize(
    "seen,budget,full,others",
    [
        (512, 256, 36, (85, 86)),  # 90 * (256 - 80) / (512 - 80) = 36.7; the rest, 4608 of 23040 for 54, is 85.3 each
        (512, 128, 10, (80, 80)),  # 10 exactly
        (512, 64, 4, (43, 44)),  # no room for a window of 80: 0.4 * 64 * 90 / 512 = 4.5, the rest is 3712 for 86
        (4096, 1024, 21, (89, 90)),
        (4096, 512, 9, (106, 114)),
        (512, 512, 90, None),
        (60, 30, 18, (22, 23)),  # all of the prompt fits into a window
    ],
)  # fmt: skip
def test_full_heads_and_budgets_by_hand(seen, budget, full, others):
    policy = make("rlkv")
    assert count(policy, budget, seen) == full
    gates = jax.random.uniform(jax.random.key(seen), policy.heads)
    got = sizes(policy, gates, budget, seen)
    top = np.asarray(gates) >= np.sort(np.asarray(gates), axis=None)[-full]
    np.testing.assert_array_equal(got == seen, top)
    if others:
        assert others[0] <= got[~top].min() and got[~top].max() <= others[1] and np.ptp(got[~top]) <= 1
    assert got.sum() == 90 * budget


@pytest.mark.parametrize("name", ["rlkv", "hybrid"])
@pytest.mark.parametrize("heads", [(2, 2), (30, 3), (32, 8), (5, 1)])
def test_the_mean_is_the_budget(name, heads):
    for matched in (True, False) if name == "hybrid" else (None,):
        policy = make(name, heads=heads) if matched is None else make(name, heads=heads, matched=matched)
        gates = jax.random.uniform(jax.random.key(0), heads)
        for seen in (40, 130, 512):
            for budget in (1, seen // 8, seen // 4, seen // 2, seen - 1, seen):
                got = sizes(policy, gates, budget, seen)
                assert got.sum() == heads[0] * heads[1] * budget and got.min() >= 0
                assert got.max() <= policy.most_kept(budget, seen, TINY)
                full = count(policy, budget, seen)
                assert full <= 0.4 * budget / seen * got.size or name == "rlkv" or not matched


def test_hybrid_budgets_by_hand():
    # At 25% of 512: 0.4 * 0.25 * 90 = 9 heads; (90 * 128 - 9 * 512) / 81 = 85.3 tokens for each other one.
    matched, paper = make("hybrid"), make("hybrid", matched=False)
    assert count(matched, 128, 512) == 9 and count(matched, 64, 512) == 4
    gates = jax.random.uniform(jax.random.key(0), (30, 3))
    assert sorted(set(sizes(matched, gates, 128, 512).ravel().tolist())) == [85, 86, 512]
    # The paper: 20% of the heads keep everything, 6.25% of the tokens stay in the others.
    got = sizes(paper, gates, 128, 512)
    assert (got == 512).sum() == 18 and set(got[got < 512].tolist()) == {32} and 32 / 512 == 0.0625
    assert count(paper, 256, 512) == 18 and count(paper, 64, 512) == 9


def test_what_rlkv_keeps():
    cache, _, alive, lengths = naive.decoded("prefill")  # 70 and 41 tokens
    policy = make("rlkv", heads=HEADS, sinks=2, recent=8)
    keep = np.asarray(keep_jit(policy, GATES, cache, jnp.asarray([25, 14], jnp.int32), jax.random.key(0)))
    # 4 * (25 - 10) / (70 - 10) = 1 head and 10 tokens for the others; 4 * 4 / 31 = 0, 0.4 * 14 / 41 * 4 = 0: none.
    want = np.zeros((*HEADS, 70), bool)
    want[..., [0, 1, *range(62, 70)]] = True
    want[1, 0] = True  # the largest gate
    np.testing.assert_array_equal(keep[:, 0, :, :70], want)
    assert keep[:, 0].sum() == 4 * 25
    want = np.zeros((*HEADS, 41), bool)
    want[..., [0, 1, *range(29, 41)]] = True  # beyond the window: more recent ones
    np.testing.assert_array_equal(keep[:, 1, :, :41], want)
    # Below the window sinks and recent tokens shrink in proportion: 1 of 2 and 4 of 8.
    keep = np.asarray(keep_jit(policy, GATES, cache, jnp.asarray([5, 5], jnp.int32), jax.random.key(0)))
    assert np.flatnonzero(keep[0, 0, 0]).tolist() == [0, 66, 67, 68, 69]
    del alive, lengths


@pytest.mark.parametrize(
    "granularity,scope",
    [("sequence", "head"), ("layer", "head"), ("head", "head"), ("head", "layer"), ("head", "model")],
)
def test_what_the_hybrid_keeps(granularity, scope):
    base = make(
        "distillcache", granularity=granularity, scope=scope, signals=("alpha", "vnorm"), prior=(1.0, 0.5), hidden=8
    )
    weights = base.init(jax.random.key(0))
    hybrid = compose(Trained(make("rlkv", heads=HEADS), GATES), Trained(base, weights))
    text = [naive.some_tokens(60, seed=4)]
    padded, length = jnp.asarray(text), jnp.asarray([60], jnp.int32)
    read_jit = jax.jit(read, static_argnums=(0, 3))
    _, cache = read_jit(hybrid.policy, hybrid.params, naive.weights(), TINY, padded, length)
    budget = jnp.asarray([45], jnp.int32)
    keep = np.asarray(keep_jit(hybrid.policy, hybrid.params, cache, budget, jax.random.key(0)))[:, 0]
    assert count(hybrid.policy, 45, 60) == 1 and keep[1, 0].all() and keep.sum() == 4 * 45  # 0.4 * 45 / 60 * 4 = 1.2
    scores = np.asarray(base.scores(weights, cache, None))
    scores = {"sequence": scores[None, :, None], "layer": scores[:, :, None], "head": scores}[granularity]
    scores = np.broadcast_to(scores, (HEADS[0], 1, HEADS[1], 60))[:, 0]
    others = np.ones(HEADS, bool)
    others[1, 0] = False
    for part in {"head": np.ndindex(HEADS), "layer": range(HEADS[0]), "model": [...]}[scope]:
        rest = np.atleast_1d(others[part])
        s, g = (x[part].reshape(-1, 60)[rest.ravel()].reshape(1, -1) for x in (scores, keep))
        if g.size:
            np.testing.assert_array_equal(g, naive.top(s, np.ones(s.shape, bool), 40 * int(rest.sum())))


def test_the_hybrid_after_more_tokens():
    # Each head now holds other tokens; the scores are still those of the prompt, and what came later stays.
    base = make("distillcache", signals=("alpha", "pos"), prior=(1.0, 0.5), hidden=8)
    hybrid = compose(Trained(make("rlkv", heads=HEADS), GATES), Trained(base, base.init(jax.random.key(0))))
    text = naive.some_tokens(66, seed=4)
    _, cache = read(
        hybrid.policy, hybrid.params, naive.weights(), TINY, jnp.asarray(text[None, :60]), jnp.asarray([60], jnp.int32)
    )
    before = np.asarray(hybrid.policy.scores(hybrid.params, cache, None))[:, 0]
    keep = keep_jit(hybrid.policy, hybrid.params, cache, jnp.asarray([45], jnp.int32), jax.random.key(0))
    smaller = naive.compact(cache, keep, 60, 6)
    _, smaller = naive.extend(naive.weights(), TINY, jnp.asarray(text[None, 60:]), smaller, jnp.int32(60))
    position = np.asarray(kv.positions(smaller))[:, 0]
    after = np.asarray(hybrid.policy.scores(hybrid.params, smaller, None))[:, 0]
    for index in np.ndindex(position.shape):
        if 0 <= position[index] < 60:
            assert after[index] == before[(*index[:2], position[index])]
    keep = np.asarray(keep_jit(hybrid.policy, hybrid.params, smaller, jnp.asarray([48], jnp.int32), jax.random.key(0)))
    assert keep[:, 0][position >= 60].all() and keep.sum() == 4 * 48


@pytest.mark.parametrize("name", ["rlkv", "hybrid"])
def test_another_model_is_refused(name):
    policy = make(name)
    with pytest.raises(
        ConfigError, match=f"This {name} has gates for 30 layers of 3 key/value heads; the model has 2 of 2"
    ):
        policy.observe(GATES | {"base": ()}, None, TINY, None, None, None)


def test_settings():
    for bad in ({"heads": (2,)}, {"heads": (0, 3)}, {"sinks": 0}, {"recent": 0}):
        with pytest.raises(ConfigError, match=f"rlkv: .*{next(iter(bad))}"):
            make("rlkv", **bad)
    with pytest.raises(ConfigError, match="hybrid: base"):
        make("hybrid", base=make("h2o"))
    base = make("distillcache", granularity="head", heads=(5, 2))
    with pytest.raises(ConfigError, match="gates are of 2 layers.*distillcache of 5"):
        compose(Trained(make("rlkv", heads=HEADS), GATES), Trained(base, ()))
    with pytest.raises(ConfigError, match="h2o was given as its distillcache"):
        compose(Trained(make("rlkv"), GATES), Trained(make("h2o"), ()))


def test_kept_shares_in_an_evaluation(tiny):
    text = naive.some_tokens(140, seed=8)
    prompt = Prompt(text[:128], "text", text[128:], (), "p", "text")
    base = make("distillcache", signals=("alpha", "pos"), prior=(1.0, 0.0), hidden=8)
    rlkv = Trained(make("rlkv", heads=HEADS, sinks=2, recent=8), GATES)
    # The control: the same method with other gates.
    control = Trained(rlkv.policy, {"gates": jax.random.uniform(jax.random.key(3), HEADS)})
    methods = {
        "rlkv": rlkv,
        "random gates": control,
        "hybrid": compose(rlkv, Trained(base, base.init(jax.random.key(0)))),
    }
    arms = fidelity.make_arms(methods, (0.5, 0.25), 128)
    [record] = fidelity.evaluate(tiny, [prompt], arms, fidelity.Settings(length=128, horizon=12, new_tokens=0, batch=1))
    for method in methods:
        for name, ratio in (("50%", 0.5), ("25%", 0.25)):
            kept = record["arms"][method][name]["kept"]
            assert ratio - 0.01 <= kept <= ratio + 1e-6, method


def test_generation(tiny):
    base = make("distillcache", signals=("alpha", "pos"), prior=(1.0, 0.0), hidden=8)
    rlkv = Trained(make("rlkv", heads=HEADS, sinks=2, recent=8), GATES)
    prompt = naive.some_tokens(100, seed=5)
    want = dcache.generate(tiny, [prompt], "full", 1.0, max_new_tokens=12).tokens[0]
    for trained in (rlkv, compose(rlkv, Trained(base, base.init(jax.random.key(0))))):
        whole = dcache.generate(tiny, [prompt], trained, 1.0, max_new_tokens=12, evict_every=4)
        np.testing.assert_array_equal(whole.tokens[0], want)
        part = dcache.generate(tiny, [prompt], trained, 40, max_new_tokens=12, evict_every=4)
        assert part.cache_bytes == part.full_cache_bytes  # a full head decides how many slots all of them get


def test_compose_save_and_load(tmp_path):
    base = make("distillcache", granularity="head", heads=HEADS, scope="model", signals=("alpha", "pos"), hidden=8)
    rlkv, weights = make("rlkv", heads=HEADS), base.init(jax.random.key(1))
    checkpoint.save_policy(tmp_path / "gates" / "policy", rlkv, GATES, {})
    checkpoint.save_policy(tmp_path / "base", base, weights, {})
    command = [
        "launch/compose.py",
        f"--gates={tmp_path / 'gates'}",
        f"--policy={tmp_path / 'base'}",
    ]

    def run(*extra):
        return subprocess.run([sys.executable, *command, *extra], cwd=ROOT, capture_output=True, text=True, timeout=300)

    for extra, matched in ((), True), (("--nomatched",), False):
        out = tmp_path / f"out{matched}"
        done = run(f"--out={out}", *extra)
        assert done.returncode == 0, done.stderr
        got = checkpoint.load_policy(out)
        want = compose(Trained(rlkv, GATES), Trained(base, weights), matched=matched)
        assert got.policy == want.policy and got.policy.base == base and got.policy.matched == matched
        jax.tree.map(np.testing.assert_array_equal, got.params, want.params)
    assert dataclasses.asdict(got.policy)["base"]["hidden"] == 8
    again = run(f"--out={out}")
    assert again.returncode == 1 and "exists already" in again.stderr and len(again.stderr.splitlines()) == 1


def test_the_control_has_the_same_gates_in_random_heads():
    gates = jnp.linspace(0.0, 1.0, 90).reshape(30, 3)
    mixed = shuffled(Trained(make("rlkv"), {"gates": gates}), jax.random.key(0))
    assert mixed.policy == make("rlkv") and mixed.params["gates"].shape == gates.shape
    np.testing.assert_array_equal(np.sort(mixed.params["gates"], axis=None), gates.reshape(-1))
    moved = np.asarray(mixed.params["gates"] != gates)
    assert moved.mean() > 0.9
