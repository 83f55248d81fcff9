"""The preemption drill: a run is stopped with SIGTERM by one job file and goes on elsewhere through another."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from dcache import checkpoint, metrics

ROOT = Path(__file__).parents[2]
STEPS = 24
TINY = ("--config=configs/smollm2.py:tiny", f"--config.learn.steps={STEPS}")


def machine(folder, devices):
    """A machine of its own: this checkout in another place, no compiled programs, a number of devices that pass for GPUs."""
    (folder / "bin").mkdir(parents=True)
    for name in ("launch", "configs", "dcache", "policies"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    # As Slurm does: the step's exit status is the run's, and a warning signal goes to the step alone.
    for name, text in (
        ("srun", 'shift; exec "$@"'), ("scontrol", f'echo "$@" > "{folder}/scontrol"'), ("nvidia-smi", "true"),
    ):  # fmt: skip
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "DCACHE_CACHE": str(folder / "cache"),
        "SLURM_JOB_ID": "17",
    }


def start(folder, environment, *command):
    log = open(folder / "log", "a")
    with log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)


def finish(process, folder):
    assert process.wait(timeout=1200) == 0, (folder / "log").read_text()


def children(process):
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def numbers(workdir):
    return [
        {k: v for k, v in record.items() if k not in ("seconds", "tokens_per_second")}
        for record in metrics.read(workdir)
    ]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to find the run below its shell")
def test_a_preempted_run_goes_on_elsewhere(tmp_path):
    whole, first = tmp_path / "whole", tmp_path / "first"
    undisturbed = start(whole, machine(whole, 1), ".venv/bin/python", "launch/train.py", *TINY, "--workdir=run")

    # Slurm's warning before the time limit: the run saves, the script asks to be queued again.
    job = start(first, machine(first, 1), "bash", "launch/slurm.sh", *TINY, "--workdir=run")
    for _ in range(9000):
        if len(metrics.read(first / "run")) >= 3:
            break
        assert job.poll() is None, (first / "log").read_text()
        time.sleep(0.1)
    (run,) = children(job)
    os.kill(run, signal.SIGTERM)
    assert job.wait(timeout=600) == os.EX_TEMPFAIL, (first / "log").read_text()
    assert (first / "scontrol").read_text() == "requeue 17\n"
    stopped = checkpoint.latest_step(first / "run" / "checkpoints")
    assert 3 <= stopped < STEPS and len(metrics.read(first / "run")) == stopped

    # Two other machines, one with more devices, see the bucket that holds the folder; SkyPilot's command is given.
    sky = yaml.safe_load((ROOT / "launch" / "sky.yaml").read_text())
    again = {}
    for devices in (1, 4):
        folder = tmp_path / f"elsewhere{devices}"
        workdir = folder / "bucket" / "run"
        environment = machine(folder, devices) | {
            "CONFIG": TINY[0].partition("=")[2], "ARGS": TINY[1], "WORKDIR": str(workdir)
        }  # fmt: skip
        shutil.copytree(first / "run", workdir)
        again[workdir] = (start(folder, environment, "bash", "-c", sky["run"]), folder, environment)
    shutil.rmtree(first)
    finish(undisturbed, whole)
    for process, folder, _ in again.values():
        finish(process, folder)

    expected, (same, other) = numbers(whole / "run"), again
    assert [record["step"] for record in expected] == list(range(1, STEPS + 1))
    assert numbers(same) == expected
    for name in ("policy.safetensors", "policy.json"):
        assert (same / "policy" / name).read_bytes() == (whole / "run" / "policy" / name).read_bytes()
    # XLA divides its work among threads by the number of devices, so sums are rounded in another order and weights part by
    # about 1e-6. A KL depends on them through sampled keep-sets alone: it is the same, or, where two slots nearly tied, the
    # one of another keep-set. The first step after the restart starts from equal weights.
    assert [record["prompt"] for record in numbers(other)] == [record["prompt"] for record in expected]
    agree = [
        np.allclose(found["kl"], record["kl"], rtol=1e-3, atol=1e-6)
        for found, record in zip(numbers(other), expected, strict=True)
    ]
    assert agree[stopped] and sum(agree) >= STEPS - 3, agree

    # Started once more, as a service may that did not see it end: nothing happens, and it counts as done.
    _, folder, environment = again[same]
    finish(start(folder, environment, "bash", "-c", sky["run"]), folder)
    assert f"This run is finished: {STEPS} steps" in (folder / "log").read_text()
