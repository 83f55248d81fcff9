"""Training as several processes on one machine, started as SLURM would start them on several."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dcache import checkpoint, metrics

ROOT = Path(__file__).parents[2]
STEPS = 30


@pytest.fixture
def started():
    """A list of processes, of which none is left behind."""
    processes = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def start(started, tmp_path, *arguments, process=None, job=0):
    """The command of one process of two, or of one alone; output goes to a file."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES") and "SLURM" not in k}
    env = kept | {"DCACHE_CACHE": str(tmp_path / f"cache{process}")}
    if process is not None:
        arguments += ("--config.distributed=True", "--config.sharding=data=2")
        env |= {
            "SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(process), "SLURM_LOCALID": "0",
        }  # fmt: skip
    command = [
        sys.executable, str(ROOT / "launch" / "train.py"), "--config=configs/smollm2.py:tiny",
        f"--config.learn.steps={STEPS}", f"--workdir={tmp_path / 'run'}", *arguments,
    ]  # fmt: skip
    with open(tmp_path / f"output{process}", "w") as file:
        started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT))
    return started[-1]


def start_both(started, tmp_path, *arguments):
    job = time.time_ns() // 1_000_000  # the coordinator's port follows from the job's number
    return [start(started, tmp_path, *arguments, process=i, job=job) for i in (0, 1)]


def wait_for_step(processes, tmp_path, step):
    for _ in range(9000):
        if (records := metrics.read(tmp_path / "run")) and records[-1]["step"] >= step:
            return
        if any(process.poll() is not None for process in processes):
            pytest.fail((tmp_path / "output0").read_text()[-3000:] + (tmp_path / "output1").read_text()[-3000:])
        time.sleep(0.1)
    pytest.fail("the run does not get on")


@pytest.mark.slow
def test_two_processes_one_killed_one_stopped_and_one_alone(tmp_path, started):
    """The survivor says what happened; the run goes on from its checkpoint, also on another mesh; one process writes."""
    processes = start_both(started, tmp_path)
    wait_for_step(processes, tmp_path, 3)
    processes[1].kill()
    status = processes[0].wait(timeout=900)
    last = checkpoint.latest_step(tmp_path / "run" / "checkpoints")
    output = (tmp_path / "output0").read_text()
    if status == 1:
        assert "error: Process 0 of 2 has lost another one" in output and f"the checkpoint of step {last}" in output
    else:  # JAX's own service noticed first
        assert status == -signal.SIGABRT and "This most likely indicates that another task died" in output
    assert "Traceback" not in output

    # The records of steps after the checkpoint stay until the resumed run writes its own.
    written = metrics.read(tmp_path / "run")[-1]["step"]
    processes = start_both(started, tmp_path, "--resume")
    wait_for_step(processes, tmp_path, written + 2)
    processes[1].send_signal(signal.SIGTERM)  # to one: both stop
    assert [process.wait(timeout=900) for process in processes] == [os.EX_TEMPFAIL] * 2, (
        tmp_path / "output0"
    ).read_text()
    stopped = checkpoint.latest_step(tmp_path / "run" / "checkpoints")
    assert stopped > last and f"Stopped and saved after step {stopped}" in (tmp_path / "output0").read_text()

    alone = start(started, tmp_path, "--resume")
    assert alone.wait(timeout=900) == 0, (tmp_path / "outputNone").read_text()
    records = metrics.read(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert np.isfinite([record["kl"] for record in records]).all()
    assert checkpoint.load_policy(tmp_path / "run").policy.name == "distillcache"
