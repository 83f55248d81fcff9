"""`dcache.latency` on the tiny model: what is reported, how it is put together, and that repeats do the same work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import cache as kv
from dcache import latency
from dcache.attention import StatsRequest
from dcache.errors import BudgetError, ConfigError
from dcache.policies import make
from dcache.policies.base import Trained
from dcache.policies.distillcache import DistillCache


@pytest.fixture(scope="module")
def methods():
    policy = DistillCache(signals=("alpha", "vnorm"))
    return {"keydiff": Trained(make("keydiff"), ()), "distillcache": Trained(policy, policy.init(jax.random.key(0)))}


def test_parts_of_a_step_by_hand():
    seconds = {
        "full.plain": 8.0, "full.attention": 6.0, "b.plain": 4.0, "b.attention": 2.0, "b.decision": 1.0,
        "a.plain": 4.0, "a.attention": 2.0, "a.watched": 5.0, "a.decision": 3.0, "a.signals": 1.0,
    }  # fmt: skip
    assert latency._parts(seconds, "full", 2) == {"attention_ms": 3000.0, "step_ms": 4000.0, "tokens_per_second": 0.25}
    # (5 - 4) / 2 seconds a token more, and one second of signals; two tokens take five seconds, their decision three.
    assert latency._parts(seconds, "a", 2) == {
        "attention_ms": 1000.0, "step_ms": 2000.0, "features_ms": 1500.0, "policy_ms": 2000.0, "tokens_per_second": 0.25,
    }  # fmt: skip
    # A policy without statistics adds nothing to a step.
    found = latency._parts(seconds, "b", 2)
    assert (found["features_ms"], found["policy_ms"], found["tokens_per_second"]) == (0.0, 1000.0, 0.4)


def test_a_table_for_the_terminal():
    found = {"full": {"step_ms": 2.0}, "a": {"step_ms": 1.234, "policy_ms": 0.5}}
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in latency.text(found).splitlines()]
    assert [lines[0], *lines[2:]] == [["method", "step ms", "policy ms"], ["full", "2", ""], ["a", "1.23", "0.5"]]


def test_every_method_has_its_numbers(tiny, methods):
    found = latency.measure(tiny, methods, prompt=128, evict_every=8, repeats=2)
    assert list(found) == ["full", *methods]
    assert set(found["full"]) == {"attention_ms", "step_ms", "tokens_per_second"}
    for label in methods:
        assert set(found[label]) == {"attention_ms", "step_ms", "features_ms", "policy_ms", "tokens_per_second"}
    assert all(row[name] > 0 for row in found.values() for name in ("attention_ms", "step_ms", "tokens_per_second"))
    assert found["keydiff"]["features_ms"] == 0.0


def test_a_measured_step_is_a_decode_step_and_leaves_the_cache_as_full_as_it_was(tiny, methods):
    cache = latency._evicted(tiny, methods["keydiff"].policy, (), 128, 32, 8)
    assert int(jnp.sum(kv.positions(cache)[0, 0, 0] >= 0)) == 32 and kv.positions(cache).shape[-1] == 40
    before = jax.tree.map(np.asarray, (kv.positions(cache), cache.length))
    caches = {"a": kv.restrict(cache, StatsRequest())}
    first = int(latency._decode(tiny, caches, "a", 8)[0])
    after = jax.tree.map(np.asarray, (kv.positions(caches["a"]), caches["a"].length))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert int(latency._decode(tiny, caches, "a", 8)[0]) == first


def test_what_does_not_fit_is_refused(tiny, methods):
    with pytest.raises(ConfigError, match="called 'full'"):
        latency.check(tiny, {"full": methods["keydiff"]})
    with pytest.raises(BudgetError, match="streaming_llm always keeps 4"):
        latency.measure(tiny, {"streaming_llm": Trained(make("streaming_llm"), ())}, budget=2, prompt=160)
