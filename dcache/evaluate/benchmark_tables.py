"""Tables of what was measured on one model: scores, retention, fidelity, errors, lengths; every number with its n.

`launch/eval.py` prints the scores of one run (`of_one_run`); the report on the paper shows all of them for one or several runs.
"""

import dataclasses
from collections.abc import Sequence

from dcache.evaluate import answers, chance, quantities, runs, statistics
from dcache.evaluate.answers import FULL
from dcache.evaluate.quantities import QUANTITIES
from dcache.evaluate.report import Picture
from dcache.evaluate.runs import Measured, Run
from dcache.evaluate.tables import Record, grid, number


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
      body: rows of the table; a row of one cell is a heading for those below it. links: (text, file) of other pages.
    """

    heading: str
    text: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    body: tuple[tuple[str, ...], ...] = ()
    pictures: tuple[Picture, ...] = ()
    links: tuple[tuple[str, str], ...] = ()


def arms(found: Sequence[Run]) -> list[tuple[str, str]]:
    """(method, budget) of all runs, the full cache first, in the order of evaluation."""
    return list(dict.fromkeys([FULL, *(arm for run in found for arm in run.arms)]))


def budgets(found: Sequence[Run]) -> list[str]:
    """The budgets, without that of the full cache."""
    return list(dict.fromkeys(budget for _, budget in arms(found) if budget != FULL[1]))


def shown(measured: Measured | None, quantity: str) -> str:
    """A number with its interval in the unit of its quantity, or "n/a"."""
    q = QUANTITIES[quantity]
    return number(measured.estimate if measured else None, q.digits, q.scale)


def scored(found: Sequence[Run]) -> list[str]:
    """The tasks that have a score."""
    return list(
        dict.fromkeys(
            record["task"]
            for run in found
            for record in run.records
            if record["arms"][FULL[0]][FULL[1]].get("score") is not None
        )
    )


def above_chance(found: Sequence[Run]) -> list[str]:
    """The tasks on which the full cache is clearly better than guessing, so that a retention has a meaning.

    The subtasks of BBH are looked at together, since each may have a prompt or two.
    """
    tasks = scored(found)
    good = []
    for group in dict.fromkeys(map(runs.stratum, tasks)):
        members = [task for task in tasks if runs.stratum(task) == group]
        full = quantities.measured(found, "score", *FULL, members)
        if full and not chance.at_chance(full.estimate, full.guessing):
            good += members
    return good


def overview(found: Sequence[Run]) -> Section:
    """Which results the report is made of."""
    body = []
    for run in found:
        when = [record.get("evicted", "unknown") for record in run.records]
        evicted = ", ".join(f"{what}: {when.count(what)}" for what in dict.fromkeys(when))
        seed = run.header.get("settings", {}).get("seed", "not noted")
        tasks = list(dict.fromkeys(record["task"] for record in run.records))
        skipped = f" ({run.skipped} skipped)" if run.skipped else ""
        body.append((run.label, str(seed), f"{len(run.records)}{skipped}", str(len(tasks)), evicted))
    text = (
        "Brackets are 95% bootstrap intervals over the prompts, comparisons paired by prompt; n is the number of prompts. An "
        "average over tasks counts every task the same, BBH as one, and resamples each task's prompts for itself.",
        'A share whose interval is wider than 20 points is called "too wide to decide", a difference whose interval includes '
        'none "undecided". One prompt gives no interval and decides nothing.',
    )
    heads = ("results", "seed", "examples", "tasks", "eviction")
    return Section("What was run", text, heads, tuple(body))


def scores(found: Sequence[Run]) -> list[Section]:
    """For each budget every method's score and KL on every task; a perplexity where a task has no score."""
    rows: dict[str, list[Run]] = {}  # RULER's lengths have rows of their own
    for run in found:
        for name in dict.fromkeys(map(_row_name, run.records)):
            own = [record for record in run.records if _row_name(record) == name]
            rows.setdefault(name, []).append(dataclasses.replace(run, records=own))
    sections = []
    for budget in budgets(found) or [FULL[1]]:
        chosen = [arm for arm in arms(found) if arm[1] in (FULL[1], budget)]
        body = tuple(_scores_line(name, part, chosen) for name, part in rows.items())
        text = "Behind a semicolon: mean KL to the full cache in nats. ppl: perplexity, where a task has no score."
        heads = ("task", "n", "remarks", *(method for method, _ in chosen))
        sections += [Section(f"Scores in percent at {budget}", (text,), heads, body)] if body else []
    return sections


def _row_name(record: runs.Record) -> str:
    return f"{record['task']} at {record['doc_length']}" if "ruler" in record["task"] else record["task"]


def _scores_line(name: str, part: Sequence[Run], chosen: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """One task's row: chosen are the arms of its columns."""
    quantity = "score" if scored(part) else "perplexity"
    cells = []
    for arm in chosen:
        main, kl = (quantities.measured(part, q, *arm, ["*"]) for q in (quantity, "kl"))
        text = f"{'ppl ' * (quantity == 'perplexity')}{shown(main, quantity)}"
        known = arm != FULL and kl is not None
        cells.append(f"{text}; {max(kl.estimate.value, 0.0):.3f}" if known and kl else text)
    full = quantities.measured(part, quantity, *FULL, ["*"])
    if full is None:
        return name, "0", "", *cells
    remarks = []
    if quantity == "score":
        if full.estimate.bounded and chance.at_chance(full.estimate, full.guessing):
            remarks.append(f"full cache at chance ({100 * full.guessing:.0f}%)")
        remarks.append(statistics.too_wide(full.estimate))
    return name, str(full.estimate.n), "; ".join(filter(None, remarks)), *cells


def retention(found: Sequence[Run]) -> Section:
    """Score over the full cache's, on the tasks on which the full cache is above chance."""
    tasks = above_chance(found)
    if not tasks:
        return Section("Retention", ("Full cache clearly above chance on no task, so there is nothing to retain.",))
    rows = []
    for method in dict.fromkeys(method for method, _ in arms(found)[1:]):
        cells = []
        for budget in budgets(found):
            kept = quantities.measured(found, "retention", method, budget, tasks)
            warning = statistics.too_wide(kept.estimate) if kept else ""
            cells.append(f"{shown(kept, 'retention')} {warning}".strip())
        rows.append((method, *cells))
    full = quantities.measured(found, "score", *FULL, tasks)
    n = full.estimate.n if full else 0
    text = (
        f"Share of the full cache's score, in percent, on the {len(tasks)} tasks (n={n}) on which the full cache is "
        f"clearly above chance: {', '.join(tasks)}. Elsewhere a retention would mean nothing; see KL and perplexity.",
    )
    return Section("Retention", text, ("method", *budgets(found)), tuple(rows))


_FIDELITY = ("kl", "top1", "perplexity", "perplexity rise", "kept")


def fidelity(found: Sequence[Run]) -> Section:
    """KL, top-1 agreement and perplexity by budget."""
    return _by_budget(found, "Fidelity and perplexity", _FIDELITY, (
        "KL and top-1 agreement with the full cache, averaged over tasks; perplexity over all tokens that were counted.",
    ))  # fmt: skip


def errors(found: Sequence[Run]) -> Section:
    """Error modes and the length of the answers by budget."""
    return _by_budget(found, "Errors and length of the answers", (*answers.MODES, "length ratio"), (
        "Error modes in percent of the items that the full cache gets right: repetitive, if the answer ends in a loop; "
        "overlength, if it did not end where the full cache's did; incorrect, the rest.",
    ))  # fmt: skip


def _by_budget(found: Sequence[Run], heading: str, chosen: Sequence[str], text: tuple[str, ...]) -> Section:
    """Rows of methods under a heading for each budget; a column for each quantity that some prompt has."""
    body: list[tuple[str, ...]] = []
    filled = set()
    for at in ["100%", *budgets(found)]:
        body.append((f"{at} of the cache",))
        for method, budget in arms(found):
            if budget != at:
                continue
            numbers = {name: quantities.measured(found, name, method, budget, ["*"]) for name in chosen}
            filled |= {name for name, measured in numbers.items() if measured}
            n = sorted({measured.estimate.n for measured in numbers.values() if measured})
            body.append((method, *(shown(numbers[name], name) for name in chosen), " / ".join(map(str, n)) or "0"))
    if not filled:
        return Section(heading, ("not run: no example has these numbers.",))
    columns = [0, *(i for i, name in enumerate(chosen, 1) if name in filled), len(chosen) + 1]
    heads = ("method", *(QUANTITIES[name].heading for name in chosen), "n")
    rows = tuple(row if len(row) == 1 else tuple(row[i] for i in columns) for row in body)
    return Section(heading, text, tuple(heads[i] for i in columns), rows)


def by_length(found: Sequence[Run]) -> list[Section]:
    """Scores by the length of the context, for the benchmarks that have several."""
    sections = []
    for name, pattern in {"LongBench": "dcache_longbench_*", "RULER": "dcache_ruler_*"}.items():
        records = [record for run in found for record in run.records if runs.matches(record["task"], [pattern])]
        lengths = answers.bins(records)
        if not lengths:
            continue
        body: list[tuple[str, ...]] = []
        for at in ["100%", *budgets(found)]:
            body.append((f"{at} of the cache",))
            for method, budget in arms(found):
                if budget == at:
                    here = [quantities.measured(found, "score", method, budget, [pattern], bin) for bin in lengths]
                    body.append((method, *(f"{shown(m, 'score')} n={m.estimate.n}" if m else "n/a" for m in here)))
        text = (
            "Mean score over tasks, in percent, by the power of two nearest to the prompt's length. The tasks behind two "
            "lengths may differ, so compare within a column.",
        )
        sections.append(Section(f"{name} by context length", text, ("method", *lengths), tuple(body)))
    return sections


def differences(found: Sequence[Run], champion: str) -> Section | None:
    """One method against every other at the same budget, paired by prompt; None if it was not run."""
    body: list[tuple[str, ...]] = []
    for budget in budgets(found):
        if (champion, budget) not in arms(found):
            continue
        body.append((f"{budget} of the cache",))
        for method, at in arms(found)[1:]:
            if at != budget or method == champion:
                continue
            pair = (champion, budget), (method, budget)
            cells = []
            for field in ("score", "kl"):
                found_difference = quantities.difference(found, field, *pair, ["*"])
                text = shown(found_difference, field)
                if found_difference:
                    text += f" {statistics.undecided(found_difference.estimate) or f'n={found_difference.estimate.n}'}"
                cells.append(text)
            body.append((method, *cells))
    if not body:
        return None
    heads = (f"{champion} minus", "score, points (above 0: better)", "KL, nats (below 0: better)")
    return Section(f"{champion} against the others", ("Paired by prompt, averaged over tasks.",), heads, tuple(body))


def markdown(sections: Sequence[Section]) -> str:
    """Sections as Markdown."""
    parts = []
    for part in sections:
        parts += [f"## {part.heading}", *part.text]
        if part.body:
            # Markdown has no rows that span columns: the heading stands in the first cell.
            width = len(part.heads)
            rows = [row if len(row) == width else (f"**{row[0]}**", *[""] * (width - 1)) for row in part.body]
            parts.append(grid(part.heads, rows))
    return "\n\n".join(parts) + "\n"


def of_one_run(header: Record, records: Sequence[Record]) -> str:
    """The scores of one benchmark run as Markdown, with what was skipped."""
    run = runs.make("", header, records)
    left = (
        f"\n{run.skipped} examples were skipped: their answers leave no room for the prompt.\n" if run.skipped else ""
    )
    return markdown(scores([run])) + left
