"""A run's metrics: one JSON object per step in `metrics.jsonl`, and the same numbers as a TensorBoard event file."""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcache.errors import TrainingError
from dcache.workdir import atomic_write

FILE = "metrics.jsonl"


def read(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a run, in order. A last line that a killed run left incomplete is skipped; no file, no records."""
    path = Path(workdir) / FILE
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def truncate(workdir: str | os.PathLike[str], step: int) -> None:
    """Drops the records after a step, which a resumed run writes again."""
    path = Path(workdir) / FILE
    if path.is_file():
        kept = [record for record in read(workdir) if record["step"] <= step]
        atomic_write(path, "".join(json.dumps(record) + "\n" for record in kept))


class Writer:
    """Appends the metrics of a run that goes on from `step`; later records that are already there are dropped.

    The event file is written in this thread: `tensorboardX.SummaryWriter` hands events to a thread of its own, and when
    that thread fails on a full disk the run would wait for it for ever.

    Raises (all methods):
      TrainingError: a file cannot be written, for instance because the disk is full.
    """

    def __init__(self, workdir: str | os.PathLike[str], step: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        truncate(workdir, step)
        self._path = Path(workdir) / FILE
        events = Path(workdir) / "tensorboard"
        try:
            events.mkdir(parents=True, exist_ok=True)
            self._lines = open(self._path, "a", buffering=1, encoding="utf-8")
            self._events = EventsWriter(str(events / "events"), filename_suffix=f".{step}")
        except OSError as error:
            raise self._failed(error) from error
        # TensorBoard hides what a run that was killed wrote after this step.
        self._events.write_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, record: Mapping[str, float | str]) -> None:
        """Adds one step's record; numbers go to both files, text to the JSON file alone."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        try:
            self._lines.write(json.dumps({"step": step, **record}) + "\n")
            for name, value in record.items():
                if not isinstance(value, str):
                    self._events.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
            self._events.flush()
        except OSError as error:
            raise self._failed(error) from error

    def keep(self) -> None:
        """Makes the records so far outlive the machine: on a mounted bucket a file is stored when it is closed."""
        try:
            self._lines.close()
            self._lines = open(self._path, "a", buffering=1, encoding="utf-8")
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Closes both files."""
        try:
            with contextlib.closing(self._events), contextlib.closing(self._lines):
                pass
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> TrainingError:
        return TrainingError(
            f"Metrics cannot be written to {str(self._path.parent)!r} ({error.strerror}); free disk space, then go on "
            "from the last checkpoint with --resume."
        )
