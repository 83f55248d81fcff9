"""The job files: their commands against the real flags, their fields, and (where installed) their own tools."""

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
TOOLS = os.environ.get("DCACHE_JOBS_PYTHON")
with_tools = pytest.mark.skipif(
    not TOOLS, reason="DCACHE_JOBS_PYTHON does not name a Python interpreter with tests/launch/jobs-requirements.txt"
)
STOPPED = [os.EX_TEMPFAIL, 128 + 15]  # saved, or stopped before it began
PARSE = """
import sys
sys.path.insert(0, "launch")
import common, train
from absl import flags
from dcache.experiment import from_config
assert common._parse(["train.py", *sys.argv[1:]]) == ["train.py"]
experiment = from_config(flags.FLAGS.config)
print(experiment.name, experiment.seed, common.default_workdir(experiment), flags.FLAGS.workdir, flags.FLAGS.resume)
"""


@pytest.fixture(scope="module")
def sky():
    return yaml.safe_load((LAUNCH / "sky.yaml").read_text())


@pytest.fixture(scope="module")
def jobset():
    return yaml.safe_load((LAUNCH / "jobset.yaml").read_text())


def gcloud_lines():
    return [line for line in (ROOT / "docs" / "jobs.md").read_text().splitlines() if line.startswith("gcloud ")]


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def said(folder, script, *arguments, status=0, **environment):
    """The words that a script passes to .venv/bin/python in a folder; that and the cluster's commands are stand-ins."""
    executable(folder / ".venv" / "bin" / "python", f'printf "%s\\n" "$@" > "{folder}/said"; exit {status}')
    executable(folder / "bin" / "srun", 'while [[ "$1" == --* ]]; do shift; done; "$@"')
    executable(folder / "bin" / "scontrol", f'echo "$@" >> "{folder}/scontrol"')
    environment = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(folder), **environment}
    done = subprocess.run(["bash", *script, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    return (folder / "said").read_text().splitlines(), done.returncode


def test_every_command_fits_the_flags(tmp_path, sky, jobset):
    """Each file's command, as the shell expands it, is parsed by launch/train.py; a renamed flag or field fails here."""
    environment = {key: value or "" for key, value in sky["envs"].items()} | {
        "ARGS": "--config.seed=1 --config.dtype=float32"
    }
    container = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    last = shlex.split(gcloud_lines()[-1])
    (remote,) = [word.partition("=")[2] for word in last if word.startswith("--command=")]
    (tmp_path / "gcloud" / "dcache").mkdir(parents=True)
    remote = remote.replace("cd dcache", f"cd {tmp_path}/gcloud").replace("nohup ", "").removesuffix("&")
    expected = {
        "sky": (said(tmp_path / "sky", ["-c", sky["run"]], **environment)[0],
                "mistral7b 1 runs/mistral7b-seed1 /bucket/mistral7b True"),
        "jobset": ([*container["command"][1:], *container["args"]], "mistral7b 0 runs/mistral7b /bucket/mistral7b True"),
        "slurm": (said(tmp_path / "slurm", [LAUNCH / "slurm.sh"], "--config=configs/mistral7b.py", "--config.seed=2")[0],
                  "mistral7b 2 runs/mistral7b-seed2 None True"),
        "gcloud": (said(tmp_path / "gcloud", ["-c", remote])[0],
                   f"mistral7b 0 runs/mistral7b {tmp_path}/gcloud/bucket/mistral7b True"),
    }  # fmt: skip
    running = {}
    for name, (words, _) in expected.items():
        assert words[0] == "launch/train.py"
        running[name] = subprocess.Popen(
            [sys.executable, "-c", PARSE, *words[1:]], cwd=ROOT, stdout=-1, stderr=-2, text=True
        )
    for name, process in running.items():
        output, _ = process.communicate(timeout=300)
        assert output.strip() == expected[name][1], name


@pytest.mark.parametrize("status", [0, 1, *STOPPED])
def test_slurm_queues_a_stopped_run_again(tmp_path, status):
    words, code = said(
        tmp_path,
        [LAUNCH / "slurm.sh"],
        "--config=configs/smollm2.py",
        "--workdir=a b",
        status=status,
        SLURM_JOB_ID="17",
    )
    assert words == ["launch/train.py", "--config=configs/smollm2.py", "--workdir=a b", "--resume"] and code == status
    asked = tmp_path / "scontrol"
    assert (asked.read_text() if asked.exists() else None) == ("requeue 17\n" if status in STOPPED else None)


def test_slurm_waits_for_the_run_when_it_is_signalled_too(tmp_path):
    """A preempted job's shell may get the signal as well; it must not leave before the run has saved."""
    begun = tmp_path / "begun"
    executable(
        tmp_path / ".venv" / "bin" / "python", f'trap "exit 75" TERM; touch "{begun}"; while true; do sleep 0.1; done'
    )
    executable(tmp_path / "bin" / "srun", 'shift; exec "$@"')
    executable(tmp_path / "bin" / "scontrol", f'echo "$@" > "{tmp_path}/scontrol"')
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    job = subprocess.Popen(["bash", LAUNCH / "slurm.sh"], cwd=tmp_path, env=environment, start_new_session=True)
    deadline = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(timeout=0.5)
    os.killpg(job.pid, signal.SIGTERM)
    assert job.wait(timeout=60) == os.EX_TEMPFAIL
    assert (tmp_path / "scontrol").read_text() == "requeue 17\n"


def test_slurm_options():
    """By the manual page of sbatch: a warning signal to the steps before the time limit, and an appended log."""
    lines = (LAUNCH / "slurm.sh").read_text().splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert all(re.fullmatch(r"--[a-z-]+(=\S+)?", option) for option in options)
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])  # Slurm reads none after the first command
    found = dict(option.removeprefix("--").partition("=")[::2] for option in options)
    assert found.keys() == {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "mem", "time",
                            "signal", "requeue", "open-mode", "output"}  # fmt: skip
    assert re.fullmatch(r"TERM@\d+", found["signal"])  # without B: the steps get it, not this script
    assert found["open-mode"] == "append" and found["nodes"] == found["ntasks-per-node"] == "1"
    assert os.access(LAUNCH / "slurm.sh", os.X_OK)
    subprocess.run(["bash", "-n", LAUNCH / "slurm.sh"], check=True)


def test_sky_fields(sky):
    """By SkyPilot's task reference: spot machines, a mounted bucket, and a stopped run that is started again."""
    resources = sky["resources"]
    assert resources["use_spot"] and resources["job_recovery"]["recover_on_exit_codes"] == STOPPED
    names = [option["accelerators"] for option in resources["any_of"]]
    assert any(name.startswith("tpu-") for name in names) and any(not name.startswith("tpu-") for name in names)
    for option in resources["any_of"]:  # SkyPilot's default for v5e is the image of another generation
        assert ("accelerator_args" in option) == option["accelerators"].startswith("tpu-")
    (path,) = sky["file_mounts"]
    assert sky["file_mounts"][path]["mode"] == "MOUNT" and sky["envs"]["WORKDIR"].startswith(f"{path}/")
    assert sky["envs"]["BUCKET"] is None  # must be given
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n", "-c", sky[part]], check=True)


def test_jobset_fields(jobset):
    """By JobSet's API reference (v1alpha2) and the Job's: which endings start the run again, and what they count for."""
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    policy = jobset["spec"]["failurePolicy"]
    assert [rule["action"] for rule in policy["rules"]] == ["RestartJobSetAndIgnoreMaxRestarts"]
    assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"] and policy["maxRestarts"] == 1
    (slice_,) = jobset["spec"]["replicatedJobs"]
    job = slice_["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 1 and job["backoffLimit"] == 0
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    on_exit, on_condition = job["podFailurePolicy"]["rules"]
    assert on_exit["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": STOPPED}
    assert on_condition["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert on_exit["action"] == on_condition["action"] == "FailJob"
    assert pod["restartPolicy"] == "Never"  # a Job with a podFailurePolicy must have it
    chips = [int(n) for n in pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")]
    assert container["resources"]["limits"]["google.com/tpu"] == chips[0] * chips[1]
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"] and f"--workdir={mount['mountPath']}/mistral7b" in container["args"]
    assert "rename-dir-limit" in volume["csi"]["volumeAttributes"]["mountOptions"]
    assert job["template"]["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
    assert container["command"][0] == ".venv/bin/python"


def test_the_image_gets_what_is_here(jobset):
    lines = (LAUNCH / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert {"dcache", "configs", "launch", "policies", "requirements.txt"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)


@with_tools
@pytest.mark.parametrize("kind", ["sky", "jobset"])
def test_the_tools_take_their_files(tmp_path, kind):
    path = LAUNCH / f"{kind}.yaml"
    spoilt = tmp_path / "spoilt.yaml"
    before, after = {"sky": ("use_spot", "use_spots"), "jobset": ("maxRestarts", "maxRestart")}[kind]
    spoilt.write_text(path.read_text().replace(before, after))
    # SkyPilot writes to the home folder.
    environment = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    for file, good in ((path, True), (spoilt, False)):
        command = [TOOLS, Path(__file__).with_name("check_jobs.py"), kind, file]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert (done.returncode == 0) == good, done.stderr[-3000:]


@with_tools
def test_shellcheck(tmp_path, sky):
    (tmp_path / "setup.sh").write_text(sky["setup"])
    (tmp_path / "run.sh").write_text(sky["run"])
    files = [LAUNCH / "slurm.sh", tmp_path / "setup.sh", tmp_path / "run.sh"]
    done = subprocess.run([Path(TOOLS).with_name("shellcheck"), "--shell=bash", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not shutil.which("gcloud"), reason="gcloud is not installed")
@pytest.mark.parametrize("line", gcloud_lines(), ids=lambda line: " ".join(line.split()[4:7]))
def test_gcloud_takes_its_lines(tmp_path, line):
    """Its own linter parses a command without running it; no account is needed."""
    command = ["gcloud", "meta", "lint-gcloud-commands", f"--command-string={line}"]
    done = subprocess.run(
        command, env=os.environ | {"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=300
    )
    (found,) = json.loads(done.stdout)
    assert found["success"] and found["error_message"] is None, found["error_message"]
