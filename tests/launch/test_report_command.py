"""`launch/report.py` as a user starts it: in a process of its own."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*options):
    command = [sys.executable, "launch/report.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_a_report_and_its_errors(tmp_path):
    done = run("--config=configs/paper/table9.py", f"--out={tmp_path}", "--config.model=no-such-model")
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        "not run: needs Mistral-7B-Instruct-v0.3" in done.stdout
        and f"Report: {tmp_path / 'report.html'}" in done.stdout
    )
    assert (tmp_path / "summary.json").is_file() and (tmp_path / "table.md").is_file()
    done = run("--config=configs/paper/table9.py", f"--out={tmp_path}", f"--runs={tmp_path / 'gone'}")
    assert done.returncode == 1 and done.stderr.startswith("error: No results.jsonl in")
