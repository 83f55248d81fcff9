import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from dcache import checkpoint, metrics
from dcache.learn.loop import _Stop, _stop_signals

ROOT = Path(__file__).parents[2]
STEPS = 120
TINY = ("--config=configs/smollm2.py:tiny", f"--config.learn.steps={STEPS}")


def start(*arguments, cwd=ROOT, **environment):
    """The command as a user types it, on one CPU device; its output is collected."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | environment
    command = [sys.executable, str(ROOT / "launch" / "train.py"), *arguments]
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_mistakes_on_the_command_line_are_one_line(tmp_path):
    cases = {
        ("--config=configs/smollm2.py:tiny", "--config.learn.stepz=3"): "unknown configuration field 'stepz'",
        ("--config=configs/smollm2.py:huge",): "no variant 'huge'; use one of tiny, demo, sequential, ",
        ("--config=configs/nothing.py",): "the configuration file cannot be read",
        ("--config=configs/smollm2.py:tiny", "--config.model=nothing"): "'nothing' is no known model",
    }
    running = [(start(*arguments, f"--workdir={tmp_path}/{i}"), arguments) for i, arguments in enumerate(cases)]
    for process, arguments in running:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 1, output
        assert cases[arguments] in output.splitlines()[-1] and output.splitlines()[-1].startswith("error: ")
        assert "Traceback" not in output and "Warning" not in output


@pytest.fixture
def interruptible():
    """Ctrl-C acts as usual; the processes of a parallel test run ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_only_the_first_signal_is_a_request():
    with _stop_signals() as stopped:
        assert isinstance(stopped, _Stop) and not stopped.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def wait_for_step(process, workdir, step):
    for _ in range(3000):
        if (records := metrics.read(workdir)) and records[-1]["step"] >= step:
            return
        if process.poll() is not None:
            pytest.fail(process.communicate()[0])
        time.sleep(0.1)
    pytest.fail("the run does not get on")


@pytest.mark.slow
def test_sigterm_and_resume(tmp_path):
    arguments = (f"--config={ROOT}/configs/smollm2.py:tiny", TINY[1], "--workdir=run")
    process = start(*arguments, cwd=tmp_path, DCACHE_CACHE=str(tmp_path / "cache"))
    wait_for_step(process, tmp_path / "run", 3)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == os.EX_TEMPFAIL, output
    step = checkpoint.latest_step(tmp_path / "run" / "checkpoints")
    assert f"Stopped and saved after step {step} of {STEPS}" in output and "--resume" in output
    assert [record["step"] for record in metrics.read(tmp_path / "run")] == list(range(1, step + 1))

    process = start(*arguments, cwd=tmp_path, DCACHE_CACHE=str(tmp_path / "cache"))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1 and "go on with --resume" in output
    process = start(*arguments, "--resume", cwd=tmp_path, DCACHE_CACHE=str(tmp_path / "cache"))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and f"Done: {STEPS} steps" in output, output
    assert "Warning" not in output and "warning" not in output
    process = start(*arguments, "--resume", cwd=tmp_path, DCACHE_CACHE=str(tmp_path / "cache"))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and f"This run is finished: {STEPS} steps" in output


@pytest.mark.slow
def test_kill_at_random_moments(tmp_path):
    """Whenever a run is killed, it goes on, and takes the steps that it would have taken."""
    workdir, seen, chance = tmp_path / "run", {}, random.Random(0)
    for _ in range(4):
        process = start(*TINY, f"--workdir={workdir}", "--resume", DCACHE_CACHE=str(tmp_path / "cache"))
        done = metrics.read(workdir)
        wait_for_step(process, workdir, (done[-1]["step"] if done else 0) + 1)
        time.sleep(chance.random())
        process.kill()
        process.communicate()
        for record in metrics.read(workdir):
            kl = seen.setdefault(record["step"], record["kl"])
            assert kl == record["kl"], "a step that was taken again differs"
        assert checkpoint.latest_step(workdir / "checkpoints") is not None
        checkpoint.load_policy(workdir)
    process = start(*TINY, f"--workdir={workdir}", "--resume", DCACHE_CACHE=str(tmp_path / "cache"))
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    records = metrics.read(workdir)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(records[step - 1]["kl"] == kl for step, kl in seen.items())
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == [str(STEPS - 2), str(STEPS)]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(checkpoint.load_policy(workdir).params))
