"""All methods in one table: evaluated group by group on the same prompts, put side by side, one of them held against the rest.

What a method sees, keeps and costs does not depend on what is evaluated beside it, so groups can be evaluated one after the
other, and a method added later needs only a group of its own.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from dcache.errors import ConfigError
from dcache.evaluate import statistics
from dcache.evaluate.tables import Record, columns, grid, number, paired, percent

_SHARED = ("model", "architecture", "settings", "prompts", "prompts_digest")


def merge(parts: Sequence[tuple[Record, list[Record]]]) -> tuple[Record, list[Record]]:
    """Header and records of several evaluations of the same prompts as one.

    Raises:
      ConfigError: they are of different models, settings or prompts, or two hold the same method.
    """
    header, records = parts[0]
    header = {**header, "arms": list(header["arms"])}
    merged = {r["name"]: {**r, "arms": dict(r["arms"])} for r in records}
    for other, more in parts[1:]:
        differ = [name for name in _SHARED if other.get(name) != header.get(name)]
        if differ:
            raise ConfigError(
                f"Two evaluations differ in {', '.join(differ)}; only results of the same work can be merged."
            )
        for method in dict.fromkeys(arm["method"] for arm in other["arms"] if arm["method"] != "full"):
            if method in {arm["method"] for arm in header["arms"]}:
                raise ConfigError(f"Two evaluations hold the method {method!r}; give one of them another label.")
        header["arms"] += [arm for arm in other["arms"] if arm["method"] != "full"]
        for record in more:
            arms = {method: found for method, found in record["arms"].items() if method != "full"}
            merged[record["name"]]["arms"] |= arms
    return header, [merged[record["name"]] for record in records]


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A column: its heading, which of the evaluations it comes from, the kind of prompts, the field of the records."""

    heading: str
    source: str
    kind: str
    field: str


QUANTITIES = (
    Quantity("text KL", "aware", "text", "kl"),
    Quantity("retrieval KL", "aware", "retrieval", "kl"),
    Quantity("accuracy %", "aware", "retrieval", "correct"),
    Quantity("retrieval KL, question hidden", "agnostic", "retrieval", "kl"),
    Quantity("accuracy %, question hidden", "agnostic", "retrieval", "correct"),
)

Results = Mapping[str, tuple[Record, list[Record]]]
"""Source ("aware", "agnostic") -> merged header and records."""


def _values(results: Results, quantity: Quantity, *arms: tuple[str, str]) -> list[list[float]]:
    """The values of (method, budget) arms on the prompts that have all of them; none where a source lacks a method."""
    header, records = results[quantity.source]
    if not {method for method, _ in arms} <= {arm["method"] for arm in header["arms"]}:
        return [[] for _ in arms]
    return paired(records, quantity.kind, quantity.field, *arms)


def order(results: Results, budget: str) -> list[str]:
    """Methods of a budget: oracles first, then by the geometric mean of their KL with the question in sight, best first."""
    header = results["aware"][0]
    methods = [method for method, at, _ in columns(header)[1:] if at == budget]

    def rank(method: str) -> tuple[bool, float]:
        logs = []
        for q in QUANTITIES:
            if q.field == "kl" and q.source == "aware":
                (values,) = _values(results, q, (method, budget))
                if values:
                    logs.append(math.log(max(sum(values) / len(values), 1e-9)))
        return not method.startswith("oracle"), sum(logs) / max(len(logs), 1)

    return sorted(methods, key=rank)


def table(results: Results, budget: str) -> str:
    """The Markdown table of one budget."""
    chosen = [q for q in QUANTITIES if q.source in results]
    full = columns(results["aware"][0])[0][:2]

    def row(method: str, at: str) -> list[str]:
        cells = []
        for q in chosen:
            (values,) = _values(results, q, (method, at))
            estimate = statistics.mean(values) if values else None
            cells.append(percent(estimate) if q.field == "correct" else number(estimate, 3))
        return [method, *cells]

    body = [row(*full), *(row(method, budget) for method in order(results, budget))]
    return grid(["policy", *(q.heading for q in chosen)], body)


def verdict(results: Results, champion: str, budget: str) -> list[str]:
    """Sentences that hold one method's KL against every other method's that is no oracle, paired, column by column."""
    lines = []
    others = [m for m in order(results, budget) if m != champion and not m.startswith("oracle")]
    for q in (q for q in QUANTITIES if q.field == "kl" and q.source in results):
        undecided, worse, nearest = [], [], None
        for other in others:
            ours, theirs = _values(results, q, (champion, budget), (other, budget))
            if not ours:
                continue
            difference = statistics.difference(ours, theirs)
            if not difference.excludes(0.0):
                undecided.append(other)
            elif difference.value > 0:
                worse.append(other)
            mean = sum(theirs) / len(theirs)
            if nearest is None or mean < nearest[0]:
                nearest = (mean, other, statistics.ratio(ours, theirs))
        if nearest is None:
            continue
        text = f"{q.heading} at {budget}: {champion} has {number(nearest[2], 2)} times the KL of {nearest[1]}, the next best; "
        text += f"above it: {', '.join(worse) or 'none'}; undecided: {', '.join(undecided) or 'none'}."
        lines.append(text)
    right = [q for q in QUANTITIES if q.field == "correct" and q.source in results]
    for q in right:
        full = columns(results["aware"][0])[0][:2]
        ours, theirs = _values(results, q, (champion, budget), full)
        if ours and sum(theirs):
            kept = statistics.ratio(ours, theirs)
            lines.append(f"{q.heading} at {budget}: {champion} keeps {percent(kept)} percent of the full cache's.")
    return lines


def markdown(results: Results, budgets: Sequence[str], champion: str, tuned: Mapping[str, str]) -> str:
    """The whole comparison.

    Args:
      budgets: names of the budgets. champion: the method that is held against the others, or "".
      tuned: family -> the setting that did best on validation prompts.
    """
    parts = []
    for budget in budgets:
        parts += [f"### {budget} of the cache", table(results, budget)]
        if champion:
            parts += ["\n".join(f"* {line}" for line in verdict(results, champion, budget))]
    n = {source: found[0]["prompts"] for source, found in results.items()}
    parts.append(
        "Prompts: "
        + "; ".join(f"{source}: {', '.join(f'{c} {k}' for k, c in kinds.items() if c)}" for source, kinds in n.items())
        + ". KL to the full cache in nats per token, 95% bootstrap intervals over the prompts, differences paired."
    )
    if tuned:
        chosen = ", ".join(f"{family}: `{setting}`" for family, setting in tuned.items())
        parts.append(f"Settings chosen on validation prompts: {chosen}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def best_setting(header: Record, records: Sequence[Record], names: Sequence[str], budget: str) -> str:
    """Of several settings of a method the one with the lowest geometric mean of retrieval and text KL."""

    def cost(name: str) -> float:
        logs = []
        for kind in ("retrieval", "text"):
            (values,) = paired(records, kind, "kl", (name, budget))
            if values:
                logs.append(math.log(max(sum(values) / len(values), 1e-9)))
        return sum(logs)

    return min(names, key=cost)
