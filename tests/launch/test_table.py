"""`launch/table.py` as a user starts it: in a process of its own."""

import json
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
    command = [sys.executable, "launch/table.py", "--tiny", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)


@pytest.mark.slow
def test_one_table_of_all_methods(tmp_path):
    policy = from_config(smollm2.get_config("tiny")).policy
    save_policy(tmp_path / "ours", policy, policy.init(jax.random.key(0)), {})
    options = (
        f"--workdir={tmp_path / 'table'}", "--prompts=1", "--validation=1", f"--policy=ours={tmp_path / 'ours'}",
        "--champion=ours",
    )  # fmt: skip
    done = run(*options)
    assert done.returncode == 0, done.stderr[-2000:]
    for budget in ("50%", "25%", "12.5%"):
        assert f"### {budget} of the cache" in done.stdout
    for method in ("oracle@sequence", "kvzip", "snapkv", "adakv", "rkv", "ours", "random"):
        assert done.stdout.count(f"| {method} ") == 3
    assert "question hidden" in done.stdout and "* text KL at 25%: ours has" in done.stdout
    chosen = json.loads((tmp_path / "table" / "summary.json").read_text())["settings"]
    assert set(chosen) == {"streaming_llm", "h2o", "snapkv", "pyramidkv"} and chosen["snapkv"].startswith("snapkv")
    assert (tmp_path / "table" / "table.md").read_text() in done.stdout
    again = run(*options)  # nothing is evaluated twice
    assert again.returncode == 0 and again.stdout == done.stdout


def test_unknown_arguments():
    done = run("prompts=3")
    assert done.returncode == 1 and "Unknown argument 'prompts=3'" in done.stderr
