"""A run's folder: one run at a time holds it, and files in it are replaced whole or not at all."""

import contextlib
import fcntl
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dcache.errors import DcacheError


class WorkdirError(DcacheError):
    """A workdir is held by another run, or cannot be written."""


@contextlib.contextmanager
def lock(workdir: str | os.PathLike[str]) -> Iterator[None]:
    """Holds a workdir for the duration of a `with` block; creates it if needed.

    The operating system releases the lock when the process ends, however it ends. The file `lock` stays: removing it
    would let a third process lock a new file while a second one waits for the old.

    Raises:
      WorkdirError: another process holds it (the message names it), or it cannot be created or locked.
    """
    path = Path(workdir) / "lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open(path, "a+", encoding="utf-8")  # "w" would empty the file of the run that holds it
    except OSError as error:
        raise WorkdirError(
            f"The workdir {str(workdir)!r} cannot be written ({error.strerror}); choose another with --workdir."
        ) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().strip() or "unknown process"
            raise WorkdirError(
                f"The workdir {str(workdir)!r} is held by another run ({holder}); wait until it ends, stop it, or "
                "choose another with --workdir."
            ) from None
        except OSError as error:
            raise WorkdirError(
                f"The workdir {str(workdir)!r} cannot be locked ({error.strerror}); choose one on a file system that "
                "supports locks."
            ) from error
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {platform.node() or 'this machine'}\n")
        handle.flush()
        yield


def atomic_write(path: str | os.PathLike[str], contents: str | bytes) -> None:
    """Writes a file so that at every moment the old or the new contents are there, whole.

    Args:
      path: its folder is created if needed. contents: text (written as UTF-8) or bytes.

    Raises:
      WorkdirError: it cannot be written, for instance because the disk is full; the old contents stay.
    """
    path = Path(path)
    raw = contents.encode("utf-8") if isinstance(contents, str) else contents
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())  # temporary files are private, results are not
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise WorkdirError(
            f"{str(path)!r} cannot be written ({error.strerror}); free disk space or choose another folder."
        ) from error


def _umask() -> int:
    """The process's file creation mask; it can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
