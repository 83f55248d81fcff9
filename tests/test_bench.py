"""`dcache.bench` on the tiny model: what each measurement reports, what its arms do, the bars, and bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import bench, model
from dcache import cache as kv
from dcache.attention import StatsRequest
from dcache.bench import decoding, peers, suite, timing
from dcache.errors import ConfigError
from dcache.generate import pad_prompts
from dcache.policies import make
from dcache.policies.base import Trained, keep_set
from dcache.policies.distillcache import DistillCache


@pytest.fixture(scope="module")
def trained():
    policy = DistillCache()
    return Trained(policy, policy.init(jax.random.key(0)))


def test_interleaved_is_the_median_and_takes_turns(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

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


def test_decoding_is_greedy_and_the_same_at_every_call(tiny):
    """Against one call of the model per token."""
    call = decoding.Decoding(tiny, None, batch=2, slots=40, steps=3)
    unrolled = isinstance(tiny.decode_params["layers"], tuple)
    cache = decoding.filled(tiny, StatsRequest(), batch=2, slots=40, free=3, unrolled=unrolled)
    assert int((kv.positions(cache) >= 0).sum()) == tiny.config.num_layers * 2 * tiny.config.num_kv_heads * 37
    token = jnp.zeros(2, jnp.int32)

    @jax.jit
    def step(token, cache):
        hidden, cache = model.extend(tiny.decode_params, tiny.config, token[:, None], cache)
        return jnp.argmax(model.unembed(tiny.decode_params, hidden[:, 0], tiny.config), -1).astype(jnp.int32), cache

    for _ in range(3):
        token, cache = step(token, cache)
    for _ in range(2):
        np.testing.assert_array_equal(call(), token)


def test_an_evicting_cache_stays_full(tiny, trained):
    call = decoding.Decoding(tiny, trained, batch=2, slots=40, steps=6, every=2)
    before = kv.positions(call._cache)
    _, cache = call._run(call._cache, call._token)
    after = np.asarray(kv.positions(cache))
    assert (after >= 0).all() and (np.asarray(before) < 0).sum(-1).max() == 2
    # The six new tokens are there but for those that a later eviction of two took; the first eviction takes nothing.
    assert ((after >= 40).sum(-1) >= 2).all() and (after.max(-1) == 45).all()
    assert all(len(set(row)) == 40 for row in after.reshape(-1, 40).tolist())


def test_decode_reports_speed_limits_and_overheads(tiny, trained):
    found = bench.decode(tiny, trained, batch=2, slots=160, overheads=(4,), steps=4, repeats=1, copied=2**16)
    label = "decode.b2.s160"
    full, quarter = (found[f"{label}.{arm}step_seconds"] for arm in ("", "quarter_"))
    assert all(value > 0 for key, value in found.items() if "overhead" not in key)
    assert found[f"{label}.speedup_25"] == pytest.approx(full / quarter)
    whole, less = (decoding.step_bytes(tiny, 2, slots) for slots in (160, 40))
    assert found[f"{label}.speedup_bytes_limit"] == pytest.approx(whole / less)
    assert found[f"{label}.speedup_share"] == pytest.approx(full / quarter / (whole / less))
    assert found["policy.b2.s160.every4.overhead_fraction"] > -1


def test_bytes_of_a_step(tiny):
    """Weights once, the embedding table only as output matrix, and 2 numbers per layer, head, dimension and slot."""
    c = tiny.config
    layer = (
        c.embed_dim * c.head_dim * 2 * (c.num_heads + c.num_kv_heads) + 3 * c.embed_dim * c.ffn_dim + 2 * c.embed_dim
    )
    numbers = c.num_layers * layer + c.vocab_size * c.embed_dim + c.embed_dim
    cache = 3 * 50 * 2 * c.num_layers * c.num_kv_heads * c.head_dim
    assert decoding.step_bytes(tiny, 3, 50) == 4 * (numbers + cache)


def test_signals_and_rollout(tiny, trained):
    found = bench.prefill_signals(tiny, 64, repeats=1) | bench.rollout_cost(
        tiny, trained, prompt=64, samples=2, horizon=4, evict_every=2, repeats=1
    )
    assert all(value > 0 for value in found.values())
    assert found["rollout.ratio"] == pytest.approx(found["rollout.seconds"] / found["rollout.decode_seconds"])
    with pytest.raises(ConfigError, match="'h2o' is none"):
        bench.rollout_cost(tiny, Trained(make("h2o"), ()))


def test_first_token():
    """A new process has to start, load and compile; one that has answered before only reads."""
    found = bench.first_token("tiny", "snapkv", prompt=40)
    cold, restarted, warm = (found[f"first_token.s40.{name}_seconds"] for name in ("cold", "restarted", "warm"))
    assert 0 < warm < min(cold, restarted)
    with pytest.raises(ConfigError, match="status 1"):
        bench.first_token("tiny", "no-such-policy", prompt=40)


def test_what_the_machine_can_do():
    found = bench.machine(repeats=1, size=16, nbytes=2**12)
    assert set(found) == {
        "machine.copy_bandwidth",
        "machine.read_bandwidth",
        "machine.matrix_rate",
        "machine.matrix_rate_bf16",
    }
    copying = timing.Copying(2**10)
    copying()
    np.testing.assert_array_equal(copying(), np.full(2**8, 2.0))  # every number was read and written at each call
    assert copying.rate(0.5) == 2 * 2**10 / 0.5


MADE_UP = {
    "policy.b1.s2000.every16.overhead_fraction": 0.02, "policy.b8.s2000.every16.overhead_fraction": 0.04,
    "policy.b1.s2000.every1.overhead_fraction": 0.05,
    "decode.b8.s2000.speedup_25": 1.5, "decode.b8.s2000.speedup_bytes_limit": 1.8, "decode.b8.s2000.bandwidth_fraction": 0.7,
    "decode.b8.s8000.speedup_25": 2.5, "decode.b8.s8000.speedup_bytes_limit": 2.7, "decode.b8.s8000.bandwidth_fraction": 0.65,
    "decode.b8.s8000.speedup_share": 0.926, "rollout.ratio": 1.4,
}  # fmt: skip


def test_the_worst_counts_for_a_bar():
    assert suite.summary(MADE_UP) == {
        "policy.overhead_fraction.every16": 0.04, "policy.overhead_fraction.every1": 0.05, "decode.b8.bandwidth_fraction": 0.65
    }  # fmt: skip
    shown = suite.table(MADE_UP | suite.summary(MADE_UP))
    rows = dict(line.split(" | ", 1) for line in shown.splitlines()[2:])
    assert rows["| policy.overhead_fraction.every16"] == "0.04 | at most 0.03 | no |"
    assert rows["| policy.overhead_fraction.every1"] == "0.05 | at most 0.1 | yes |"
    assert rows["| decode.b8.s8000.speedup_share"] == "0.926 | at least 0.9 | yes |"
    assert rows["| decode.b8.bandwidth_fraction"] == "0.65 | at least 0.6 | yes |"
    assert rows["| rollout.ratio"] == "1.4 | at most 1.3 | no |"
    assert rows["| decode.b8.s2000.speedup_25"] == "1.5 |  |  |"


def test_picture(tmp_path):
    suite.picture(MADE_UP, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_suites(tiny, trained):
    names = {
        kind: list(suite.parts({"float32": tiny, "bfloat16": tiny}, trained, kind, sizes, 1, "distillcache"))
        for kind, sizes in (("quick", suite.QUICK), ("all", suite.ALL))
    }
    assert set(names["quick"]) < set(names["all"]) and not any("8000" in name for name in names["quick"])
    assert {"decoding, batch 8, 8000 slots, bfloat16", "training step", "first token"} <= set(names["all"])
    with peers.Peer([sys.executable, "-c", PEER, os.devnull]) as peer:
        more = set(suite.parts({"float32": tiny}, trained, "all", suite.ALL, 1, "distillcache", peer)) - set(
            names["all"]
        )
    assert more >= {"peers, decoding, batch 8, 8000 slots", "peers, prefill"}


@pytest.mark.slow
def test_the_command(tmp_path):
    root = Path(__file__).parents[1]
    command = [
        sys.executable,
        "launch/bench.py",
        "--suite=quick",
        "--model=tiny",
        "--repeats=1",
        f"--out={tmp_path}/b.json",
    ]
    done = subprocess.run(command, cwd=root, env=os.environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    numbers = json.loads((tmp_path / "b.json").read_text())
    for batch in (1, 8):
        for what in ("speedup_25", "speedup_bytes_limit", "bandwidth_fraction"):
            assert numbers[f"decode.b{batch}.s2000.{what}"] > 0
    assert {"policy.overhead_fraction.every1", "policy.overhead_fraction.every16", "prefill.signals_ratio", "rollout.ratio",
            "machine.copy_bandwidth", "machine.matrix_rate", "decode.b1.bandwidth_fraction"} <= numbers.keys()  # fmt: skip
    assert "| rollout.ratio |" in (tmp_path / "b.md").read_text() and (tmp_path / "b.png").is_file()


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


PEER = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({"seconds": 2.0 if "decode" in request else 3.0, "request": request}), flush=True)
    open(sys.argv[1], "a").write(line)
"""


def test_peers_are_measured_on_the_same_work(tiny, tmp_path):
    asked = tmp_path / "asked"
    with peers.Peer([sys.executable, "-c", PEER, str(asked)]) as peer:
        decoded = peers.decode(tiny, peer, batch=2, slots=200, steps=4, repeats=2)
        read = peers.prefill(tiny, peer, prompt=96, repeats=2)
    requests = [json.loads(line) for line in asked.read_text().splitlines()]
    whole, quarter = ({"decode": 4, "batch": 2, "slots": slots} for slots in (200, 50))
    plain, pressed = {"prefill": 96}, {"prefill": 96, "press": 0.25}
    assert requests == [*[whole] * 3, *[quarter] * 3, *[plain] * 3, *[pressed] * 3]
    for name in ("b2.s200", "b2.s200.quarter"):
        assert decoded[f"peers.decode_seconds.{name}"] == 2.0
        own = decoded[f"peers.decode_seconds_dcache.{name}"]
        assert decoded[f"peers.decode_ratio.{name}"] == pytest.approx(2.0 / own)
    for name in ("plain", "snapkv"):
        assert read[f"peers.prefill_ratio.s96.{name}"] == pytest.approx(
            3.0 / read[f"peers.prefill_seconds_dcache.s96.{name}"]
        )


def test_a_peer_that_ends_or_is_not_there_is_said():
    with (
        peers.Peer([sys.executable, "-c", "raise SystemExit(3)"]) as peer,
        pytest.raises(ConfigError, match="status 3"),
    ):
        peer.seconds(prefill=16)
    with pytest.raises(ConfigError, match="no-such-python"):
        peers.Peer(["no-such-python"])


def test_the_prefill_beside_the_peers_ends_with_the_cache_of_snapkv(tiny):
    tokens, length = pad_prompts([bench.random_prompt(tiny, 96)], 96)
    policy = make("snapkv")
    first, cache = peers._read(tiny.params, tokens, length, config=tiny.config, policy=policy, kept=40)
    hidden, whole = model.prefill(tiny.params, tiny.config, tokens, length, policy.needs)
    keep = keep_set(policy, (), whole, jnp.asarray([40], jnp.int32), jax.random.key(0))
    for layer, at in enumerate(kv.positions(cache)):
        for head in range(at.shape[1]):
            np.testing.assert_array_equal(at[0, head], np.flatnonzero(keep[layer, 0, head]))
    assert int(first[0]) == int(jnp.argmax(model.unembed(tiny.params, hidden[:, -1], tiny.config)))
