"""The learning bar: is a trained policy better than the heuristics, and by how much, on prompts that it never saw?"""

import dataclasses
from collections.abc import Sequence

from dcache.evaluate import statistics, tables
from dcache.evaluate.tables import Record

KL_RATIO = 0.60
"""Highest mean KL of a trained policy on retrieval prompts, relative to the best heuristic's."""


@dataclasses.dataclass(frozen=True)
class Bar:
    """One requirement on one trained policy. evidence: the numbers, in words."""

    method: str
    requirement: str
    met: bool
    evidence: str


def bars(header: Record, records: Sequence[Record], budget: str) -> list[Bar]:
    """All requirements on all trained policies under a budget.

    The best heuristic is the one of lowest mean KL on these very prompts. Sequence-level heuristics keep one set of
    tokens for all layers and heads, as the trained policy does.
    """
    arms = [arm for arm in header["arms"][1:] if arm["budget"] == budget]
    heuristics = [arm["method"] for arm in arms if arm["weights"] is None]
    sequence_level = [a["method"] for a in arms if a["weights"] is None and a["granularity"] == "sequence"]
    best = tables.best_heuristic(records, "retrieval", budget, heuristics)
    found = []
    for method in (arm["method"] for arm in arms if arm["weights"] is not None):
        if best is not None:
            found += [
                _kl_bar(records, method, best, budget),
                _accuracy_bar(records, method, best, heuristics, budget),
            ]
        found += [_text_bar(records, method, other, budget) for other in sequence_level]
    return found


def _kl_bar(records: Sequence[Record], method: str, best: str, budget: str) -> Bar:
    ours, theirs = tables.paired(records, "retrieval", "kl", (method, budget), (best, budget))
    ratio, difference = statistics.ratio(ours, theirs), statistics.difference(ours, theirs)
    return Bar(
        method,
        f"retrieval: mean KL at most {KL_RATIO:.2f} times the best heuristic's, interval of the difference below zero",
        ratio.value <= KL_RATIO and difference.high < 0,
        f"{tables.number(ratio, 2)} times {best}'s; difference {tables.number(difference)} nats, n = {ratio.n}",
    )


def _accuracy_bar(records: Sequence[Record], method: str, best: str, heuristics: Sequence[str], budget: str) -> Bar:
    names = [method, best, *heuristics]
    right = dict(zip(names, tables.paired(records, "retrieval", "correct", *((m, budget) for m in names)), strict=True))
    if not right[method]:
        return Bar(method, "retrieval: accuracy above the best heuristic's", False, "no answers were generated")
    difference = statistics.difference(right[method], right[best])
    most = max(heuristics, key=lambda name: sum(right[name]))
    return Bar(
        method,
        "retrieval: accuracy above the best heuristic's",
        difference.value > 0,
        f"{_share(right[method])} against {best}'s {_share(right[best])}; difference "
        f"{tables.number(difference, 1, 100.0)} points{_undecided(difference)}, n = {difference.n}; "
        f"highest of any heuristic: {_share(right[most])} ({most})",
    )


def _text_bar(records: Sequence[Record], method: str, other: str, budget: str) -> Bar:
    ours, theirs = tables.paired(records, "text", "kl", (method, budget), (other, budget))
    difference = statistics.difference(ours, theirs)
    return Bar(
        method,
        f"plain text: mean KL not above {other}'s",
        difference.value <= 0,
        f"difference {tables.number(difference)} nats{_undecided(difference)}, n = {difference.n}",
    )


def _share(values: Sequence[float]) -> str:
    return f"{100 * sum(values) / len(values):.1f}%"


def _undecided(difference: statistics.Estimate) -> str:
    return "" if difference.excludes(0.0) else " (interval includes zero)"


def markdown(header: Record, records: Sequence[Record], budget: str) -> str:
    """The bars and the tables behind them."""
    found = bars(header, records, budget)
    body = [[bar.method, bar.requirement, "met" if bar.met else "NOT met", bar.evidence] for bar in found]
    return "\n\n".join(
        [
            f"### Learning bars at {budget}",
            tables.grid(["policy", "requirement", "verdict", "evidence"], body),
            tables.markdown(header, records),
        ]
    )
