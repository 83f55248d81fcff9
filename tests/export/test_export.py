"""Exported policies: the files are enough to recompute the scores, and PyTorch keeps the same tokens."""

import functools
import hashlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import dcache
from dcache import signals
from dcache.checkpoint import load_policy, save_policy
from dcache.errors import CheckpointError, ConfigError
from dcache.export.files import check, export
from dcache.load import find_directory
from dcache.policies import Trained, make, reader
from dcache.policies.base import keep_set, read, spread

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "export_keepsets.npz"
SHIPPED = {
    "sequence": ROOT / "policies" / "smollm2-distillcache",
    "head": ROOT / "policies" / "smollm2-distillcache-head",
    "both": ROOT / "policies" / "smollm2-distillcache-both",
}
KEPT = 128  # 25% of 512, per layer and head
TORCH = os.environ.get("DCACHE_TORCH_PYTHON")
needs_torch = pytest.mark.skipif(
    not TORCH, reason="DCACHE_TORCH_PYTHON does not name a Python interpreter that has torch and kvpress"
)


def saved(folder, **settings):
    """A policy with random weights in a folder."""
    policy = make("distillcache", **settings)
    rng = np.random.default_rng(0)
    params = policy.init(jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
    save_policy(folder, policy, params, {"step": 3})
    return Trained(policy, params)


def read_files(folder):
    description = json.loads((folder / "policy.json").read_text())
    raw = (folder / description["weights"]["file"]).read_bytes()
    assert hashlib.sha256(raw).hexdigest() == description["weights"]["sha256"]
    weights = safetensors.numpy.load(raw)
    assert {name: list(value.shape) for name, value in weights.items()} == description["weights"]["shapes"]
    return description, weights


def numpy_scores(folder, features):
    """The network as the two files describe it, in float64."""
    description, weights = read_files(folder)
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    x, network = features.astype(np.float64), description["network"]
    score = x @ np.asarray(description["prior"]) if description["prior"] else 0.0
    if description["heads"]:
        score = score + np.einsum("lbksf,lkf->lbks", x, w["heads.slope"]) + w["heads.offset"][:, None, :, None]
        code = np.broadcast_to(w["heads.code"][:, None, :, None], (*x.shape[:-1], network["code"]))
        x = np.concatenate([x, code], axis=-1)
    assert x.shape[-1] == network["inputs"]
    for i in range(network["layers"]):
        x = x @ w[f"linear.{i}.weight"].T + w[f"linear.{i}.bias"]
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + network["layernorm_epsilon"])
        x = np.maximum(x * w[f"norm.{i}.weight"] + w[f"norm.{i}.bias"], 0.0)
    return score + (x @ w["score.weight"].T + w["score.bias"])[..., 0]


def assert_same_scores(trained, folder):
    policy = trained.policy
    layers, heads = policy.heads or (2, 3)
    leading = (1,) if policy.granularity == "sequence" else (layers, 1, heads)
    features = np.random.default_rng(1).normal(size=(*leading, 9, policy.inputs)).astype(np.float32)
    want = np.asarray(policy.scores_of(trained.params, jnp.asarray(features)))
    np.testing.assert_allclose(numpy_scores(folder, features), want, rtol=1e-5, atol=1e-5)
    if policy.reads:
        hidden = np.random.default_rng(2).normal(size=(1, layers, 9, policy.reads[0])).astype(np.float32)
        want = np.asarray(reader.read(trained.params["reader"], jnp.asarray(hidden)))[:, 0]
        np.testing.assert_allclose(numpy_reading(folder, hidden[0]), want, rtol=1e-5, atol=2e-5)


def numpy_reading(folder, hidden):
    """What the files say is read from hidden states [L, S, D], in float64: [L, K, S]."""
    description, weights = read_files(folder)
    w = {name.removeprefix("reader."): value.astype(np.float64) for name, value in weights.items() if "reader" in name}
    x = hidden.astype(np.float64)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + description["reader"]["epsilon"])
    x = np.einsum("lsd,lud->lsu", x, w["in"]) + w["in_bias"][:, None]
    x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return np.einsum("lsu,lku->lks", x, w["out"]) + w["bias"][:, :, None]


@pytest.mark.parametrize("label", SHIPPED)
def test_command_and_a_reader_in_numpy(label, tmp_path):
    command = [sys.executable, "launch/export.py", f"--policy={SHIPPED[label]}", f"--out={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"one decision per {'head' if label == 'both' else label}" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy.json", "weights.safetensors"]
    trained = load_policy(SHIPPED[label])
    assert_same_scores(trained, tmp_path)
    description, _ = read_files(tmp_path)
    assert [signal["name"] for signal in description["signals"]] == list(trained.policy.signals)
    assert tuple(description["prior"]) == trained.policy.prior
    assert tuple(description["heads"]) == trained.policy.heads
    assert description["source"]["model"]["name"] == "smollm2"
    constants = (signals.WINDOW, signals.NEAR, signals.ENTROPY_QUERIES, signals.LOG_OFFSET, dcache.budget.MINIMUM)
    assert tuple(description["constants"].values()) == constants


@pytest.mark.parametrize(
    "settings",
    [
        dict(signals=("pos", "vnorm"), hidden=4, layers=1),
        dict(signals=("alpha", "pos"), hidden=4, logs=False, layer_reduce="max", prior=(0.5, -1.0)),
        dict(signals=("alpha", "entropy", "last_near"), granularity="head", scope="layer", hidden=4, prior=(1.0, 2.0, 3.0)),
        dict(signals=("alpha", "window_max"), granularity="head", heads=(3, 2), hidden=4),
        dict(signals=("alpha", "pos"), granularity="head", heads=(3, 2), hidden=4, reads=(20, 5), prior=(1.0, 2.0, 3.0)),
    ],
)  # fmt: skip
def test_settings_round_trip(settings, tmp_path):
    trained = saved(tmp_path / "run" / "policy", **settings)
    returned = export(tmp_path / "run", tmp_path / "out")
    description, _ = read_files(tmp_path / "out")
    assert description == returned
    assert_same_scores(trained, tmp_path / "out")
    for name in ("granularity", "scope", "layer_reduce"):
        assert description[name] == getattr(trained.policy, name)
    for signal in description["signals"]:
        assert signal["log"] == (trained.policy.logs and signals.SIGNALS[signal["name"]].is_mass)
        assert signal["per"] == ("sequence" if signal["name"] == "entropy" else trained.policy.granularity)


def test_refusals(tmp_path):
    saved(tmp_path / "layer", granularity="layer", hidden=4)
    with pytest.raises(ConfigError, match="'distillcache' with granularity 'layer'; what can be exported is"):
        export(tmp_path / "layer", tmp_path / "out")
    with pytest.raises(ConfigError, match="'snapkv'.*what can be exported is 'distillcache'"):
        check(Trained(make("snapkv"), ()))
    assert not (tmp_path / "out").exists()
    saved(tmp_path / "seeing", sees_budget=True, hidden=4)
    with pytest.raises(ConfigError, match="sees the budget"):
        export(tmp_path / "seeing", tmp_path / "out")
    saved(tmp_path / "own", hidden=4)
    before = (tmp_path / "own" / "policy.json").read_bytes()
    with pytest.raises(ConfigError, match="export into another one"):
        export(tmp_path / "own", tmp_path / "own")
    assert (tmp_path / "own" / "policy.json").read_bytes() == before
    with pytest.raises(CheckpointError, match="no trained policy"):
        export(tmp_path / "nowhere", tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------------------
# The default model: what the press keeps in PyTorch (tests/golden/README.md) and what JAX keeps


@functools.partial(jax.jit, static_argnames=("config", "policy"))
def decide(params, config, policy, weights, tokens):
    _, cache = read(policy, weights, params, config, tokens, jnp.full((1,), tokens.shape[1], jnp.int32))
    scores = spread(policy.scores(weights, cache, jax.random.key(0)), cache, policy.granularity)
    keep = keep_set(policy, weights, cache, jnp.full((1,), KEPT, jnp.int32), jax.random.key(0))
    return scores[:, 0], keep[:, 0]


def assert_agree(lm, tokens, label, torch_side):
    """Scores, and keep-sets but for tokens whose scores are as good as equal."""
    trained = load_policy(SHIPPED[label])
    scores, keep = map(np.asarray, decide(lm.params, lm.config, trained.policy, trained.params, tokens))
    want, want_keep = (np.broadcast_to(torch_side[f"{label}/{name}"], scores.shape) for name in ("scores", "kept"))
    np.testing.assert_allclose(scores, want, rtol=1e-3, atol=1e-3)
    assert keep.sum() == want_keep.sum() == KEPT * keep[..., 0].size
    assert (keep & want_keep).sum() >= 0.995 * keep.sum()
    # Where heads share a budget they share the threshold; with one keep-set for all, all rows are the same.
    threshold = want[want_keep].min()
    assert (np.abs(want - threshold)[keep != want_keep] <= 2e-3).all()


@pytest.mark.parametrize("label", SHIPPED)
def test_jax_keeps_what_torch_keeps(smollm2, golden, label):
    with np.load(GOLDEN) as torch_side:
        assert_agree(smollm2, jnp.asarray(golden["input_ids"], jnp.int32)[None], label, torch_side)


@pytest.mark.slow
@pytest.mark.parametrize("label", SHIPPED)
def test_kl_after_eviction_is_the_same(smollm2, golden, label):
    got = dcache.fidelity(smollm2, golden["input_ids"], golden["continuation_ids"], SHIPPED[label], 0.25)
    with np.load(GOLDEN) as torch_side:
        np.testing.assert_allclose(got.kl, torch_side[f"{label}/kl"], rtol=0.02, atol=1e-4)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    for label, source in SHIPPED.items():
        export(source, folder / label)
    return folder


def torch_run(script, *arguments):
    command = [TORCH, str(ROOT / "tests" / "export" / script), *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@needs_torch
def test_press_on_the_default_model(smollm2, golden, exported, tmp_path):
    sources = [f"{label}={exported / label}" for label in SHIPPED]
    torch_run("make_keepsets.py", find_directory("smollm2"), tmp_path / "new.npz", *sources)
    with np.load(tmp_path / "new.npz") as torch_side:
        for label in SHIPPED:
            assert_agree(smollm2, jnp.asarray(golden["input_ids"], jnp.int32)[None], label, torch_side)


@pytest.mark.slow
@needs_torch
def test_press_on_random_models(exported, tmp_path):
    saved(tmp_path / "equal", granularity="head", hidden=4, signals=signals.HEAD_SIGNALS)
    shared = dict(granularity="head", scope="model", heads=(3, 2))
    saved(tmp_path / "shared", hidden=4, signals=signals.HEAD_SIGNALS, cap=1.2, **shared)
    for name in ("equal", "shared"):
        export(tmp_path / name, tmp_path / f"{name}-out")
    reading = dict(shared, reads=(48, 5))
    saved(tmp_path / "reading", hidden=4, signals=signals.HEAD_SIGNALS, **reading)
    export(tmp_path / "reading", tmp_path / "reading-out")
    policies = (
        *(exported / "sequence", tmp_path / "equal-out", exported / "head", tmp_path / "shared-out"),
        *(tmp_path / "reading-out", exported / "both"),
    )
    torch_run("check_press.py", *policies)
