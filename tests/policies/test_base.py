"""What every policy must do: the registry, shapes, finite scores, exact budgets, refusals."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import cache as kv
from dcache import signals
from dcache.attention import StatsRequest
from dcache.errors import BudgetError, ConfigError
from dcache.policies import base, make, policies
from tests import naive
from tests.naive import TINY

L, K = TINY.num_layers, TINY.num_kv_heads
MODULE = importlib.import_module("dcache.policies")  # `dcache.policies` is the function of that name
EVERY = {name: make(name) for name in policies()}
# H2O, SnapKV and DistillCache decide at any granularity.
for _g in ("sequence", "layer"):
    EVERY[f"h2o/{_g}"] = make("h2o", granularity=_g)
    EVERY[f"snapkv/{_g}"] = make("snapkv", granularity=_g, window=3)
    EVERY[f"observed_attention/{_g}"] = make("observed_attention", granularity=_g)
for _g in ("layer", "head"):
    EVERY[f"distillcache/{_g}"] = make("distillcache", granularity=_g, signals=("alpha", "pos", "key_distinct"))

scores_jit = jax.jit(lambda policy, params, cache, key: policy.scores(params, cache, key), static_argnums=0)
keep_set_jit = jax.jit(base.keep_set, static_argnums=0)


EVERY["pyramidkv/layer"] = make("pyramidkv", granularity="layer")
EVERY["kvzip/layer"] = make("kvzip", scope="layer")
EVERY["oracle/sequence"] = make("oracle", granularity="sequence")
EVERY["adakv/h2o"] = make("adakv", base=make("h2o"))


@functools.cache
def weights_of(policy):
    if policy.name != "distillcache":
        return ()
    # The network starts with zero scores; any others will do.
    return jax.tree.map(lambda x: x + 0.1, policy.init(jax.random.key(0)))


def test_all_methods_are_registered():
    expected = """full random streaming_llm h2o observed_attention snapkv pyramidkv adakv tova keydiff knorm lagkv
        expected_attention criticalkv kvzip oracle rkv cake distillcache foresightkv""".split()
    assert set(expected) <= set(policies())
    for name, policy in MODULE.REGISTRY.items():
        assert policy.name == name and policy.paper
    for name, line in policies().items():
        assert line and "\n" not in line and len(line) < 100, name


def test_unknown_names_and_settings():
    with pytest.raises(ConfigError, match="snapkw.*snapkv"):
        make("snapkw")
    with pytest.raises(ConfigError, match="windows.*kernel.*window"):
        make("snapkv", windows=3)
    with pytest.raises(ConfigError, match="no settings"):
        make("keydiff", window=3)
    with pytest.raises(ConfigError):
        make("keydiff", granularity="layer")  # a class attribute, not a setting


@pytest.mark.parametrize(
    "name,settings,kind",
    [
        ("cake", {"gamma": "x"}, "int or float"), ("kvzip", {"part": 16.5}, "int"),
        ("snapkv", {"window": 8.0}, "int or NoneType"),
        ("pyramidkv", {"kvpress": 1}, "bool"), ("h2o", {"granularity": None}, "str"), ("h2o", {"recent_share": None}, "float"),
        ("streaming_llm", {"sinks": True}, "int"),
    ],
)  # fmt: skip
def test_settings_of_the_wrong_type(name, settings, kind):
    with pytest.raises(ConfigError, match=f"{name}.*{next(iter(settings))} is .*type .*{kind}"):
        make(name, **settings)
    assert make("snapkv", window=8).window == 8 and make("cake", gamma=5).gamma == 5


def test_settings_reach_the_policy_and_lists_become_tuples():
    assert make("streaming_llm", sinks=7).sinks == 7
    policy = make("distillcache", signals=["pos", "alpha"])
    assert policy.signals == ("pos", "alpha") and hash(policy) == hash(make("distillcache", signals=("pos", "alpha")))


@pytest.mark.parametrize("name", ["h2o", "snapkv", "distillcache"])
def test_unknown_granularity(name):
    with pytest.raises(ConfigError, match="token.*sequence.*layer.*head"):
        make(name, granularity="token")


def test_a_policy_in_a_new_file_is_found(tmp_path, monkeypatch):
    (tmp_path / "oldest_policy_of_a_test.py").write_text(
        "import dataclasses\n"
        "from dcache.policies.base import Policy, slot_positions\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Oldest(Policy):\n"
        "    name = 'oldest'\n    summary = 'the oldest tokens'\n    paper = '-'\n    start: int = 0\n"
        "    def scores(self, params, cache, key):\n"
        "        return -abs(slot_positions(cache, 'sequence') - self.start).astype('float32')\n"
    )
    monkeypatch.setattr(MODULE, "__path__", [*MODULE.__path__, str(tmp_path)])
    monkeypatch.setattr(MODULE, "REGISTRY", MODULE._discover())
    assert policies()["oldest"] == "the oldest tokens"
    cache, _, alive, _ = naive.decoded("prefill")
    keep = base.keep_set(make("oldest", start=2), (), cache, jnp.asarray([3, 1], jnp.int32), jax.random.key(0))
    assert np.flatnonzero(keep[1, 0, 1]).tolist() == [1, 2, 3] and np.flatnonzero(keep[0, 1, 0]).tolist() == [2]
    del alive


def test_a_policy_must_define_scores():
    @dataclasses.dataclass(frozen=True)
    class Nothing(base.Policy):
        name = "nothing"

    with pytest.raises(NotImplementedError, match="Nothing"):
        Nothing().scores((), None, None)


def with_needs(cache, policy):
    """Restricted to what the policy asks for: it may read nothing else. Its own windows and looks are made up."""
    layers = kv.stacked(cache)
    windows = {w: layers.stats.windows.get(w, layers.stats.last) for w in policy.needs.windows}
    extra = {name: layers.stats.mass for name in policy.needs.extra}
    squares, surprisals = (
        {w: getattr(layers.stats, name)[32] for w in policy.needs.spreads} for name in ("squares", "surprisals")
    )
    stats = dataclasses.replace(layers.stats, windows=windows, extra=extra, squares=squares, surprisals=surprisals)
    cache = dataclasses.replace(cache, layers=dataclasses.replace(layers, stats=stats))
    return kv.restrict(cache, policy.needs)


def with_window(policy, window):
    """SnapKV's window, of the policy or of the one inside."""
    if hasattr(policy, "window"):
        return dataclasses.replace(policy, window=window)
    return dataclasses.replace(policy, base=with_window(policy.base, window)) if hasattr(policy, "base") else policy


@pytest.mark.parametrize("kind", ["prefill", "sequence"])
@pytest.mark.parametrize("name", EVERY)
def test_scores_and_keep_set(name, kind):
    policy = EVERY[name]
    full, _, alive, _ = naive.decoded(kind)
    cache = with_needs(full, policy)
    slots = kv.positions(cache).shape[-1]
    shape = {"sequence": (2, slots), "layer": (L, 2, slots), "head": (L, 2, K, slots)}[policy.granularity]
    scores = np.asarray(scores_jit(policy, weights_of(policy), cache, jax.random.key(3)))
    assert scores.shape == shape and scores.dtype == np.float32
    assert np.isfinite(scores).all()
    filled = np.asarray(kv.positions(cache)) >= 0
    for budget in ([40, 7], [200, 36]):
        fitted = with_window(policy, 5)
        keep = np.asarray(
            keep_set_jit(
                fitted, weights_of(policy), with_needs(full, fitted), jnp.asarray(budget, jnp.int32), jax.random.key(3)
            )
        )
        assert keep.shape == filled.shape and not keep[~filled].any()
        held = filled.sum(-1)
        want = held if policy.name == "full" else np.minimum(held, np.asarray(budget)[None, :, None])
        if type(policy).allocate is base.Policy.allocate:
            np.testing.assert_array_equal(keep.sum(-1), want)
        else:  # heads or layers share a budget
            np.testing.assert_array_equal(keep.sum((0, 2, 3)), want.sum((0, 2)))
            for b in range(2):
                most = policy.most_kept(budget[b], int(held[:, b].max()), TINY)
                assert keep[:, b].sum(-1).max() <= most
        if policy.granularity != "head":
            assert (keep == keep[:, :, :1]).all()
        if policy.granularity == "sequence":
            assert (keep == keep[:1]).all()


@pytest.mark.parametrize("name", [n for n, p in EVERY.items() if p.name not in ("random", "full")])
def test_layouts_agree(name):
    # The unrolled cache gives the same scores as the stacked one (keep-sets could differ where scores nearly tie).
    policy, scores = EVERY[name], []
    for kind in ("sequence", "unrolled"):
        cache = with_needs(naive.decoded(kind)[0], policy)
        cache = kv.unstack(cache) if kind == "unrolled" else cache
        filled = np.asarray(signals.filled(cache, policy.granularity))
        scores.append(np.asarray(scores_jit(policy, weights_of(policy), cache, jax.random.key(0)))[filled])
    np.testing.assert_allclose(*scores, rtol=1e-3, atol=1e-4 * scores[0].std())


def test_budget_smaller_than_what_is_protected():
    with pytest.raises(BudgetError, match="streaming_llm.*4.*3"):
        make("streaming_llm").fit(3)
    assert make("streaming_llm").fit(4) == make("streaming_llm")
    for name in policies():
        if hasattr(make(name), "sinks") and name != "lagkv":
            with pytest.raises(BudgetError, match=f"{name}.*4.*3"):
                make(name).fit(3)
        else:
            fitted = make(name).fit(1)  # one token is a legal budget for all others
            assert fitted.protected_tokens(1) <= 1


def test_recent_and_positions():
    cache, _, alive, lengths = naive.decoded("sequence")
    for granularity in signals.GRANULARITIES:
        got = np.asarray(base.recent(cache, granularity, jnp.asarray([4, 100], jnp.int32)))
        got = np.asarray(base.spread(jnp.asarray(got), cache, granularity))
        for b, count in enumerate((4, 100)):
            text = alive[b].shape[-1]
            have = naive.by_position(got[:, b] * 1.0, np.asarray(kv.positions(cache))[:, b], text) == 1
            np.testing.assert_array_equal(have, alive[b] & (np.arange(text) >= text - count))
    del lengths


def test_averages_over_heads():
    cache = naive.decoded("prefill")[0]
    per_query_head = cache.layers.stats.last  # [L, B, 4, S]
    want = np.asarray(per_query_head).reshape(L, 2, K, 2, -1).mean(3)
    got = base.per_kv_head(per_query_head, cache)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(base.averaged(got, "layer"), want.mean(2), rtol=1e-6)
    np.testing.assert_allclose(base.averaged(got, "sequence"), want.mean((0, 2)), rtol=1e-6)
    assert base.averaged(got, "head") is got


def test_nothing_is_needed_by_default():
    assert base.Policy().needs == StatsRequest()
    assert base.Policy().protects(None, jnp.ones(1)) is None
