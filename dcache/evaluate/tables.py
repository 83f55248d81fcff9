"""From records to numbers with intervals, and to tables."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from dcache.evaluate import statistics
from dcache.evaluate.statistics import Estimate

KINDS = {"retrieval": "Retrieval prompts", "text": "Plain text"}
"""Kinds of prompts and their headings."""

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One policy under one budget on one kind of prompts.

    Attributes:
      kept: mean share of the prompt that really stayed. kl: nats per token. perplexity_rise: relative, exp of the mean
        rise of the negative log-likelihood, minus 1; every prompt counts the same. top1, accuracy: shares.
        A quantity that no prompt has is None.
    """

    kind: str
    method: str
    budget: str
    kept: float
    kl: Estimate | None
    perplexity_rise: Estimate | None
    top1: Estimate | None
    accuracy: Estimate | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A trained policy against the best heuristic, the one of lowest mean KL on the same prompts.

    Attributes:
      kl_ratio: mean KL over the heuristic's. kl_difference, accuracy_difference: paired, policy minus heuristic.
      decided: whether the interval of the KL's difference excludes zero; if not, the prompts are too few to tell.
    """

    kind: str
    method: str
    budget: str
    heuristic: str
    kl_ratio: Estimate
    kl_difference: Estimate
    accuracy_difference: Estimate | None
    decided: bool


def columns(header: Record) -> list[tuple[str, str, bool]]:
    """(method, budget, whether it is trained) of every arm, in the order of evaluation."""
    return [(arm["method"], arm["budget"], arm["weights"] is not None) for arm in header["arms"]]


def paired(records: Sequence[Record], kind: str, field: str, *arms: tuple[str, str]) -> list[list[float]]:
    """The values of a field for (method, budget) arms, on the prompts of a kind that have it for all of them."""
    rows = [[r["arms"][method][budget].get(field) for method, budget in arms] for r in records if r["kind"] == kind]
    complete = [row for row in rows if None not in row]
    return [[float(row[i]) for row in complete] for i in range(len(arms))]


def cells(header: Record, records: Sequence[Record]) -> list[Cell]:
    """All cells: kind by kind, arm by arm."""
    table = []
    full = header["arms"][0]["method"], header["arms"][0]["budget"]
    for kind in (k for k in KINDS if any(r["kind"] == k for r in records)):
        for method, budget, _ in columns(header):
            arm = (method, budget)

            def mean(field, kind=kind, arm=arm) -> Estimate | None:
                (values,) = paired(records, kind, field, arm)
                return statistics.mean(values) if values else None

            nll, nll_full = paired(records, kind, "nll", arm, full)
            (kept,) = paired(records, kind, "kept", arm)
            table.append(
                Cell(
                    kind=kind,
                    method=method,
                    budget=budget,
                    kept=sum(kept) / len(kept),
                    kl=mean("kl"),
                    perplexity_rise=statistics.difference(nll, nll_full).map(_expm1) if nll else None,
                    top1=mean("top1"),
                    accuracy=mean("correct"),
                )
            )
    return table


def _expm1(x: float) -> float:
    return math.expm1(x) if x < 700 else math.inf  # e^709 is the largest float


def comparisons(header: Record, records: Sequence[Record]) -> list[Comparison]:
    """Every trained policy against the best heuristic of the same budget; none where there are no heuristics."""
    arms = columns(header)[1:]
    found = []
    for kind in (k for k in KINDS if any(r["kind"] == k for r in records)):
        for method, budget, _ in (arm for arm in arms if arm[2]):
            heuristics = [name for name, other, trained in arms if other == budget and not trained]
            best = best_heuristic(records, kind, budget, heuristics)
            if best is None:
                continue
            ours, theirs = paired(records, kind, "kl", (method, budget), (best, budget))
            right, theirs_right = paired(records, kind, "correct", (method, budget), (best, budget))
            difference = statistics.difference(ours, theirs)
            found.append(
                Comparison(
                    kind=kind,
                    method=method,
                    budget=budget,
                    heuristic=best,
                    kl_ratio=statistics.ratio(ours, theirs),
                    kl_difference=difference,
                    accuracy_difference=statistics.difference(right, theirs_right) if right else None,
                    decided=difference.excludes(0.0),
                )
            )
    return found


def best_heuristic(records: Sequence[Record], kind: str, budget: str, names: Sequence[str]) -> str | None:
    """The heuristic of lowest mean KL on the prompts of a kind, or None if no prompt has one.

    The oracle knows the text to come: it is a ceiling, not a heuristic that one could use.
    """
    names = [name for name in names if "oracle" not in re.findall(r"\w+", name)]
    values = paired(records, kind, "kl", *((name, budget) for name in names)) if names else []
    means = {name: sum(v) / len(v) for name, v in zip(names, values, strict=True) if v}
    return min(means, key=lambda name: means[name]) if means else None


# ---------------------------------------------------------------------------------------------------------------------
# Text


def number(estimate: Estimate | None, digits: int = 3, scale: float = 1.0) -> str:
    """The number and its interval, as in "0.123 [0.100, 0.150]", "0.123" where one prompt gives none, or "n/a"."""
    if estimate is None:
        return "n/a"

    def text(x: float) -> str:
        if not math.isfinite(x):
            return "-∞" if x < 0 else "∞"
        rounded = f"{x * scale:.{digits}f}"
        return rounded.lstrip("-") if not rounded.strip("-0.") else rounded  # no "-0.000"

    if not estimate.bounded:
        return text(estimate.value)
    return f"{text(estimate.value)} [{text(estimate.low)}, {text(estimate.high)}]"


def percent(estimate: Estimate | None) -> str:
    """A share as "12.3 [10.0, 15.0]", in percent."""
    return number(estimate, 1, 100.0)


_COLUMNS: tuple[tuple[str, Callable[[Cell], str]], ...] = (
    ("policy", lambda c: c.method),
    ("budget", lambda c: c.budget),
    ("KL (nats)", lambda c: number(c.kl, 4)),
    ("perplexity rise %", lambda c: percent(c.perplexity_rise)),
    ("top-1 %", lambda c: percent(c.top1)),
    ("accuracy %", lambda c: percent(c.accuracy)),
    ("n", lambda c: str(c.kl.n if c.kl else 0)),
)


def rows(table: Sequence[Cell], kind: str) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table of one kind of prompts; a column that no row has is left out."""
    chosen = [cell for cell in table if cell.kind == kind]
    filled = [(head, text) for head, text in _COLUMNS if any(text(cell) != "n/a" for cell in chosen)]
    return [head for head, _ in filled], [[text(cell) for _, text in filled] for cell in chosen]


def grid(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up on a terminal; "|" in a cell is escaped."""
    lines = [[text.replace("|", "\\|") for text in line] for line in (heads, *body)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    padded = ["| " + " | ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([padded[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *padded[1:]])


def sentence(c: Comparison) -> str:
    """One comparison in words."""
    verdict = "" if c.decided else " The interval of the difference includes zero: too few prompts to decide."
    text = (
        f"{c.method} at {c.budget}: {number(c.kl_ratio, 2)} times the KL of the best heuristic ({c.heuristic}), "
        f"difference {number(c.kl_difference, 4)} nats, n = {c.kl_difference.n}."
    )
    if c.accuracy_difference is not None:
        text += f" Difference in accuracy: {number(c.accuracy_difference, 1, 100.0)} points."
    return text + verdict


def markdown(header: Record, records: Sequence[Record]) -> str:
    """All tables and comparisons as one Markdown text."""
    table, compared = cells(header, records), comparisons(header, records)
    parts = []
    for kind, heading in KINDS.items():
        if any(cell.kind == kind for cell in table):
            parts += [f"### {heading}", grid(*rows(table, kind))]
            parts += ["\n".join(f"* {sentence(c)}" for c in compared if c.kind == kind)]
    parts.append("Brackets: 95% bootstrap intervals over the prompts, paired for comparisons. KL is to the full cache.")
    return "\n\n".join(part for part in parts if part) + "\n"


def summary(header: Record, records: Sequence[Record]) -> Record:
    """Everything as JSON-ready numbers; an infinite bound is None."""

    def plain(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: plain(value) for key, value in x.items()}
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return {
        "evaluation": header,
        "cells": [plain(dataclasses.asdict(cell)) for cell in cells(header, records)],
        "comparisons": [plain(dataclasses.asdict(c)) for c in comparisons(header, records)],
    }
