"""Answers of other software to the prompts of a benchmark run, scored and put beside the run's own results.

The script that writes them, and what is the same and what differs: benchmarks/peers/README.md.
"""

import hashlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dcache import budget as budgets
from dcache.errors import CheckpointError, ConfigError
from dcache.evaluate import benchmark, records
from dcache.load import LanguageModel

Record = records.Record

Answers = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
"""Name of an example -> method -> budget ("100%", "25%") -> answer, answer_tokens, ended, seconds."""


def read_answers(path: str | os.PathLike[str], prompts: str | os.PathLike[str]) -> Answers:
    """The answers in a file of benchmarks/peers/kvpress_answers.py.

    Args:
      prompts: the file that `benchmark.run` wrote. Each answer carries the digest of the line that it answers.

    Raises:
      ConfigError: answers to other prompts. CheckpointError: a damaged file.
    """
    lines = pathlib.Path(prompts).read_bytes().splitlines()
    digests = {hashlib.sha256(line).hexdigest()[:16] for line in lines}
    found = records.read(path)
    if found is None:
        raise CheckpointError(f"{path} holds no answers; run benchmarks/peers/kvpress_answers.py first.")
    other = [line["name"] for line in found[1] if line.get("prompt") not in digests]
    if other:
        raise ConfigError(
            f"{len(other)} answers of {path} are to prompts that this run does not have ({', '.join(other[:3])}, ...); "
            f"answer the prompts of {prompts}."
        )
    return {line["name"]: line["arms"] for line in found[1]}


def score_answers(
    lm: LanguageModel, settings: benchmark.Settings, answers: Answers
) -> tuple[Record, list[Record]]:  # fmt: skip
    """Scores answers of other software with the tasks' own metrics.

    Args:
      answers: name of an example -> method -> budget ("100%", "25%") -> answer, answer_tokens, ended and seconds. All
        examples have the same methods and budgets.

    Returns:
      A header and records as `benchmark.run` gives them; kl, top1 and nll are None, kept is the share that the budget allows.

    Raises:
      ConfigError: names that the tasks do not have, or examples with other methods or budgets than the first.
    """
    tasks = benchmark.load_tasks(settings, lm)
    examples = {e.name: e for name, task in tasks.items() for e in benchmark.examples_of(lm, name, task, settings)}
    prompts = {name: benchmark.prompt_of(lm, examples[name], settings) for name in answers if name in examples}
    unknown = [name for name in answers if prompts.get(name) is None]
    if unknown:
        raise ConfigError(
            f"{len(unknown)} answers are to prompts that these tasks do not have ({', '.join(unknown[:3])}, ...); answer the "
            f"{benchmark.PROMPTS} that the same settings wrote."
        )
    arms = list(dict.fromkeys((m, b) for table in answers.values() for m, row in table.items() for b in row))
    found = []
    for name, table in answers.items():
        if {(m, b) for m, row in table.items() for b in row} != set(arms):
            raise ConfigError(f"The answers to {name} have other methods or budgets than the others; answer all alike.")
        example, prompt = examples[name], prompts[name]
        assert prompt is not None  # `unknown` is empty
        record = benchmark.blank_record(example) | {"length": len(prompt.tokens), "arms": {}}
        seen = len(prompt.tokens) - prompt.withheld
        for method, budget in arms:
            given = table[method][budget]
            result = {
                **{key: given[key] for key in ("answer", "answer_tokens", "ended")}, "nll": None, "tokens": 0, "kl": None,
                "top1": None, "kept": round(budgets.tokens_kept(float(budget.rstrip("%")) / 100, seen) / seen, 6),
                "retained": [], "seconds": given["seconds"],
            }  # fmt: skip
            record["arms"].setdefault(method, {})[budget] = benchmark.with_metrics(example, [given["answer"]], result)
        found.append(record)
    header = benchmark.describe(lm, settings, list(examples.values()), ())
    header["arms"] = [{"method": m, "budget": b, "policy": None, "granularity": None, "weights": None} for m, b in arms]
    return header, found


def beside(
    header: Record, found: Sequence[Record], other_header: Record, others: Sequence[Record]
) -> tuple[Record, list[Record]]:  # fmt: skip
    """Results and those of other software as one, for `benchmark_tables`: the examples and budgets that both have.

    Raises:
      ConfigError: names that the results do not have, the same method in both, or no budget in common.
    """
    mine = {record["name"]: record for record in found if record["arms"]}
    unknown = [record["name"] for record in others if record["name"] not in mine]
    if unknown:
        raise ConfigError(f"The results have no example {unknown[0]!r}; give answers to this run's prompts.")
    both = [{arm["method"] for arm in h["arms"]} for h in (header, other_header)]
    shared = [{arm["budget"] for arm in h["arms"] if arm["budget"] != "100%"} for h in (header, other_header)]
    if both[0] & both[1] or not shared[0] & shared[1]:
        raise ConfigError(
            f"Methods {sorted(both[0])} under {sorted(shared[0])} cannot stand beside {sorted(both[1])} under "
            f"{sorted(shared[1])}; give the methods different names, and one or more budgets in common."
        )
    kept = (shared[0] & shared[1]) | {"100%"}
    arms = [arm for arm in [*header["arms"], *other_header["arms"]] if arm["budget"] in kept]
    merged = [mine[r["name"]] | {"arms": mine[r["name"]]["arms"] | r["arms"]} for r in others]
    return header | {"arms": arms}, merged
