"""The numbers of a benchmark table: what each needs of an example, and how it is averaged."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from dcache.evaluate import answers, runs
from dcache.evaluate.answers import FULL
from dcache.evaluate.runs import Measured, Record, Row, Run


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A number about one arm.

    Attributes:
      heading: with the unit. scale: to that unit. row: (method, budget) -> what is needed of an example.
      function: of the means. pooled: every prompt (or token) counts the same, not every task.
    """

    heading: str
    row: Callable[[str, str], Row]
    function: Callable[..., Any] = lambda mean: mean
    scale: float = 1.0
    digits: int = 1
    pooled: bool = False


def over(a: Any, b: Any) -> Any:
    """a / b, infinite where b is 0."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.divide(a, b, out=np.full(a.shape, np.inf), where=b != 0)


def _fields(arms: Sequence[tuple[str, str]], *names: str) -> Row:
    """The fields of the arms, arm by arm; None if one is missing."""

    def row(record: Record) -> Sequence[float] | None:
        values = [record["arms"][method][budget].get(name) for method, budget in arms for name in names]
        return None if None in values else [float(value) for value in values]

    return row


def _losses(method: str, budget: str) -> Row:
    """Summed negative log-likelihoods of the arm and of the full cache, and the number of tokens."""
    fields = _fields([(method, budget), FULL], "nll")

    def row(record: Record) -> Sequence[float] | None:
        losses, tokens = fields(record), record["arms"][method][budget].get("tokens")
        return [loss * tokens for loss in losses] + [float(tokens)] if losses and tokens else None

    return row


def _mode(wanted: str) -> Callable[[str, str], Row]:
    def rows(method: str, budget: str) -> Row:
        def row(record: Record) -> Sequence[float] | None:
            found = answers.mode(record, method, budget)
            return None if found is None else [float(found == wanted)]

        return row

    return rows


def _exp(x: Any) -> Any:
    return np.exp(np.minimum(x, 700.0))  # e^709 is the largest float


QUANTITIES = {
    "score": Quantity("score %", lambda m, b: _fields([(m, b)], "score"), scale=100.0),
    "kl": Quantity("KL (nats)", lambda m, b: _fields([(m, b)], "kl"), digits=4),
    "top1": Quantity("top-1 agreement %", lambda m, b: _fields([(m, b)], "top1"), scale=100.0),
    "kept": Quantity("kept %", lambda m, b: _fields([(m, b)], "kept"), scale=100.0, pooled=True),
    "perplexity": Quantity("perplexity", _losses, lambda ours, full, n: _exp(over(ours, n)), digits=2, pooled=True),
    "perplexity rise": Quantity(
        "rise of the perplexity", _losses, lambda ours, full, n: _exp(over(ours, n)) - _exp(over(full, n)), digits=2,
        pooled=True,
    ),
    **{mode: Quantity(f"{mode} %", _mode(mode), scale=100.0, pooled=True) for mode in answers.MODES},
    "length ratio": Quantity(
        "length of the answers over the full cache's", lambda m, b: lambda record: answers.lengths(record, m, b), over,
        digits=2, pooled=True,
    ),
    "retention": Quantity("of the full cache's score %", lambda m, b: _fields([(m, b), FULL], "score"), over, scale=100.0),
}  # fmt: skip
"""Perplexities weigh every token the same: the exponential of all losses over all tokens. A rise is in perplexity, as in the
paper's Figure 1, not relative. Error modes are shares of the items that the full cache gets right."""


def measured(
    found: Sequence[Run], quantity: str, method: str, budget: str, tasks: Iterable[str], bin: str = ""
) -> Measured | None:
    """A quantity of an arm over the prompts of some tasks, in the runs that hold the arm; None if no prompt has it.

    Args:
      quantity: a key of `QUANTITIES`. tasks: names or patterns. bin: only prompts of this length (`answers.length_bin`).
    """
    q = QUANTITIES[quantity]
    return runs.measure(
        runs.having(found, method, budget), tasks, q.row(method, budget), q.function, pooled=q.pooled,
        keep=lambda record: not bin or answers.length_bin(record) == bin,
    )  # fmt: skip


def difference(
    found: Sequence[Run], field: str, ours: tuple[str, str], theirs: tuple[str, str], tasks: Iterable[str]
) -> Measured | None:
    """Mean of a field of one arm minus that of another, paired by prompt, in the runs that hold both."""
    both = [run for run in found if {ours, theirs} <= set(run.arms)]
    return runs.measure(both, tasks, _fields([ours, theirs], field), lambda a, b: a - b)
