"""`dcache.bench` on the tiny model: what each measurement reports, that its two arms do the same work, and bad input."""

import jax
import numpy as np
import pytest

from dcache import bench
from dcache.errors import ConfigError
from dcache.policies import make
from dcache.policies.base import Trained
from dcache.policies.distillcache import DistillCache


@pytest.fixture(scope="module")
def trained():
    policy = DistillCache()
    return Trained(policy, policy.init(jax.random.key(0)))


def test_interleaved_is_the_median_and_takes_turns(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    def call(name, durations):
        remaining = iter(durations)

        def run():
            order.append(name)
            now[0] += next(remaining)

        return run

    # The first call of each compiles and does not count; nor does one outlier move the median.
    found = bench.interleaved({"slow": call("slow", [50, 4, 5, 90]), "fast": call("fast", [60, 1, 2, 3])}, repeats=3)
    assert order == ["slow", "fast"] * 4
    assert found == {"slow": 5, "fast": 2}


def test_training_step_reports_the_ratio_of_its_parts(tiny, trained):
    found = bench.training_step(
        tiny, trained, prompt=96, samples=2, horizon=8, evict_every=4, teacher_batch=2, repeats=2
    )
    assert all(value > 0 for value in found.values())
    whole = found["train.prefill_seconds"] + found["train.decode_seconds"]
    for suffix in ("", "_alone"):
        seconds = found[f"train.step_seconds{suffix}"]
        assert seconds > found["train.update_seconds"]
        assert found[f"train.step_ratio{suffix}"] == pytest.approx(seconds / whole)


def test_training_step_of_an_untrained_method_is_refused(tiny):
    with pytest.raises(ConfigError, match="h2o"):
        bench.training_step(tiny, Trained(make("h2o"), ()))


def test_prefill_memory_counts_weights_and_cache(tiny):
    found = bench.prefill_memory(tiny, 256)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(tiny.params))
    keys_and_values = 256 * tiny.config.kv_bytes_per_token()
    assert found["prefill.s256.cache_bytes"] >= keys_and_values
    assert found["prefill.s256.total_bytes"] >= weights + found["prefill.s256.cache_bytes"]


def test_prefill_memory_is_linear_in_the_prompt(tiny):
    """Twice the tokens take at most about twice the temporary memory: no T x T matrix exists."""
    short, long = (bench.prefill_memory(tiny, n)[f"prefill.s{n}.temporary_bytes"] for n in (2048, 4096))
    assert long <= 2.2 * short


@pytest.mark.parametrize("batch", [1, 3])
def test_eviction_overhead_compares_the_same_cache(tiny, trained, batch):
    found = bench.eviction_overhead(tiny, trained, batch=batch, slots=96, evict_every=4, repeats=2)
    label = f"policy.b{batch}.s96.every4"
    plain, evicting = (found[f"{label}.{arm}_step_seconds"] for arm in ("plain", "evicting"))
    assert plain > 0 and evicting > 0
    assert found[f"{label}.overhead_fraction"] == pytest.approx(evicting / plain - 1.0)


def test_generation_bytes_are_those_of_the_budget(tiny, trained):
    found = bench.generation_bytes(tiny, trained, length=400, new=16)
    exact = 416 * tiny.config.kv_bytes_per_token()
    assert found["generate.s400.full_cache_bytes"] == exact
    assert found["generate.s400.cache_fraction"] == found["generate.s400.cache_bytes"] / exact
    assert 0.25 <= found["generate.s400.cache_fraction"] < 0.5


def test_random_prompt_is_reproducible(tiny):
    first, again = (bench.random_prompt(tiny, 50, seed=3) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert first.shape == (50,) and first.max() < tiny.config.vocab_size
