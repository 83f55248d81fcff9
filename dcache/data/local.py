"""Data of the harness's own tasks from a local folder, in the columns and splits that its task files expect."""

import functools
import json
import pathlib
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dcache.data.benchmarks import read_jsonl
from dcache.errors import LoadError

if TYPE_CHECKING:
    import datasets

Rows = list[dict[str, Any]]


def local_dataset(path: str, name: str | None, data_dir: str | pathlib.Path) -> "datasets.DatasetDict | None":
    """The dataset that the hub has under `path` and `name`, from files of `data_dir`; None for one that is not known.

    Known: "openai/gsm8k", "SaylorTwift/bbh", and BoolQ as "aps/super_glue" or "google/boolq". The one file of BoolQ is
    its validation split.

    Raises:
      LoadError: a file is missing or malformed.
    """
    reader = _READERS.get((path, name)) or _READERS.get((path, None))
    if reader is None:
        return None
    import datasets

    splits = reader(pathlib.Path(data_dir), name or "")
    return datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in splits.items()})


def localise(task: Mapping[str, Any], data_dir: str | pathlib.Path) -> dict[str, Any]:
    """What to override in a harness task's configuration so that its data comes from `data_dir`.

    Args:
      task: the configuration (`TaskManager.task_index[name].cfg`). One with a `custom_dataset` needs nothing: {}.

    Returns:
      `custom_dataset`, and None for splits that the local data does not have.

    Raises:
      LoadError: the dataset is not known, or its file is missing or malformed.
    """
    if task.get("custom_dataset"):
        return {}
    path, name = str(task.get("dataset_path")), task.get("dataset_name")
    found = local_dataset(path, name, data_dir)
    if found is None:
        raise LoadError(
            f"The task {task.get('task')!r} needs the dataset {path!r}{f' ({name})' if name else ''}, which has no place in "
            f"a data folder; run without data_dir where the hub can be reached. Known: {_KNOWN}."
        )
    missing = [
        key for key in ("training_split", "validation_split", "test_split") if task.get(key) not in (None, *found)
    ]
    return {"custom_dataset": functools.partial(_given, found), **dict.fromkeys(missing)}


def _given(found: "datasets.DatasetDict", **_: Any) -> "datasets.DatasetDict":
    """The harness calls it with the task's metadata, which does not matter here."""
    return found


def _gsm8k(folder: pathlib.Path, _: str) -> dict[str, Rows]:
    fields = {"question": str, "answer": str}
    return {split: _rows(folder / "gsm8k" / f"{split}.jsonl", fields) for split in ("train", "test")}


def _bbh(folder: pathlib.Path, subtask: str) -> dict[str, Rows]:
    path = _existing(folder / "bbh" / "bbh" / f"{subtask}.json")
    try:
        examples = json.loads(path.read_text(encoding="utf-8"))["examples"]
        rows = [{"input": example["input"], "target": example["target"]} for example in examples]
    except (ValueError, KeyError, TypeError) as error:
        raise LoadError(
            f"{path} is not in BIG-Bench Hard's format ({error!r}); expected an object with examples, each of input and "
            "target. Take the file from the benchmark again."
        ) from error
    for i, row in enumerate(rows):
        if not all(isinstance(value, str) for value in row.values()):
            raise LoadError(f"{path}, example {i + 1}: input and target must be text; take the file again.")
    return {"test": rows}


def _boolq(folder: pathlib.Path, _: str) -> dict[str, Rows]:
    """Both the column of SuperGLUE (label, 0 or 1) and that of BoolQ itself (answer), in an order without meaning.

    A file may be sorted by its answers, and its first items would then be of one class.
    """
    found = _rows(folder / "boolq" / "boolq.jsonl", {"question": str, "passage": str, "answer": bool})
    found.sort(key=lambda row: zlib.crc32(row["question"].encode()))
    columns = ("question", "passage", "answer")
    rows = [{key: row[key] for key in columns} | {"idx": i, "label": int(row["answer"])} for i, row in enumerate(found)]
    return {"validation": rows}


def _rows(path: pathlib.Path, fields: Mapping[str, type]) -> Rows:
    return read_jsonl(_existing(path), fields)


def _existing(path: pathlib.Path) -> pathlib.Path:
    if not path.is_file():
        raise LoadError(f"There is no file {path}; put the benchmark's file there, or run without data_dir (hub).")
    return path


_READERS: Mapping[tuple[str, str | None], Callable[[pathlib.Path, str], dict[str, Rows]]] = {
    ("openai/gsm8k", "main"): _gsm8k,
    ("SaylorTwift/bbh", None): _bbh,
    ("aps/super_glue", "boolq"): _boolq,
    ("google/boolq", None): _boolq,
}
_KNOWN = ", ".join(f"{path} {name}" if name else path for path, name in _READERS)
