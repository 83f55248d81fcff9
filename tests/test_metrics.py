import json
import struct

import pytest
from tensorboardX.proto.event_pb2 import Event

from dcache import metrics
from dcache.errors import TrainingError


def events_of(folder):
    """Events of all files, by the framing of a TensorFlow record file: length, checksum, bytes, checksum."""
    events = []
    for path in sorted(folder.iterdir()):
        raw = path.read_bytes()
        while raw:
            (length,) = struct.unpack("<Q", raw[:8])
            events.append(Event.FromString(raw[12 : 12 + length]))
            raw = raw[16 + length :]
    return events


def test_numbers_go_to_both_files_and_text_to_one(tmp_path):
    writer = metrics.Writer(tmp_path, 0)
    writer.write(1, {"reward": -0.5, "kind": "text"})
    writer.write(2, {"reward": -0.25, "kind": "retrieval"})
    # Both are on disk before the writer is closed: a killed run keeps them.
    assert metrics.read(tmp_path) == [
        {"step": 1, "reward": -0.5, "kind": "text"},
        {"step": 2, "reward": -0.25, "kind": "retrieval"},
    ]
    values = [(e.step, v.tag, v.simple_value) for e in events_of(tmp_path / "tensorboard") for v in e.summary.value]
    assert values == [(1, "reward", -0.5), (2, "reward", -0.25)]
    writer.close()


def test_a_resumed_run_drops_later_records(tmp_path):
    writer = metrics.Writer(tmp_path, 0)
    for step in (1, 2, 3):
        writer.write(step, {"kl": float(step)})
    writer.close()
    with open(tmp_path / metrics.FILE, "a") as file:
        file.write('{"step": 4, "kl"')  # killed while writing
    assert [record["step"] for record in metrics.read(tmp_path)] == [1, 2, 3]

    writer = metrics.Writer(tmp_path, 2)
    writer.write(3, {"kl": 30.0})
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / metrics.FILE).read_text().splitlines()]
    assert lines == [{"step": 1, "kl": 1.0}, {"step": 2, "kl": 2.0}, {"step": 3, "kl": 30.0}]
    starts = [e.step for e in events_of(tmp_path / "tensorboard") if e.HasField("session_log")]
    assert starts == [1, 3]  # TensorBoard hides the older step 3


def test_records_are_kept_when_the_file_is_closed(tmp_path):
    """A mounted bucket stores a file when it is closed: so does `keep`, and the run goes on writing."""
    writer = metrics.Writer(tmp_path, 0)
    writer.write(1, {"kl": 1.0})
    first = writer._lines
    writer.keep()
    assert first.closed and [record["step"] for record in metrics.read(tmp_path)] == [1]
    writer.write(2, {"kl": 2.0})
    writer.close()
    assert [record["step"] for record in metrics.read(tmp_path)] == [1, 2]


def test_no_file_no_records(tmp_path):
    assert metrics.read(tmp_path) == []


def test_full_disk(tmp_path):
    writer = metrics.Writer(tmp_path, 0)
    writer._lines.close()
    writer._lines = open("/dev/full", "a", buffering=1)
    with pytest.raises(TrainingError, match="No space left on device.*--resume"):
        writer.write(1, {"kl": 1.0})
    with pytest.raises(TrainingError, match="No space left on device"):
        writer.close()


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(TrainingError, match="cannot be written"):
        metrics.Writer(tmp_path, 0)
