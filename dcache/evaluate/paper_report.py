"""The report on the paper's tables: the paper's numbers, this project's, what was not run, and how to run it."""

import dataclasses
import html
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcache import metrics, workdir
from dcache.errors import ConfigError, LoadError
from dcache.evaluate import benchmark_tables, paper, pictures, quantities, report, runs, statistics
from dcache.evaluate.answers import FULL
from dcache.evaluate.benchmark_tables import Section, shown
from dcache.evaluate.paper import Cell, Column, Table
from dcache.evaluate.quantities import QUANTITIES
from dcache.evaluate.report import Picture
from dcache.evaluate.runs import Measured, Run
from dcache.evaluate.tables import number


@dataclasses.dataclass(frozen=True)
class Plan:
    """One table or picture of the paper: what is needed for it (the files of configs/paper/).

    Attributes:
      name: a key of `paper.TABLES`. model: that is run. methods: the paper's label -> label of the arm in the results.
      budgets, seeds: that are to be run. tasks: name of a group -> tasks (names, or patterns with *).
      runs: folders of results; empty for runs/<model>/benchmarks, with -seed<N> behind the model for every seed but 0.
      training: label -> folder of a training run whose curves are drawn. bench: file that launch/bench.py wrote. viewer: HTML
      file of the retention viewer, or "". commands: that make what is needed, with "{model}" and "{config}"
      for the model and its training configuration.
    """

    name: str
    model: str
    methods: Mapping[str, str]
    budgets: Sequence[float]
    tasks: Mapping[str, Sequence[str]]
    seeds: Sequence[int]
    runs: Sequence[str]
    training: Mapping[str, str]
    bench: str
    viewer: str
    commands: Sequence[str]


def make_plan(config: Mapping[str, Any]) -> Plan:
    """A plan from a configuration.

    Raises:
      ConfigError: a field is missing or unknown, or the paper has no such table.
    """
    wanted = {field.name for field in dataclasses.fields(Plan)}
    if set(config) != wanted:
        differ = ", ".join(sorted(wanted ^ set(config)))
        raise ConfigError(
            f"The configuration of a paper table lacks or does not know {differ}; see configs/paper/base.py."
        )
    if config["name"] not in paper.TABLES:
        raise ConfigError(f"The paper has no {config['name']!r}; use one of {', '.join(paper.TABLES)}.")
    return Plan(**config)


def make_plans(config: Mapping[str, Any], load: Callable[[str], Mapping[str, Any]]) -> list[Plan]:
    """The plan of a configuration or, of one that names parts (configs/paper/all.py), the plans of all parts.

    Parts take over the model, the runs and the viewer of the whole, where it has them. load: gives a part's configuration.

    Raises:
      ConfigError: as `make_plan`, or there is no such part.
    """
    if "parts" not in config:
        return [make_plan(config)]
    shared = {name: config[name] for name in ("model", "runs", "viewer") if config[name]}
    plans = []
    for part in config["parts"]:
        if part not in paper.TABLES:
            raise ConfigError(f"The paper has no {part!r}; use some of {', '.join(paper.TABLES)}.")
        plans.append(make_plan({**load(part), **shared}))
    return plans


def _command(line: str, model: str) -> str:
    config = "smollm2" if short(model) == "smollm2" else "mistral7b"
    return line.format(model=model, short=short(model), config=config)


def short(model: str) -> str:
    """The last part of a model's name, for folders and headings."""
    return model.rstrip("/").rpartition("/")[2]


def places(plan: Plan) -> list[str]:
    """Where the plan's results are looked for; nowhere if it has no tasks."""
    usual = [f"runs/{{model}}{f'-seed{seed}' if seed else ''}/benchmarks" for seed in plan.seeds if plan.tasks]
    return [place.format(model=short(plan.model)) for place in plan.runs or usual]


def gather(plan: Plan) -> tuple[list[Run], list[str]]:
    """The results that exist, and the places that hold none.

    Raises:
      LoadError: a place that the plan names (not one of the usual ones) holds none. Others: see `runs.read` and `runs.check`.
    """
    found, missing = [], []
    for place in places(plan):
        folders = runs.find(pathlib.Path(place))
        found += [runs.read(folder) for folder in folders]
        if not folders:
            missing.append(place)
    if plan.runs and missing:
        raise LoadError(f"No {runs.FILE} in {', '.join(missing)} or a folder in it; give folders of benchmark runs.")
    runs.check(found)
    return found, missing


# ---------------------------------------------------------------------------------------------------------------------
# A table of the paper


def measurements(
    plan: Plan, table: Table, found: Sequence[Run], bench: Mapping[str, Any]
) -> dict[tuple[str, str], Measured | str]:
    """(row, column) of a paper's table -> this project's number on the model that was run, or why there is none."""
    result: dict[tuple[str, str], Measured | str] = {}
    for column in table.columns:
        for row in table.rows:
            result[row, column.heading] = _one(plan, column, row, found, bench)
    return result


def _one(plan: Plan, column: Column, row: str, found: Sequence[Run], bench: Mapping[str, Any]) -> Measured | str:
    method = plan.methods.get(row)
    if method is None:
        return "not run: no policy for it in the configuration"
    budget = FULL[1] if method == FULL[0] else column.budget
    if column.quantity not in QUANTITIES:
        measured_on = bench.get("latency_of", {}).get("model", plan.model)
        if not paper.same_model(measured_on, short(plan.model)):
            return f"not measured: {plan.bench} is of {measured_on}"
        value = bench.get("latency", {}).get(method, {}).get(column.quantity)
        if value is None:
            return f"not measured: {plan.bench} has no {column.quantity} of {method}"
        return Measured(statistics.Estimate(float(value), -math.inf, math.inf, 1), (), (), 0.0)
    if not found:
        return f"not run: no results in {places(plan)[0]}"
    if not runs.having(found, method, budget):
        return f"not run: no arm {method} at {budget}"
    tasks = plan.tasks[column.tasks]
    measured = quantities.measured(found, column.quantity, method, budget, tasks, column.bin)
    if measured is None:
        at = f" of {column.bin} tokens" if column.bin else ""
        return f"not run: no prompt of {column.tasks}{at} with a {column.quantity}"
    return measured


def section(plan: Plan, found: Sequence[Run], bench: Mapping[str, Any]) -> tuple[Section, list[Cell]]:
    """One table of the paper with this project's numbers beside it."""
    table = paper.TABLES[plan.name]
    model = found[0].header["model"] if found else short(plan.model)
    scales = {name: q.scale for name, q in QUANTITIES.items()}
    cells = paper.compare(table, model, measurements(plan, table, found, bench), scales)
    columns = {column.heading: column for column in table.columns}
    above = benchmark_tables.above_chance(found)
    body: list[tuple[str, ...]] = []
    for heading, column in columns.items():
        body.append((heading,))
        body += [_line(plan, column, cell, found, above) for cell in cells if cell.column == heading]
    other = f"{short(model)}, no reproduction"
    heads = ("method", "paper (sd)", "this project", "difference", other, "of its full cache %", "n", "remarks")
    filled = [i for i in range(len(heads)) if i < 3 or any(len(row) > 1 and row[i] for row in body)]
    rows = tuple(row if len(row) == 1 else tuple(row[i] for i in filled) for row in body)
    chosen = tuple(heads[i] for i in filled) if rows else ()
    text = [table.note] if table.note else []
    if "latency_of" in bench and any(column.quantity not in QUANTITIES for column in table.columns):
        text.append(
            "Measured here: {model}, {machine}; prompt of {prompt} tokens, {budget:.0%} of the cache, one sequence, a "
            "decision every {evict_every} tokens.".format(**bench["latency_of"])
        )
    if plan.name in ("figure3", "figure5"):
        text.append("See the pictures below." if found else f"not run: no results in {', '.join(places(plan))}")
    if cells and all(cell.ours is None for cell in cells) and any(cell.other for cell in cells):
        text.append(
            f"The paper's numbers are of {table.model}. The column of {short(model)} shows the same measurement on another "
            "model: it reproduces nothing, and only the order of its methods can be held against the paper's."
        )
    return Section(table.title, tuple(text), chosen, rows), cells


def _line(plan: Plan, column: Column, cell: Cell, found: Sequence[Run], above: Sequence[str]) -> tuple[str, ...]:
    """A row of a paper's table as text."""
    digits = QUANTITIES[column.quantity].digits if column.quantity in QUANTITIES else 1
    printed = "–" if cell.paper is None else f"{cell.paper:.{digits}f}"
    if cell.deviation is not None:
        printed += f" ({cell.deviation:.{digits}f})"
    measured = cell.ours or cell.other
    remarks = list(cell.remarks)
    text, kept = _text(measured, column.quantity), ""
    if measured and column.quantity == "score":
        kept, warnings = _kept(plan, column, cell, measured, found, above)
        # One warning is enough: a share is less certain than a score.
        less = ("too wide", "no interval", "n=1") if warnings else ()
        remarks = [*warnings, *(r for r in remarks if not r.startswith(less))]
    if measured:
        remarks = [*remarks, *_made_of(plan.tasks.get(column.tasks, ()), measured, QUANTITIES.get(column.quantity))]
    difference = number(cell.difference, digits) if cell.difference else ""
    here, elsewhere = (text, "") if cell.ours else (cell.missing, text if cell.other else "")
    n = str(measured.estimate.n) if measured and column.quantity in QUANTITIES else ""
    return cell.row, printed, here, difference, elsewhere, kept, n, "; ".join(filter(None, dict.fromkeys(remarks)))


def _text(measured: Measured | None, quantity: str) -> str:
    if quantity in QUANTITIES:
        return shown(measured, quantity)
    return f"{measured.estimate.value:.3g}" if measured else "n/a"  # a time: one measurement, no prompts


def _made_of(patterns: Sequence[str], measured: Measured, q: quantities.Quantity | None) -> list[str]:
    """How many of the tasks a number is made of, and how the seeds differ."""
    remarks = []
    hit = sum(any(runs.matches(task, [pattern]) for task in measured.tasks) for pattern in patterns)
    if hit < len(patterns):
        remarks.append(f"{hit} of {len(patterns)} tasks")
    if q and measured.spread is not None:
        values = ", ".join(f"{value * q.scale:.{q.digits}f}" for _, value in measured.seeds)
        remarks.append(f"{len(measured.seeds)} runs: {values} (sd {measured.spread * q.scale:.{q.digits}f})")
    return remarks


def _kept(
    plan: Plan, column: Column, cell: Cell, measured: Measured, found: Sequence[Run], above: Sequence[str]
) -> tuple[str, list[str]]:
    """A method's score over the full cache's where that means something, and remarks on where it does not.

    Args:
      above: tasks on which the full cache is above chance; only they count.
    """
    method = plan.methods[cell.row]
    tasks = [task for task in measured.tasks if task in above]
    if not tasks:
        return "full cache not above chance", []
    low = len(measured.tasks) - len(tasks)
    remarks = [f"full cache not above chance on {low} of {len(measured.tasks)} tasks, left out of it"] if low else []
    if method == FULL[0]:
        return "", remarks
    kept = quantities.measured(found, "retention", method, column.budget, tasks, column.bin)
    return shown(kept, "retention"), [*remarks, statistics.too_wide(kept.estimate) if kept else ""]


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def draw(found: Sequence[Run], folder: pathlib.Path) -> list[Picture]:
    """KL, score and perplexity against the budget, and the share kept by position, as far as there are numbers."""
    arms = benchmark_tables.arms(found)
    if len(arms) < 2:
        return []
    name = short(found[0].header["model"])
    details = {(arm["method"], arm["budget"]): arm for run in found for arm in run.header["arms"]}
    header = {"arms": [details[arm] for arm in arms]}
    panels = []
    for quantity, log, title in (
        ("kl", True, "KL to the full cache"),
        ("score", False, "Mean score over tasks, in percent"),
        ("perplexity", False, "Perplexity"),
    ):
        q = QUANTITIES[quantity]
        numbers = {arm: quantities.measured(found, quantity, *arm, ["*"]) for arm in arms}
        scaled = {
            arm: dataclasses.replace(e, value=e.value * q.scale, low=e.low * q.scale, high=e.high * q.scale)
            for arm, measured in numbers.items()
            if measured and (e := measured.estimate)
        }
        methods = {arm: e for arm, e in scaled.items() if arm != FULL}
        if methods:
            level = scaled[FULL].value if FULL in scaled and not log else None
            n = sorted({e.n for e in methods.values()})
            at = f"n={n[0]}" if len(n) == 1 else f"n={n[0]} to {n[-1]}"
            panels.append(pictures.Panel(f"{title} ({at})", q.heading, methods, level, log))
    drawn = []
    if panels:
        drawn.append(
            Picture(
                "Against the budget, with 95% intervals; trained policies stand out.", folder / f"{name}-budget.png"
            )
        )
        pictures.by_budget(header, panels, drawn[-1].path)
    shares = {arm: _retained(found, *arm) for arm in arms[1:]}
    if all(shares.values()):
        drawn.append(Picture("Share of the tokens kept, by position in the prompt.", folder / f"{name}-retained.png"))
        pictures.retained_shares(header, shares, "All prompts", drawn[-1].path)
    return drawn


def _retained(found: Sequence[Run], method: str, budget: str) -> list[list[float]]:
    cells = [r["arms"][method][budget] for run in runs.having(found, method, budget) for r in run.records]
    return [cell["retained"] for cell in cells if cell.get("retained")]


def curves(plan: Plan, folder: pathlib.Path, part: Section) -> Section:
    """A section with reward and entropy against steps, of the training runs that are there."""
    logs = {
        label: pathlib.Path(run.format(model=short(plan.model))) / metrics.FILE for label, run in plan.training.items()
    }
    there = {label: path for label, path in logs.items() if path.is_file()}
    absent = ", ".join(f"{label} ({path.parent})" for label, path in logs.items() if label not in there)
    text = (*part.text, *([f"not run: {absent}"] if absent else []))
    if not there:
        return dataclasses.replace(part, text=text)
    picture = Picture("Over training steps; thick: running mean.", folder / f"{plan.name}-training.png")
    pictures.training(there, picture.path)
    return dataclasses.replace(part, text=text, pictures=(picture,))


def view(plan: Plan, folder: pathlib.Path, part: Section) -> Section:
    """A section with the way to the token-level view.

    Raises:
      LoadError: the file that was named is not there.
    """
    if not plan.viewer:
        text = "not made: give the retention viewer's file with --config.viewer=FILE."
        return dataclasses.replace(part, text=(*part.text, text))
    if not pathlib.Path(plan.viewer).is_file():
        raise LoadError(f"There is no retention viewer {plan.viewer!r}; make it, or leave config.viewer empty.")
    link = ("The retention viewer, a page of its own", os.path.relpath(plan.viewer, folder))
    return dataclasses.replace(part, links=(link,))


# ---------------------------------------------------------------------------------------------------------------------
# The page


def write(plans: Sequence[Plan], folder: pathlib.Path, *, title: str, commands: Sequence[str], config: Any) -> str:
    """Writes report.html, table.md, summary.json and the pictures.

    Args:
      plans: at least one. commands: that made this report. config: JSON-ready, shown as it is.

    Returns:
      The Markdown text.

    Raises:
      LoadError, CheckpointError, ConfigError: results that cannot be read or shown side by side.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = {tuple(places(plan)): gather(plan) for plan in plans}
    found = list({run.label: run for there, _ in results.values() for run in there}.values())
    sections, cells = [], {}
    for plan in plans:
        part, cells[plan.name] = section(plan, results[tuple(places(plan))][0], _bench(plan.bench))
        if plan.training:
            part = curves(plan, folder, part)
        sections.append(view(plan, folder, part) if plan.name == "figure2" else part)
    missing = sorted({place for _, absent in results.values() for place in absent})
    if missing:
        sections.insert(0, Section("Not run", (f"No results in {', '.join(missing)}.",)))
    models = list(dict.fromkeys(run.header["model"] for run in found))
    for model in models:
        own = _own(plans, [run for run in found if run.header["model"] == model], folder)
        sections += [dataclasses.replace(part, heading=f"{short(model)}: {part.heading}") for part in own]
    models = [short(model) for model in models or dict.fromkeys(plan.model for plan in plans)]
    needed = list(dict.fromkeys(_command(line, plan.model) for plan in plans for line in plan.commands))
    markdown = f"# {title}\n\n{benchmark_tables.markdown(sections)}"
    workdir.atomic_write(folder / "table.md", markdown)
    contents = {
        "title": title,
        "models": models,
        "paper": {
            name: [_plain(dataclasses.asdict(cell)) for cell in found_cells] for name, found_cells in cells.items()
        },
        "runs": {run.label: run.header for run in found},
        "not_run": missing,
        "versions": report.versions(),
        "commands": [*needed, *commands],
        "config": config,
    }
    workdir.atomic_write(folder / "summary.json", json.dumps(contents, indent=2, default=list, allow_nan=False) + "\n")
    parts = [_head(title, models, sections), *map(_html, sections)]
    parts += ["<h2>How to make this again</h2>", report.pre("\n".join([*needed, *commands]))]
    parts += ["<h2>Versions</h2>", report.table(["", "version"], [list(item) for item in report.versions().items()])]
    if found:
        settings = {run.label: {k: run.header.get(k) for k in ("settings", "tasks")} for run in found}
        parts += ["<h2>Policies</h2>", report.table(*_policies(found))]
        parts += ["<h2>Settings of the runs, seeds included</h2>", report.pre(json.dumps(settings, indent=2))]
    parts += ["<h2>Configuration</h2>", report.pre(json.dumps(config, indent=2, default=list))]
    workdir.atomic_write(folder / "report.html", report.document(title, parts))
    return markdown


def _own(plans: Sequence[Plan], found: Sequence[Run], folder: pathlib.Path) -> list[Section]:
    """What was measured on the model that was run, whatever the paper shows."""
    pictures_section = Section("Pictures", pictures=tuple(draw(found, folder)))
    champion = next((plan.methods["DistillCache"] for plan in plans if "DistillCache" in plan.methods), "")
    against = benchmark_tables.differences(found, champion)
    return [
        benchmark_tables.overview(found), *([pictures_section] if pictures_section.pictures else []),
        benchmark_tables.retention(found), benchmark_tables.fidelity(found), *([against] if against else []),
        benchmark_tables.errors(found), *benchmark_tables.by_length(found), *benchmark_tables.scores(found),
    ]  # fmt: skip


def _bench(path: str) -> Mapping[str, Any]:
    if not path or not pathlib.Path(path).is_file():
        return {}
    try:
        return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read as JSON ({error}); measure again with launch/bench.py.") from error


def _policies(found: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    arms = {(a["method"], a["budget"]): a for run in found for a in run.header["arms"]}
    body = [[a["method"], a["budget"], str(a.get("policy")), a.get("weights") or "none"] for a in arms.values()]
    return ["policy", "budget", "settings", "weights"], body


def _anchor(heading: str) -> str:
    return re.sub(r"\W+", "-", heading.lower()).strip("-")


def _head(title: str, models: Sequence[str], sections: Sequence[Section]) -> str:
    links = "".join(f'<a href="#{_anchor(s.heading)}">{html.escape(s.heading.split(". ")[0])}</a>' for s in sections)
    intro = (
        f"The paper (arXiv 2608.08878) beside what this project measured with {' and '.join(models)}. A number of the paper is "
        'compared only with one measured on the paper\'s own model; "not run" says what is missing.'
    )
    return f"<h1>{html.escape(title)}</h1><p>{html.escape(intro)}</p><nav>{links}</nav>"


def _html(part: Section) -> str:
    lines = [f'<h2 id="{_anchor(part.heading)}">{html.escape(part.heading)}</h2>']
    lines += [f'<p class="note">{html.escape(text)}</p>' for text in part.text]
    lines += [f'<p><a href="{html.escape(file)}">{html.escape(text)}</a></p>' for text, file in part.links]
    lines += map(report.figure, part.pictures)
    lines += [report.table(part.heads, part.body)] if part.body else []
    return "\n".join(lines)


def _plain(x: Any) -> Any:
    """JSON-ready; an infinite bound is None."""
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
