"""An evaluation from an experiment's settings to a folder of results; what the launch scripts share."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dcache import workdir
from dcache.data import prompts as prompt_lib
from dcache.data import text
from dcache.data.prompts import Prompt
from dcache.errors import ConfigError
from dcache.evaluate import fidelity, pictures, records, report, tables
from dcache.evaluate.tables import Record
from dcache.experiment import BENCHMARKS, Experiment
from dcache.learn.blocks import unseen_tokens
from dcache.load import LanguageModel
from dcache.policies.base import Trained
from dcache.tokenizer import Tokenizer

RESULTS = "results.jsonl"
ANSWER_TOKENS = 24


def held_out_prompts(experiment: Experiment, tokenizer: Tokenizer, *, validation: bool = False) -> list[Prompt]:
    """`experiment.eval.prompts` retrieval prompts and as many plain-text windows, none from a training document.

    Where questions are hidden there are no plain-text windows: they ask nothing. An experiment that trains on benchmarks is
    evaluated on the text that every installation has. With `validation` the prompts are new ones from training documents, for
    choices that must not be made on held-out prompts.
    """
    data, settings = experiment.data, experiment.eval
    installed = data.source in ("installed", BENCHMARKS)
    documents = text.installed_text() if installed else text.directory_text(data.source)
    train, test = text.split_documents(documents, data.held_out)
    if validation:
        test = train
    prefix = () if tokenizer.bos_id is None else (tokenizer.bos_id,)
    retrieval = prompt_lib.retrieval_prompts(
        test, tokenizer, data.length, settings.prompts, settings.seed, "train" if validation else "test"
    )
    if settings.hide_question:
        return retrieval
    plain = prompt_lib.text_prompts(
        test, tokenizer, data.length, settings.horizon, settings.prompts, settings.seed, prefix
    )
    return [*retrieval, *plain]


def settings_of(experiment: Experiment, prompts: Sequence[Prompt] = ()) -> fidelity.Settings:
    """The evaluation settings of an experiment; where questions are hidden, by as many tokens as the longest one needs."""
    chosen = experiment.eval
    return fidelity.Settings(
        length=experiment.data.length,
        horizon=chosen.horizon,
        evict_every=chosen.evict_every,
        new_tokens=ANSWER_TOKENS if chosen.accuracy else 0,
        seed=chosen.seed,
        unseen=unseen_tokens(prompts) if chosen.hide_question else 0,
    )


def check(experiment: Experiment, trained: Mapping[str, Trained]) -> dict[str, Trained]:
    """All methods by label, heuristics first, after everything that can be wrong has been looked at.

    Raises:
      ConfigError: unknown policy name, a label used twice, or settings that do not fit each other.
      BudgetError: a budget that is none, or that a policy cannot work with.
    """
    methods = {name: fidelity.heuristic(name) for name in experiment.eval.policies}
    twice = sorted(set(methods) & set(trained))
    if twice:
        raise ConfigError(f"Two policies are called {', '.join(twice)}; label trained ones as in --policy=name=path.")
    methods |= trained
    fidelity.make_arms(methods, experiment.eval.budgets, experiment.data.length)
    settings_of(experiment)
    return methods


def labelled(items: Sequence[str]) -> dict[str, pathlib.Path]:
    """["a=runs/x", "runs/y"] -> {"a": runs/x, "y": runs/y}; without a label, the last part of the path.

    Raises:
      ConfigError: an empty label or path, or a label used twice.
    """
    found: dict[str, pathlib.Path] = {}
    for item in items:
        label, separator, path = item.partition("=")
        place = pathlib.Path(path if separator else item)
        label = label if separator else place.name
        if not label or (separator and not path):
            raise ConfigError(f"--policy={item} names no policy; give --policy=PATH or --policy=LABEL=PATH.")
        if label in found:
            raise ConfigError(f"Two policies are called {label!r}; give each its own label: --policy=LABEL=PATH.")
        found[label] = place
    return found


def run(
    lm: LanguageModel, experiment: Experiment, methods: Mapping[str, Trained], folder: pathlib.Path, *,
    validation: bool = False,
) -> tuple[Record, list[Record]]:  # fmt: skip
    """Evaluates on held-out (or validation) prompts, going on from what `folder` already holds; see `records.run`."""
    prompts = held_out_prompts(experiment, lm.tokenizer, validation=validation)
    arms = fidelity.make_arms(methods, experiment.eval.budgets, min(len(p.tokens) for p in prompts))
    return records.run(lm, prompts, arms, settings_of(experiment, prompts), folder / RESULTS)


def publish(
    header: Record, found: Sequence[Record], experiment: Experiment, folder: pathlib.Path, *, title: str,
    commands: Sequence[str], metrics: Mapping[str, pathlib.Path],
) -> str:  # fmt: skip
    """Writes summary.json, table.md, pictures and report.html into a folder.

    Args:
      metrics: label -> `metrics.jsonl` of the training runs to be drawn; may be empty.

    Returns:
      The Markdown tables.
    """
    markdown = tables.markdown(header, found)
    config: dict[str, Any] = dataclasses.asdict(experiment)
    contents = tables.summary(header, found) | {
        "versions": report.versions(),
        "config": config,
        "commands": list(commands),
    }
    workdir.atomic_write(folder / "summary.json", json.dumps(contents, indent=2, allow_nan=False) + "\n")
    workdir.atomic_write(folder / "table.md", markdown)
    shown = [report.Picture("KL to the full cache against the budget.", folder / "kl.png")]
    pictures.kl_by_budget(header, tables.cells(header, found), shown[-1].path)
    shown.append(report.Picture("Share of the prompt that each policy keeps, by position.", folder / "retained.png"))
    pictures.retained(header, found, shown[-1].path)
    if metrics:
        shown.append(report.Picture("Reward and entropy over training; thick: running mean.", folder / "training.png"))
        pictures.training(metrics, shown[-1].path)
    workdir.atomic_write(folder / "report.html", report.page(title, header, found, shown, commands, config))
    return markdown
