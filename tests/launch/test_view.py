"""`launch/view.py` as a user starts it: in a process of its own."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROMPT = "--prompt=" + "The kettle is green. " * 6  # the tiny model's tokens are characters


def run(*options):
    command = [sys.executable, "launch/view.py", "--model=tiny", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_one_page(tmp_path):
    out = tmp_path / "folder" / "view.html"
    options = ("--policies=knorm,protected(knorm, first=2, last=3)", "--budget=64", "--new_tokens=2", "--evict_every=0")
    done = run(PROMPT, *options, f"--out={out}")
    assert done.returncode == 0, done.stderr
    plain, protected, written = done.stdout.splitlines()
    assert plain.startswith("knorm ") and "keeps  50.4% of the prompt" in plain  # 64 of 127 tokens
    assert protected.startswith("protected(knorm, first=2, last=3) ") and "nats" in protected
    assert written.startswith(f"{out}: ")
    page = out.read_text(encoding="utf-8")
    assert '"label": "protected(knorm, first=2, last=3)"' in page and '"model": "tiny"' in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt= ",), "The prompt is an empty text"),
        ((PROMPT, "--policies=knorm,h3o"), "Unknown policy 'h3o'"),
        ((PROMPT, "--policies=knorm,,h2o"), "policy is ''"),
        ((PROMPT, "--policies=knorm,knorm"), "--policies names 'knorm' twice"),
    ],
)
def test_errors_are_one_sentence(options, message, tmp_path):
    done = run(*options, f"--out={tmp_path / 'view.html'}")
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "view.html").exists()
