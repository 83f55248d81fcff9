"""`launch/eval.py` as a user starts it: in a process of its own."""

import pathlib
import subprocess
import sys

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


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--config.eval.policies=('h3o',)", "Unknown policy 'h3o'"),
        ("--policy=nowhere", "no trained policy in 'nowhere'"),
    ],
)
def test_errors_come_before_any_work(workdir, tmp_path, option, message):
    done = run(f"--workdir={workdir}", option)
    assert done.returncode == 1 and message in done.stderr
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
