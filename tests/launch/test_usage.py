"""A command that is started without the flags that it needs says how it is used."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_usage_without_flags():
    done = subprocess.run([sys.executable, "launch/export.py"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stdout == ""
    assert "python launch/export.py --policy=policies/smollm2-distillcache --out=DIR" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and "--policy" in last and "--out" in last
