"""Pictures of an evaluation and of a training run, as PNG files. Colour-blind safe (Okabe and Ito)."""

import itertools
import json
import math
import os
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from dcache.errors import LoadError
from dcache.evaluate import tables
from dcache.evaluate.statistics import Estimate
from dcache.evaluate.tables import Cell, Record

_COLOURS = ("#999999", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F6000", "#0072B2")
_TRAINED = ("#D55E00", "#7A1F1F", "#F2A07B", "#8E44AD")  # Reserved, so that what was learnt stands out.
_MARKERS = "osv^D<>phX"
_STYLE: dict[Any, Any] = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "figure.constrained_layout.use": True, "savefig.dpi": 144, "axes.titlelocation": "left",
}  # fmt: skip


def _looks(header: Record) -> dict[str, dict]:
    """Colour, marker and line of every method.

    Trained ones have colours of their own and thick lines; "h2o@sequence" has the colour of "h2o" and a dashed line.
    """
    looks: dict[str, dict] = {}
    bases: dict[str, str] = {}
    colours, markers = itertools.cycle(_COLOURS), itertools.cycle(_MARKERS)
    of_trained = itertools.cycle(zip(_TRAINED, "*PXd", strict=True))
    for method, _, trained in tables.columns(header)[1:]:
        if method in looks:
            continue
        if trained:
            colour, marker = next(of_trained)
            looks[method] = {"color": colour, "marker": marker, "linewidth": 2.5, "zorder": 4}
            continue
        base = method.partition("@")[0]
        if base not in bases:
            bases[base] = next(colours)
        dashed = {"linestyle": "--", "markerfacecolor": "white"} if base != method else {}
        looks[method] = {"color": bases[base], "marker": next(markers), "linewidth": 1.3, "zorder": 3, **dashed}
    return looks


def kl_by_budget(header: Record, table: Sequence[Cell], path: str | os.PathLike[str]) -> None:
    """Mean KL to the full cache with its interval: a line per method over the budgets, or a row each for one budget."""
    kinds = [k for k in tables.KINDS if any(cell.kind == k for cell in table)]
    budgets = list(dict.fromkeys(budget for _, budget, _ in tables.columns(header)[1:]))
    looks = _looks(header)
    height = 4.2 if len(budgets) > 1 else 1.1 + 0.15 * sum(2 + _label(name).count("\n") for name in looks)
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(len(kinds), 1, figsize=(7, height * len(kinds)), squeeze=False)
        for axis, kind in zip(axes[:, 0], kinds, strict=True):
            found = {(c.method, c.budget): c.kl for c in table if c.kind == kind and c.kl is not None}
            if len(budgets) > 1:
                _lines(axis, found, budgets, looks, "nats per token (less is better)")
            else:
                _rows(axis, found, budgets[0], looks)
            axis.set_title(f"{tables.KINDS[kind]}: KL to the full cache, 95% intervals")
        _save(figure, path)


def _label(method: str) -> str:
    """A method's name in lines that leave room for the picture; a composed policy's description may be long."""
    return textwrap.fill(method, 28)


def _bounds(number: Estimate, least: float = 1e-6) -> tuple[float, float, float]:
    """Value and finite ends of the interval (the value where there is none); at least `least`, for a logarithm."""
    low, high = (x if math.isfinite(x) else number.value for x in (number.low, number.high))
    return max(number.value, least), max(low, least), max(high, least)


class Panel(NamedTuple):
    """A quantity against the budget.

    Attributes:
      found: (method, budget) -> number. full: the full cache's, drawn as a level; None to leave it out. log: for quantities
        that fall to 0 at the full cache.
    """

    title: str
    unit: str
    found: Mapping[tuple[str, str], Estimate]
    full: float | None
    log: bool


def by_budget(header: Record, panels: Sequence[Panel], path: str | os.PathLike[str]) -> None:
    """Several quantities against the budget, one below the other: a line per method, with its intervals."""
    budgets = list(dict.fromkeys(budget for _, budget, _ in tables.columns(header)[1:]))
    looks = _looks(header)
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(len(panels), 1, figsize=(7, 4.2 * len(panels)), squeeze=False)
        for axis, panel in zip(axes[:, 0], panels, strict=True):
            if panel.full is not None:
                axis.axhline(panel.full, color="#444444", linewidth=1.0, linestyle=":")
                axis.annotate("full cache", (-0.28, panel.full), (0, 3), textcoords="offset points", fontsize=8)
            _lines(axis, panel.found, budgets, looks, panel.unit, log=panel.log)
            axis.set_title(panel.title)
        _save(figure, path)


def _lines(
    axis, found: Mapping[tuple[str, str], Estimate], budgets: Sequence[str], looks: Mapping[str, dict], unit: str, *,
    log: bool = True,
) -> None:  # fmt: skip
    ends = {}
    least = 1e-6 if log else -math.inf
    for i, (method, look) in enumerate(looks.items()):
        cells = [(x, _bounds(found[method, b], least)) for x, b in enumerate(budgets) if (method, b) in found]
        if not cells:
            continue
        # Shifted a little sideways, so that intervals do not hide each other.
        x = np.asarray([x + 0.012 * (i - len(looks) / 2) for x, _ in cells])
        value, low, high = np.asarray([bounds for _, bounds in cells]).T
        axis.errorbar(x, value, yerr=[np.maximum(value - low, 0), np.maximum(high - value, 0)], capsize=2, **look)
        ends[method] = value[-1]
    if log:
        axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xticks(range(len(budgets)), budgets)
    axis.set_xlim(-0.3, len(budgets) - 1 + 0.95)
    axis.set_xlabel("budget (share of the tokens kept)")
    axis.set_ylabel(unit)
    to, back = (math.log, math.exp) if log else (float, float)
    low, high = map(to, axis.get_ylim())
    if log:  # Less than a decade shows too few of the main marks to be read.
        axis.yaxis.set_minor_formatter("{x:g}" if high - low < math.log(10) else "")
    for method, height in _apart({m: to(y) for m, y in ends.items()}, 0.055 * (high - low)).items():
        colour = looks[method]["color"]
        axis.annotate(
            _label(method), (len(budgets) - 1 + 0.08, ends[method]), (len(budgets) - 1 + 0.25, back(height)), va="center",
            color=colour, fontweight="bold" if colour in _TRAINED else "normal",
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.6, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 0},
        )  # fmt: skip


def _apart(heights: Mapping[str, float], gap: float) -> dict[str, float]:
    """Places for labels near the given heights, in the same order and at least `gap` apart."""
    order = sorted(heights, key=lambda name: heights[name])
    placed: list[float] = []
    for name in order:
        placed.append(heights[name] if not placed else max(heights[name], placed[-1] + gap))
    # Labels were only pushed up; move all down by the mean push.
    push = sum(p - heights[name] for p, name in zip(placed, order, strict=True)) / max(len(order), 1)
    return {name: p - push for name, p in zip(order, placed, strict=True)}


def _rows(axis, found: Mapping[tuple[str, str], Estimate], budget: str, looks: Mapping[str, dict]) -> None:
    methods = sorted((m for m in looks if (m, budget) in found), key=lambda m: -_bounds(found[m, budget])[0])
    for y, method in enumerate(methods):
        value, low, high = _bounds(found[method, budget])
        axis.errorbar(value, y, xerr=[[max(value - low, 0)], [max(high - value, 0)]], capsize=3, **looks[method])
        axis.annotate(f"{value:.3f}", (high, y), (5, 0), textcoords="offset points", va="center", fontsize=9)
    axis.set_yticks(range(len(methods)), list(map(_label, methods)))
    for tick, method in zip(axis.get_yticklabels(), methods, strict=True):
        tick.set_color(looks[method]["color"])
        tick.set_fontweight("bold" if looks[method]["color"] in _TRAINED else "normal")
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
    axis.set_xlabel(f"nats per token, at a budget of {budget} (less is better)")
    axis.margins(x=0.12)


def retained(header: Record, records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    """Share of the tokens kept by relative position in the prompt, as `retained_shares`, for the first kind of prompts."""
    kind = next(k for k in tables.KINDS if any(r["kind"] == k for r in records))
    shares = {
        (method, budget): [r["arms"][method][budget]["retained"] for r in records if r["kind"] == kind]
        for method, budget, _ in tables.columns(header)[1:]
    }
    retained_shares(header, shares, tables.KINDS[kind], path)


def retained_shares(
    header: Record,
    shares: Mapping[tuple[str, str], Sequence[Sequence[float]]],
    title: str,
    path: str | os.PathLike[str],
) -> None:
    """Share of the tokens kept by relative position: a panel per method, a line per budget.

    Args:
      shares: (method, budget) of every arm but the full cache -> for each prompt the shares of equal parts of it, in order.
    """
    arms = tables.columns(header)[1:]
    methods, budgets = list(dict.fromkeys(m for m, _, _ in arms)), list(dict.fromkeys(b for _, b, _ in arms))
    looks = _looks(header)
    across = min(3, len(methods))
    down = math.ceil(len(methods) / across)
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(
            down, across, figsize=(2.6 * across, 0.5 + 1.7 * down), squeeze=False, sharex=True, sharey=True
        )
        for axis in axes.flat[len(methods) :]:
            axis.set_axis_off()
        for axis, method in zip(axes.flat, methods, strict=False):
            for shade, budget in zip(np.linspace(1.0, 0.35, len(budgets)), budgets, strict=True):
                share = 100 * np.mean(shares[method, budget], axis=0)
                centres = (np.arange(len(share)) + 0.5) / len(share)
                axis.plot(centres, share, color=looks[method]["color"], alpha=shade, linewidth=1.8)
                if axis is axes[0, 0] and len(budgets) > 1:
                    axis.annotate(budget, (centres[len(share) // 2], share[len(share) // 2]), (0, 3),
                                  textcoords="offset points", fontsize=8, ha="center",
                                  bbox={"fc": "white", "ec": "none", "pad": 0.5, "alpha": 0.8})  # fmt: skip
            axis.set_title(_label(method), color=looks[method]["color"], fontsize=10)
            axis.set_ylim(0, 105)
        figure.supxlabel("relative position in the prompt (0 = start)", fontsize=10)
        figure.supylabel("tokens kept (%)", fontsize=10)
        budget_text = f" at {budgets[0]}" if len(budgets) == 1 else ""
        figure.suptitle(f"{title}: what is kept where{budget_text}", fontsize=11)
        _save(figure, path)


def training(metrics: Mapping[str, str | os.PathLike[str]], path: str | os.PathLike[str]) -> None:
    """Reward or loss, and surprise (an estimate of the policy's entropy) over training, one line per run.

    Args:
      metrics: label -> a `metrics.jsonl` with `step` and `reward` or, of a supervised method, `loss` in each line; if keep-sets
        were sampled, `surprise` too.

    Raises:
      LoadError: a file is missing, damaged or empty.
    """
    runs = {label: _read_metrics(pathlib.Path(file)) for label, file in metrics.items()}
    titles = {"reward": "Reward", "loss": "Loss", "surprise": "Entropy (surprise in nats per kept token)"}
    titles = {field: title for field, title in titles.items() if any(field in lines[0] for lines in runs.values())}
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(len(titles), 1, figsize=(7, 2.75 * len(titles)), sharex=True, squeeze=False)
        for axis, (field, title) in zip(axes[:, 0], titles.items(), strict=True):
            for (label, lines), colour in zip(runs.items(), itertools.cycle((_TRAINED[0], *_COLOURS)), strict=False):
                if field not in lines[0]:
                    continue
                step = np.asarray([line["step"] for line in lines])
                value = np.asarray([line[field] for line in lines], np.float64)
                window = max(1, len(value) // 12)
                axis.plot(step, value, color=colour, alpha=0.2, linewidth=0.8)
                # Every step has another prompt, so single rewards say little; the running mean does.
                total = np.cumsum(np.concatenate([[0.0], value]))
                smooth = (total[window:] - total[:-window]) / window
                middle = step[(window - 1) // 2 :][: len(smooth)]
                axis.plot(middle, smooth, color=colour, linewidth=2)
                if len(runs) > 1:
                    axis.annotate(label, (middle[-1], smooth[-1]), (4, 0), textcoords="offset points", va="center",
                                  fontsize=8, color=colour)  # fmt: skip
            axis.set_title(title)
            if field == "reward":  # Rare bad prompts would flatten everything else.
                every = np.concatenate(
                    [[line[field] for line in lines] for lines in runs.values() if field in lines[0]]
                )
                axis.set_ylim(np.percentile(every, 2), max(0.0, float(every.max())))
        axes[-1, 0].set_xlabel("training step")
        _save(figure, path)


def _read_metrics(path: pathlib.Path) -> list[Record]:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise LoadError(f"The training metrics {path} cannot be read ({error}); train again with --resume.") from error
    lines = [line for line in lines if "reward" in line or "loss" in line]
    if not lines:
        raise LoadError(f"The training metrics {path} hold no step; train first.")
    return lines


def _save(figure, path: str | os.PathLike[str]) -> None:
    path = pathlib.Path(path)
    partial = path.with_name(f"{path.stem}.part.png")  # A killed run leaves no half picture under the final name.
    figure.savefig(partial)
    plt.close(figure)
    partial.replace(path)
