"""`launch/demo.py`: what it starts (quick), and the whole story on the tiny model (slow); `launch/learning.py` too."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Runs the script with a stand-in for the commands that it starts; the stand-in prints them and fails as told.
STAND_IN = """
import json, runpy, subprocess, sys
sys.path.insert(0, "launch")
failing = sys.argv.pop(1)
def run(command, **kwargs):
    print(json.dumps(command[1:]))
    return subprocess.CompletedProcess(command, 7 if failing in command[1] else 0)
subprocess.run = run
runpy.run_path("launch/demo.py", run_name="__main__")
"""


def demo(failing, workdir):
    command = [sys.executable, "-c", STAND_IN, failing, f"--workdir={workdir}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def test_trains_then_evaluates_at_one_budget_then_answers(tmp_path):
    done, commands = demo("nothing", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [pathlib.Path(command[0]).name for command in commands] == ["train.py", "eval.py", "generate.py"]
    for command in commands:
        assert {"--config=configs/smollm2.py:demo", f"--workdir={tmp_path}"} <= set(command)
    assert "--resume" in commands[0] and "--config.eval.budgets=(0.25,)" in commands[1]
    assert f"{tmp_path}/eval/report.html" in done.stdout and "minutes" in done.stdout
    question = (tmp_path / "example.txt").read_text()
    assert f"--prompt_file={tmp_path}/example.txt" in commands[2]
    assert question.count("Oskar Yarrow") == 2 and "plum cake" in question[1000:-1000]


def test_failed_training_ends_the_demo(tmp_path):
    done, commands = demo("train.py", tmp_path)
    assert done.returncode == 7 and len(commands) == 1


@pytest.mark.slow
def test_whole_story_and_again(tmp_path):
    command = [sys.executable, "launch/demo.py", "--config=configs/smollm2.py:tiny", f"--workdir={tmp_path}"]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert first.returncode == 0, first.stderr
    assert "| distillcache " in first.stdout and (tmp_path / "eval" / "training.png").is_file()
    results = (tmp_path / "eval" / "results.jsonl").read_bytes()
    policy = (tmp_path / "policy" / "policy.safetensors").stat().st_mtime_ns
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert second.returncode == 0, second.stderr
    assert "finished" in second.stdout and "| distillcache " in second.stdout
    assert (tmp_path / "eval" / "results.jsonl").read_bytes() == results
    assert (tmp_path / "policy" / "policy.safetensors").stat().st_mtime_ns == policy


@pytest.mark.slow
def test_learning_experiment_on_the_tiny_model(tmp_path):
    command = [sys.executable, "launch/learning.py", "--tiny", "--prompts=2", f"--workdir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "table.md").read_text()
    assert table in done.stdout
    for name in ("seed0", "seed1", "seed2", "sequential"):
        lines = [line for line in table.splitlines() if line.startswith(f"| {name} ")]
        # Two bars on retrieval, one per sequence-level heuristic (4), and a row in both tables.
        assert len(lines) == 2 + 4 + 2
        assert sum("met" in line for line in lines) == 6
