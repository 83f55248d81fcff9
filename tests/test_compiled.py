"""7B and 8B models compiled for slices of 8 TPU chips (slow; skipped without libtpu), held against recorded numbers.

A step must fit into the chips' memory, and neither its bytes, nor what it needs of memory, nor what it sends may grow by 5%
over `tests/golden/compiled.json`; a step that is not recorded there must only fit.
A change that is meant to move them records them anew, all or some:

    python tests/test_compiled.py [mistral7b@v5e:2x4 ...]
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "golden" / "compiled.json"
MODELS = {
    "mistral7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "llama3_8b": "meta-llama/Meta-Llama-3-8B-Instruct",
}
CASES = [f"{model}@{topology}" for topology in ("v5e:2x4", "v6e:2x4") for model in MODELS]
MEMORY = {"v5e": 16e9, "v6e": 32e9}
GROWTH = 1.05


def measure(case, out):
    """Runs the command for one case; the numbers that are held against the record."""
    model, topology = case.split("@")
    command = [
        sys.executable, str(ROOT / "launch" / "compile.py"), f"--config={ROOT}/configs/mistral7b.py",
        f"--config.model={MODELS[model]}", f"--topology={topology}", f"--out={out}",
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads(Path(out).read_text())
    hours = found.pop("chip_hours")
    for name, step in found.items():
        work = step["work"]
        assert not work["unknown"], work["unknown"]
        found[name] = {
            "memory": step["total"], "bytes": work["bytes"], "sent": sum(work["sent"].values()), "flops": work["flops"],
            "donates": step["donates"],
        }  # fmt: skip
    return {"chip_hours": hours, "steps": found}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize("case", CASES)
def test_steps_fit_and_do_not_grow(case, tmp_path):
    recorded = json.loads(RECORD.read_text()).get(case, {"chip_hours": 10, "steps": {}})
    found = measure(case, tmp_path / "found.json")
    assert found["chip_hours"] <= min(GROWTH * recorded["chip_hours"], 10)
    assert found["steps"]["decode"]["donates"]
    for name, step in found["steps"].items():
        assert step["memory"] <= MEMORY[case.split("@")[1].split(":")[0]], name
        for field, before in recorded["steps"].get(name, {}).items():
            assert field not in ("memory", "bytes", "sent") or step[field] <= GROWTH * before, (name, field)


if __name__ == "__main__":
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for wanted in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as folder:
            record[wanted] = measure(wanted, Path(folder) / "found.json")
        record["versions"] = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
