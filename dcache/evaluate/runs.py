"""Benchmark results of one model, read from one or several folders, and numbers over their prompts and seeds.

A folder holds a `results.jsonl`: a header (model, settings, tasks, arms), then one line per example with the answers, scores
and fidelity of all arms. Seeds are runs of their own: what two folders hold of the same prompts is averaged prompt by prompt.
"""

import dataclasses
import fnmatch
import pathlib
import statistics as plain
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dcache.errors import CheckpointError, ConfigError, LoadError
from dcache.evaluate import records as record_lib
from dcache.evaluate import statistics
from dcache.evaluate.answers import FULL
from dcache.evaluate.chance import chance
from dcache.evaluate.statistics import Estimate

Record = dict[str, Any]
FILE = "results.jsonl"

Row = Callable[[Record], Sequence[float] | None]
"""What a number needs of an example: one value per series, or None where it has none."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One results file. label: its folder, as it was given. skipped: examples that no arm could answer, not in `records`."""

    label: str
    header: Record
    records: list[Record]
    skipped: int = 0

    @property
    def arms(self) -> list[tuple[str, str]]:
        """(method, budget) of every arm."""
        return [(arm["method"], arm["budget"]) for arm in self.header["arms"]]


@dataclasses.dataclass(frozen=True)
class Measured:
    """A number with its interval over the prompts, and what it is made of.

    Attributes:
      estimate: on all prompts; each prompt's value is the mean over the runs. seeds: (run, its own number) of every run.
      tasks: names of the tasks that have prompts. guessing: what guessing scores, averaged as the number is.
    """

    estimate: Estimate
    seeds: tuple[tuple[str, float], ...]
    tasks: tuple[str, ...]
    guessing: float

    @property
    def spread(self) -> float | None:
        """Standard deviation between the runs; None for one run."""
        values = [value for _, value in self.seeds]
        return plain.stdev(values) if len(values) > 1 else None


def find(place: pathlib.Path) -> list[pathlib.Path]:
    """Folders with results: `place` itself, else the folders in it; none if there is nothing yet."""
    if (place / FILE).is_file():
        return [place]
    return sorted(path.parent for path in place.glob(f"*/{FILE}"))


def read(folder: pathlib.Path) -> Run:
    """One folder's results.

    Raises:
      LoadError: the folder holds none.
      CheckpointError: a line is damaged or not in the format; the message names it.
    """
    path = folder / FILE
    if not path.is_file():
        raise LoadError(f"{folder} holds no {FILE}; give the folder of a finished or interrupted benchmark run.")
    found = record_lib.read(path)
    if found is None:
        raise CheckpointError(f"{path} is empty; run the benchmark again.")
    for number, record in enumerate(found[1], 2):
        problem = _problem(found[0], record)
        if problem:
            raise CheckpointError(f"{path}, line {number}: {problem}; delete the line and run the benchmark again.")
    return make(str(folder), *found)


def make(label: str, header: Record, records: Sequence[Record]) -> Run:
    """A run from the header and all lines of a results file."""
    answered = [record for record in records if record["arms"]]
    return Run(label, header, answered, len(records) - len(answered))


def _problem(header: Record, record: Record) -> str | None:
    """What is wrong with an example, or None."""
    if not isinstance(record.get("task"), str) or not isinstance(record.get("length"), int):
        return "an example needs 'task' (text) and 'length' (a whole number)"
    arms = record.get("arms")
    if not isinstance(arms, dict):
        return "an example needs 'arms' (method, then budget)"
    if "skipped" in record:
        return None
    for method, budget in {FULL, *((arm["method"], arm["budget"]) for arm in header["arms"])}:
        cell = arms.get(method, {}).get(budget)
        if not isinstance(cell, dict):
            return f"the result of {method} at {budget} is missing"
        for field in ("score", "kl", "top1", "nll", "answer_tokens", "tokens", "seconds"):
            if not isinstance(cell.get(field), (int, float, type(None))):
                return f"{field} of {method} at {budget} is {cell[field]!r}, not a number"
    return None


def check(runs: Sequence[Run]) -> None:
    """That runs can be shown side by side: one model, and the same settings, but for the seed, where they share a task.

    Raises:
      ConfigError: they cannot.
    """
    for i, run in enumerate(runs):
        for other in runs[:i]:
            if run.header.get("model") != other.header.get("model"):
                raise ConfigError(
                    f"{other.label} is of the model {other.header.get('model')!r}, {run.label} of {run.header.get('model')!r}; "
                    "make a report for each."
                )
            shared = {r["task"] for r in run.records} & {r["task"] for r in other.records}
            ours, theirs = run.header.get("settings", {}), other.header.get("settings", {})
            differ = [name for name in {*ours, *theirs} - {"seed"} if ours.get(name) != theirs.get(name)]
            if shared and differ:
                raise ConfigError(
                    f"{other.label} and {run.label} hold the same tasks under different settings "
                    f"({', '.join(sorted(differ))}); give only one of them."
                )


def matches(task: str, patterns: Iterable[str]) -> bool:
    """Whether a task is one of `patterns` (names, or patterns with *)."""
    return any(fnmatch.fnmatchcase(task, pattern) for pattern in patterns)


def stratum(task: str) -> str:
    """What a task counts as in an average: itself, but the subtasks of BBH together as one, as its score is reported."""
    return "bbh" if task.startswith("bbh_") else task


def having(runs: Sequence[Run], method: str, budget: str) -> list[Run]:
    """The runs that hold an arm."""
    return [run for run in runs if (method, budget) in run.arms]


def prompt_key(record: Record) -> tuple[str, int | None]:
    """What tells an example from all others of one model: runs of RULER at other lengths number theirs from 0, too."""
    return record["name"], record.get("doc_length")


def measure(
    runs: Sequence[Run], tasks: Iterable[str], row: Row, function: Callable[..., Any] = lambda mean: mean, *,
    pooled: bool = False, keep: Callable[[Record], bool] = lambda record: True,
) -> Measured | None:  # fmt: skip
    """A number over the prompts of some tasks, every task counting the same; None if no prompt has it.

    Args:
      tasks: names or patterns. row: the values of an example. function: of the mean of each value; see
      `statistics.combined`. pooled: every prompt counts the same, whatever its task. keep: which examples count.
    """
    tasks = tuple(tasks)
    tables: dict[str, dict[str, dict[tuple, Sequence[float]]]] = {}  # stratum -> run -> prompt -> values
    task_of: dict[tuple, str] = {}
    for run in runs:
        for record in run.records:
            values = row(record) if matches(record["task"], tasks) and keep(record) else None
            if values is not None:
                # Pooled, too, task by task at first: two folders may hold different tasks.
                group = record["task"] if pooled else stratum(record["task"])
                tables.setdefault(group, {}).setdefault(run.label, {})[prompt_key(record)] = values
                task_of[prompt_key(record)] = record["task"]
    if not tables:
        return None
    groups: list[list[Sequence[float]]] = []
    guessing: list[list[float]] = []
    for by_run in tables.values():
        names = [name for name in next(iter(by_run.values())) if all(name in found for found in by_run.values())]
        if not names:
            raise ConfigError(
                f"{' and '.join(by_run)} share no prompt of {', '.join(tasks)}; runs of several seeds need the same prompts."
            )
        groups.append([_means([found[name] for found in by_run.values()]) for name in names])
        guessing.append([chance(task_of[name]) for name in names])
    seeds = []
    for run in runs:
        if all(run.label in by_run for by_run in tables.values()):
            own = [list(by_run[run.label].values()) for by_run in tables.values()]
            means = [_means(rows) for rows in (_joined(own) if pooled else own)]
            seeds.append((run.label, float(function(*_means(means)))))
    if pooled:
        groups, guessing = _joined(groups), _joined(guessing)
    return Measured(
        statistics.combined(function, [list(zip(*rows, strict=True)) for rows in groups]), tuple(seeds),
        tuple(sorted(set(task_of.values()))), sum(sum(g) / len(g) for g in guessing) / len(guessing),
    )  # fmt: skip


def _joined(groups: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """All groups as one."""
    return [[row for group in groups for row in group]]


def _means(rows: Iterable[Sequence[float]]) -> list[float]:
    """Column means."""
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]
