import errno
import os
import signal
import subprocess
import sys

import pytest

from dcache import workdir
from dcache.workdir import WorkdirError


def test_lock_names_the_holder_and_is_released(tmp_path):
    with workdir.lock(tmp_path / "new" / "run"):
        with pytest.raises(WorkdirError, match=rf"held by another run \(process {os.getpid()} on .+\)"):
            with workdir.lock(tmp_path / "new" / "run"):
                pass
        # The failed attempt left the holder's name alone.
        assert f"process {os.getpid()} " in (tmp_path / "new" / "run" / "lock").read_text()
    with workdir.lock(tmp_path / "new" / "run"):
        pass


def test_a_killed_process_releases_its_lock(tmp_path):
    code = "import sys, time; from dcache.workdir import lock\n"
    code += "with lock(sys.argv[1]): print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(WorkdirError, match=f"process {process.pid} "):
            with workdir.lock(tmp_path):
                pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with workdir.lock(tmp_path):
        assert f"process {os.getpid()} " in (tmp_path / "lock").read_text()


def test_workdir_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkdirError, match="cannot be written"):
        with workdir.lock(tmp_path / "file"):
            pass


def test_atomic_write_replaces_whole_files(tmp_path):
    path = tmp_path / "a" / "b.json"
    workdir.atomic_write(path, "old ä")
    workdir.atomic_write(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]


def test_full_disk_leaves_the_old_contents(tmp_path, monkeypatch):
    path = tmp_path / "file"
    workdir.atomic_write(path, "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WorkdirError, match="No space left on device.*free disk space"):
        workdir.atomic_write(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
