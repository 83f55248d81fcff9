import contextlib
import dataclasses
import functools
import json
import resource
import shutil
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from dcache import checkpoint
from dcache.errors import CheckpointError
from dcache.learn.distill import DistillConfig, init_state
from dcache.policies.distillcache import DistillCache
from dcache.workdir import WorkdirError

POLICY = DistillCache(hidden=8, layers=1)
CONFIG = DistillConfig(steps=10, warmup_steps=1)
IDENTITY = {"config": {"seed": 0, "learn": {"steps": 10, "ratios": (0.5, 0.25)}}, "architecture": {"name": "tiny"}}
START = jax.jit(functools.partial(init_state, policy=POLICY, config=CONFIG))
TEMPLATE = jax.eval_shape(START, jax.random.key(0))


@pytest.fixture
def state():
    """A state in which every value is different."""
    leaves, tree = jax.tree.flatten(START(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    values = [jax.random.randint(k, x.shape, 1, 1000).astype(x.dtype) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, values)


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def scaled(state, factor):
    return jax.tree.map(lambda x: x * jnp.asarray(factor, x.dtype), state)


@contextlib.contextmanager
def small_files(size):
    """Files cannot grow beyond `size` bytes, which is how a full disk looks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---------------------------------------------------------------------------------------------------------------------
# Training checkpoints


def test_roundtrip_keeps_every_bit_and_the_newest(tmp_path, state):
    key = jax.random.key(7)
    for step in (2, 4, 10):
        checkpoint.save(tmp_path, step, scaled(state, step), key, IDENTITY, keep=2)
    assert checkpoint.latest_step(tmp_path) == 10  # not "4", the last in alphabetical order
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdecimal()) == ["10", "4"]
    restored, restored_key = checkpoint.restore(tmp_path, TEMPLATE, IDENTITY)
    assert same(restored, scaled(state, 10))
    assert restored_key == key and jax.dtypes.issubdtype(restored_key.dtype, jax.dtypes.prng_key)
    found = checkpoint.describe(tmp_path)
    assert found["step"] == 10 and found["identity"] == json.loads(json.dumps(IDENTITY))


def test_no_checkpoint(tmp_path):
    assert checkpoint.latest_step(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoint.restore(tmp_path, TEMPLATE, IDENTITY)


def test_incomplete_checkpoints_do_not_count(tmp_path, state):
    key = jax.random.key(7)
    checkpoint.save(tmp_path, 2, state, key, IDENTITY, keep=2)
    for name in ("4", "6", "notes"):  # what a run leaves that is killed while it writes or deletes
        shutil.copytree(tmp_path / "2", tmp_path / name)
    (tmp_path / "4" / checkpoint.RUN).rename(tmp_path / "4" / f".{checkpoint.RUN}.x7")  # not renamed yet
    (tmp_path / "6" / checkpoint.RUN).unlink()
    assert checkpoint.latest_step(tmp_path) == 2
    assert same(checkpoint.restore(tmp_path, TEMPLATE, IDENTITY)[0], state)
    checkpoint.save(tmp_path, 4, scaled(state, 3), key, IDENTITY, keep=2)
    assert checkpoint.latest_step(tmp_path) == 4
    assert same(checkpoint.restore(tmp_path, TEMPLATE, IDENTITY)[0], scaled(state, 3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "4", "notes"]


@pytest.mark.parametrize("killed_at", ["arrays", "description", "deletion"])
def test_a_run_that_is_killed_while_it_saves(tmp_path, state, monkeypatch, killed_at):
    """The description is written last and deleted first, whatever the file system makes of renamed folders."""
    key = jax.random.key(7)
    checkpoint.save(tmp_path, 2, state, key, IDENTITY, keep=1)

    def killed(*arguments):
        raise KeyboardInterrupt  # nothing cleans up after it

    if killed_at == "arrays":
        monkeypatch.setattr("orbax.checkpoint.v1.save", lambda path, tree: (path.mkdir(), killed()))
    elif killed_at == "description":
        write = checkpoint.atomic_write
        monkeypatch.setattr(
            checkpoint, "atomic_write", lambda path, raw: killed() if path.name == checkpoint.RUN else write(path, raw)
        )
    else:
        monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 4, scaled(state, 3), key, IDENTITY, keep=1)
    monkeypatch.undo()
    newest, factor = (4, 3) if killed_at == "deletion" else (2, 1)
    assert checkpoint.latest_step(tmp_path) == newest
    assert same(checkpoint.restore(tmp_path, TEMPLATE, IDENTITY)[0], scaled(state, factor))
    checkpoint.save(tmp_path, 6, state, key, IDENTITY, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["6"]


def damages(path):
    """A file's bytes with a change: cut in half, or one byte flipped at several places."""
    raw = path.read_bytes()
    yield "cut", raw[: len(raw) // 2] if raw else b"more"
    for place in np.unique(np.linspace(0, len(raw) - 1, 7).astype(int)) if raw else []:
        yield f"byte {place}", raw[:place] + bytes([raw[place] ^ 0x55]) + raw[place + 1 :]


def test_damage_is_found_whatever_the_file(tmp_path, state):
    key = jax.random.key(7)
    checkpoint.save(tmp_path, 2, scaled(state, 2), key, IDENTITY, keep=2)
    checkpoint.save(tmp_path, 4, state, key, IDENTITY, keep=2)
    for path in sorted(p for p in (tmp_path / "4").rglob("*") if p.is_file()):
        original = path.read_bytes()
        for kind, damaged in damages(path):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match="/4' is damaged .*delete it and go on from step 2"):
                checkpoint.restore(tmp_path, TEMPLATE, IDENTITY)
                pytest.fail(f"{path}: {kind}")
        path.write_bytes(original)
    assert same(checkpoint.restore(tmp_path, TEMPLATE, IDENTITY)[0], state)
    # As the message says.
    shutil.rmtree(tmp_path / "4")
    assert same(checkpoint.restore(tmp_path, TEMPLATE, IDENTITY)[0], scaled(state, 2))


def test_missing_files_and_no_older_one(tmp_path, state):
    checkpoint.save(tmp_path, 2, state, jax.random.key(7), IDENTITY, keep=2)
    shutil.rmtree(tmp_path / "2" / "arrays" / "state" / "d")
    with pytest.raises(CheckpointError, match="is damaged .*no older one"):
        checkpoint.restore(tmp_path, TEMPLATE, IDENTITY)


def test_other_runs_are_refused_by_name(tmp_path, state):
    checkpoint.save(tmp_path, 2, state, jax.random.key(7), IDENTITY, keep=2)
    other = {"config": {"seed": 1, "learn": {"steps": 12, "ratios": (0.5, 0.25)}}, "architecture": {"name": "tiny"}}
    with pytest.raises(
        CheckpointError, match=r"config.learn.steps \(10 there, 12 here\), config.seed \(0 there, 1 here\); use"
    ):
        checkpoint.restore(tmp_path, TEMPLATE, other)
    other = {"config": IDENTITY["config"], "architecture": {"name": "smollm2"}}
    with pytest.raises(CheckpointError, match=r"differs in architecture.name \('tiny' there, 'smollm2' here\)"):
        checkpoint.restore(tmp_path, TEMPLATE, other)


def test_full_disk_leaves_the_last_checkpoint(tmp_path, state):
    key = jax.random.key(7)
    checkpoint.save(tmp_path, 2, state, key, IDENTITY, keep=1)
    with small_files(500), pytest.raises(CheckpointError, match="step 4 cannot be written.*the one of step 2 stays"):
        checkpoint.save(tmp_path, 4, scaled(state, 3), key, IDENTITY, keep=1)
    assert same(checkpoint.restore(tmp_path, TEMPLATE, IDENTITY)[0], state)
    assert [p.name for p in tmp_path.iterdir()] == ["2"]
    checkpoint.save(tmp_path, 4, scaled(state, 3), key, IDENTITY, keep=1)  # once there is space
    assert same(checkpoint.restore(tmp_path, TEMPLATE, IDENTITY)[0], scaled(state, 3))


def test_orbax_failing_leaves_the_last_checkpoint(tmp_path, state, monkeypatch):
    checkpoint.save(tmp_path, 2, state, jax.random.key(7), IDENTITY, keep=1)

    def fail(path, tree):
        path.mkdir()
        (path / "part").write_text("x")
        raise ValueError("RESOURCE_EXHAUSTED: quota\nmore")

    monkeypatch.setattr("orbax.checkpoint.v1.save", fail)
    with pytest.raises(CheckpointError, match=r"\(ValueError: RESOURCE_EXHAUSTED: quota\); free.*step 2 stays"):
        checkpoint.save(tmp_path, 4, state, jax.random.key(7), IDENTITY, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["2"]


# ---------------------------------------------------------------------------------------------------------------------
# Trained policies


@pytest.fixture
def params():
    return POLICY.init(jax.random.key(3))


def test_policy_roundtrip(tmp_path, params):
    checkpoint.save_policy(tmp_path / "policy", POLICY, params, {"step": 3, "model": {"name": "tiny"}})
    for path in (tmp_path, tmp_path / "policy", str(tmp_path)):
        trained = checkpoint.load_policy(path)
        assert trained.policy == POLICY and same(trained.params, params)
    description = json.loads((tmp_path / "policy" / "policy.json").read_text())
    assert description["policy"] == "distillcache" and description["step"] == 3
    assert description["settings"]["signals"] == list(POLICY.signals)
    assert sorted(p.name for p in (tmp_path / "policy").iterdir()) == ["policy.json", "policy.safetensors"]


def test_no_policy(tmp_path):
    with pytest.raises(CheckpointError, match="no trained policy in .*give a directory with policy.safetensors"):
        checkpoint.load_policy(tmp_path)


def test_damaged_policy(tmp_path, params):
    checkpoint.save_policy(tmp_path, POLICY, params, {})
    path = tmp_path / "policy.safetensors"
    original = path.read_bytes()
    for kind, damaged in damages(path):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.load_policy(tmp_path)
            pytest.fail(kind)
    path.write_bytes(original)
    assert same(checkpoint.load_policy(tmp_path).params, params)
    safetensors.numpy.save_file({"x": np.zeros(2, np.float32)}, path)  # of another program
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.load_policy(tmp_path)


@dataclasses.dataclass(frozen=True)
class Other:
    """Something with the shape of a policy."""

    name: ClassVar[str] = "distillcache"
    signals: tuple[str, ...] = ("alpha", "vibes")


def test_policies_of_other_versions(tmp_path, params):
    checkpoint.save_policy(tmp_path, Other(), params, {})
    with pytest.raises(CheckpointError, match=r"settings that this version does not know: Unknown signals \['vibes'\]"):
        checkpoint.load_policy(tmp_path)

    class Unknown(Other):
        name = "oracle"

    checkpoint.save_policy(tmp_path, Unknown(), params, {})
    with pytest.raises(CheckpointError, match="holds the policy 'oracle'; this version can load .*distillcache"):
        checkpoint.load_policy(tmp_path)

    @dataclasses.dataclass(frozen=True)
    class More(Other):
        signals: tuple[str, ...] = ("alpha",)
        depth: int = 3

    checkpoint.save_policy(tmp_path, More(), params, {})
    with pytest.raises(CheckpointError, match="does not know: .*no setting depth"):
        checkpoint.load_policy(tmp_path)


def test_weights_of_the_wrong_shape(tmp_path, params):
    checkpoint.save_policy(tmp_path, DistillCache(hidden=16, layers=1), params, {})
    with pytest.raises(CheckpointError, match=r"has the shape \(8,\), but its policy's settings ask for \(16,\)"):
        checkpoint.load_policy(tmp_path)
    deeper = DistillCache(hidden=8, layers=2)
    checkpoint.save_policy(tmp_path, deeper, {"params": {"Dense_0": params["params"]["Dense_0"]}}, {})
    with pytest.raises(CheckpointError, match="Dense_1/bias has the shape None, but its policy's settings ask for"):
        checkpoint.load_policy(tmp_path)


def test_full_disk_leaves_the_old_policy(tmp_path, params):
    checkpoint.save_policy(tmp_path, POLICY, params, {})
    with small_files(500), pytest.raises(WorkdirError, match="cannot be written"):
        checkpoint.save_policy(tmp_path, POLICY, jax.tree.map(jnp.zeros_like, params), {})
    assert same(checkpoint.load_policy(tmp_path).params, params)
