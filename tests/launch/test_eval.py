"""`launch/eval.py` as a user starts it: in a process of its own."""

import json
import pathlib
import subprocess
import sys
import time

import jax
import pytest

from configs import smollm2
from dcache.checkpoint import save_policy
from dcache.experiment import from_config

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*options):
    command = [sys.executable, "launch/eval.py", "--config=configs/smollm2.py:tiny", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A workdir with a policy that was not trained."""
    folder = tmp_path_factory.mktemp("run")
    policy = from_config(smollm2.get_config("tiny")).policy
    save_policy(folder / "policy", policy, policy.init(jax.random.key(0)), {})
    return folder


def test_evaluates_and_goes_on(workdir):
    options = (
        f"--workdir={workdir}", "--config.eval.policies=('full', 'streaming_llm')", "--config.eval.budgets=(0.25,)",
        "--config.eval.prompts=1",
    )  # fmt: skip
    first = run(*options)
    assert first.returncode == 0, first.stderr
    results = workdir / "eval" / "results.jsonl"
    whole = results.read_bytes()
    assert len(whole.splitlines()) == 1 + 2
    for part in ("### Retrieval prompts", "### Plain text", "| streaming_llm | 25% ", "| distillcache  | 25% "):
        assert part in first.stdout
    assert f"Report: {workdir / 'eval' / 'report.html'}" in first.stdout
    assert "2/2" in first.stderr  # the progress bar

    results.write_bytes(whole[:-100])  # killed while it wrote the last line
    second = run(*options)
    assert second.returncode == 0, second.stderr
    assert results.read_bytes() == whole and second.stdout == first.stdout


def test_a_benchmark_survives_kill_9(workdir, tmp_path):
    data = tmp_path / "boolq"
    data.mkdir()
    lines = [{"passage": "Cats sleep.", "question": f"do {i} cats sleep", "answer": True} for i in range(3)]
    (data / "boolq.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = (
        f"--workdir={workdir}", "--config.eval.policies=('full', 'streaming_llm')", "--config.eval.budgets=(0.25,)",
        "--config.eval.prompts=3", "--config.eval.tasks=boolq", f"--config.eval.data_dir={tmp_path}",
    )  # fmt: skip
    results = workdir / "benchmarks" / "results.jsonl"
    first = subprocess.Popen(
        [sys.executable, "launch/eval.py", "--config=configs/smollm2.py:tiny", *options], cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for _ in range(1200):
        if first.poll() is not None or (results.exists() and results.read_bytes().count(b"\n") >= 2):
            break
        time.sleep(0.1)
    first.kill()
    first.wait()
    begun = results.read_bytes()
    assert begun.count(b"\n") >= 2
    done = run(*options)
    assert done.returncode == 0, done.stderr
    assert results.read_bytes().startswith(begun[: begun.rfind(b"\n") + 1])
    assert results.read_bytes().count(b"\n") == 1 + 3
    assert "| boolq | 3 |" in done.stdout


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--config.eval.tasks=gsm8k_co", "There is no task 'gsm8k_co'"),
        ("--config.eval.policies=('h3o',)", "Unknown policy 'h3o'"),
        ("--policy=nowhere", "no trained policy in 'nowhere'"),
    ],
)
def test_errors_come_before_any_work(workdir, tmp_path, option, message):
    done = run(f"--workdir={workdir}", option)
    assert done.returncode == 1 and message in done.stderr
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
