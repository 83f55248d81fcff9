"""LongBench's own scores, and the averages its scripts report.

Bai et al. 2023, arXiv 2308.14508: each task has one metric; of several reference answers the best one counts; of the
few-shot tasks only the first line of an answer is scored. Chinese tasks are not part of this project.
"""

import collections
import dataclasses
import difflib
import re
import string
from collections.abc import Callable, Mapping, Sequence

from dcache.errors import ConfigError

GROUPS: Mapping[str, tuple[str, ...]] = {
    "single-document": ("narrativeqa", "qasper", "multifieldqa_en"),
    "multi-document": ("hotpotqa", "2wikimqa", "musique"),
    "summarisation": ("gov_report", "qmsum", "multi_news"),
    "few-shot": ("trec", "triviaqa", "samsum"),
    "synthetic": ("passage_count", "passage_retrieval_en"),
    "code": ("lcc", "repobench-p"),
}
"""The English tasks by group, as in the paper's Table 2."""

TASKS = tuple(task for tasks in GROUPS.values() for task in tasks)

BUCKETS: Mapping[str, tuple[float, float]] = {"0-4k": (0, 4000), "4-8k": (4000, 8000), "8k+": (8000, float("inf"))}
"""LongBench-E's ranges of an item's length in words: lowest (included) and highest (excluded)."""


@dataclasses.dataclass(frozen=True)
class Averages:
    """Scores from 0 to 100.

    Attributes:
      tasks: dataset -> mean over its items, rounded to two decimals, as the official script writes it.
      groups: group -> mean over those of its tasks that have scores.
      overall: mean over the tasks. Group and overall are means of rounded task scores, not rounded again.
    """

    tasks: Mapping[str, float]
    groups: Mapping[str, float]
    overall: float


def score(
    dataset: str, prediction: str, answers: Sequence[str], all_classes: Sequence[str] | None = None
) -> float:  # fmt: skip
    """The official score of one prediction, from 0 to 1: post-processed, against the answer that fits best.

    Args:
      dataset: a task's name, with or without LongBench-E's "_e".
      all_classes: the names of all classes; only `trec` has and needs them.

    Raises:
      ConfigError: a dataset that is no English task of LongBench, or no classes where they are needed.
    """
    task = task_of(dataset)
    if task in GROUPS["few-shot"]:
        prediction = prediction.lstrip("\n").split("\n")[0]
    if task == "trec":
        if not all_classes:
            raise ConfigError("trec is scored against all its classes; pass the item's all_classes.")
        return max((classification(prediction, answer, all_classes) for answer in answers), default=0.0)
    return max((_METRICS[task](prediction, answer) for answer in answers), default=0.0)


def paper_score(prediction: str, answers: Sequence[str]) -> float:
    """ROUGE-L, best of the answers, from 0 to 1: how the DistillCache paper scores every LongBench task."""
    return max((rouge_l(prediction, answer) for answer in answers), default=0.0)


def averages(scores: Mapping[str, Sequence[float]]) -> Averages:
    """Means by task, group and overall of the scores (0 to 1) of each dataset.

    Raises:
      ConfigError: an unknown dataset, one without scores or given twice (as `x` and `x_e`), or no dataset at all.
    """
    by_task: dict[str, float] = {}
    tasks: dict[str, float] = {}
    for dataset, values in scores.items():
        task = task_of(dataset)
        if not values or task in by_task:
            raise ConfigError(f"{dataset} has {'two sets of' if values else 'no'} scores; give each dataset one list.")
        tasks[dataset] = by_task[task] = _percent(values)
    if not tasks:
        raise ConfigError("There are no scores to average; give at least one dataset.")
    groups = {}
    for group, members in GROUPS.items():
        found = [by_task[task] for task in members if task in by_task]
        if found:
            groups[group] = sum(found) / len(found)
    return Averages(tasks, groups, sum(tasks.values()) / len(tasks))


def by_length(scores: Sequence[float], lengths: Sequence[int]) -> dict[str, float]:
    """LongBench-E's report of one dataset: mean by range of length, 0 to 100, two decimals; empty ranges are left out.

    Args:
      scores: [items], 0 to 1. lengths: [items], the items' own `length` field, in words.

    Raises:
      ConfigError: not one length for each score.
    """
    if len(scores) != len(lengths):
        raise ConfigError(f"There are {len(scores)} scores but {len(lengths)} lengths; give one length for each score.")
    found = {}
    for name, (low, high) in BUCKETS.items():
        values = [value for value, length in zip(scores, lengths, strict=True) if low <= length < high]
        if values:
            found[name] = _percent(values)
    return found


def task_of(dataset: str) -> str:
    """The English task that a dataset ("hotpotqa" or "hotpotqa_e") belongs to.

    Raises:
      ConfigError: there is none.
    """
    task = dataset.removesuffix("_e")
    if task not in TASKS:
        raise ConfigError(
            f"{dataset!r} is no English LongBench dataset; known: {', '.join(TASKS)} (each also with _e)."
        )
    return task


def qa_f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over words, counted with multiplicity, after SQuAD's normalisation."""
    given, expected = normalise(prediction).split(), normalise(answer).split()
    common = sum((collections.Counter(given) & collections.Counter(expected)).values())
    return 2 * common / (len(given) + len(expected)) if common else 0.0


def normalise(text: str) -> str:
    """SQuAD's normal form: lower case, no ASCII punctuation, no articles, single spaces."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L F1 of whole summaries as the `rouge` package counts it, which LongBench uses (Lin 2004, section 3.2).

    Full stops end sentences; words are what spaces separate, in their own case. The common words are the *distinct*
    ones in any longest common subsequence of a sentence of each; precision and recall relate their number to that of
    distinct words.
    """
    given, expected = _sentences(prediction), _sentences(answer)
    words_given = {word for sentence in given for word in sentence}
    words_expected = {word for sentence in expected for word in sentence}
    if not words_given or not words_expected:
        return 0.0
    common: set[str] = set()
    for reference in expected:
        for sentence in given:
            common |= _common_words(reference, sentence)
    return 2 * len(common) / (len(words_given) + len(words_expected))


def classification(prediction: str, answer: str, all_classes: Sequence[str]) -> float:
    """1 / n if the right class is among the n classes named in the prediction; parts of its name are not counted."""
    named = [name for name in all_classes if name in prediction and (name == answer or name not in answer)]
    return 1 / len(named) if answer in named else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """The share of the numbers in the prediction that are the paragraph's ("Paragraph 7")."""
    found = re.search(r"Paragraph (\d+)", answer)
    if not found:
        raise ConfigError(
            f"The answer {answer!r} of passage retrieval does not name a paragraph; expected 'Paragraph 7'."
        )
    return count(prediction, found[1])


def count(prediction: str, answer: str) -> float:
    """The share of the numbers in the prediction that equal the answer."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, answer: str) -> float:
    """Edit similarity (difflib's ratio, whole percents) of the first line that is neither comment nor Markdown fence."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def _sentences(text: str) -> list[list[str]]:
    # What is only white space between two full stops counts as a sentence of one empty word there.
    return [part.split() or [""] for part in text.split(".") if part]


def _common_words(x: Sequence[str], y: Sequence[str]) -> set[str]:
    """The distinct words of the longest common subsequence that prefers, among equally long ones, late words of x."""
    table = [[0] * (len(y) + 1)]
    for word in x:
        above, row = table[-1], [0]
        for j, other in enumerate(y):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        table.append(row)
    i, j = len(x), len(y)
    found = set()
    while i and j:
        if x[i - 1] == y[j - 1]:
            found.add(x[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def _percent(values: Sequence[float]) -> float:
    return round(100 * sum(values) / len(values), 2)


_BY_GROUP: Mapping[str, Callable[[str, str], float]] = {
    "single-document": qa_f1,
    "multi-document": qa_f1,
    "summarisation": rouge_l,
    "code": code_similarity,
}
_METRICS: Mapping[str, Callable[[str, str], float]] = {
    **{task: metric for group, metric in _BY_GROUP.items() for task in GROUPS[group]},
    "triviaqa": qa_f1,
    "samsum": rouge_l,
    "passage_count": count,
    "passage_retrieval_en": retrieval,
}
