"""`launch/generate.py` as a user starts it: in a process of its own."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROMPT = "--prompt=" + "The kettle is green. " * 12  # the tiny model's tokens are characters


def run(*options):
    command = [sys.executable, "launch/generate.py", "--config=configs/smollm2.py:tiny", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_text_on_one_stream_and_costs_on_the_other():
    done = run(PROMPT, "--budget=64", "--max_new_tokens=4", "--policy=snapkv")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) >= 4 and done.stdout.endswith("\n")
    snapkv, full, comparison = done.stderr.splitlines()[-3:]
    assert snapkv.startswith("snapkv, budget 64") and full.startswith("full cache") and "(100.0% of full)" in full
    assert comparison.startswith("The full cache gives ")


def test_the_policy_of_the_project_says_that_it_was_trained_on_another_model():
    done = run(PROMPT, "--budget=64", "--max_new_tokens=2", "--nocompare")
    assert done.returncode == 0, done.stderr
    assert "note: no policy was trained for 'tiny' yet; using the one for 'smollm2'" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "Give either --prompt or --prompt_file"),
        ((PROMPT, "--prompt_file=README.md"), "Give either --prompt or --prompt_file"),
        ((PROMPT, "--budget=lots"), "--budget is 'lots'"),
        ((PROMPT, "--budget=1.5"), "1.5"),
        ((PROMPT, "--policy=h3o"), "Unknown policy 'h3o'"),
        ((PROMPT, "--workdir=runs/nowhere"), "no folder 'runs/nowhere/policy'"),
    ],
)
def test_errors_are_one_sentence(options, message):
    done = run(*options)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
