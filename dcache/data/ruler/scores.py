"""RULER's metrics (arXiv 2404.06654): which of the answers a prediction contains."""

import re
from collections.abc import Sequence

from dcache.errors import ConfigError


def clean(prediction: str) -> str:
    """The prediction as it is compared: control characters become line ends, and outer white space goes."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """The share of the references that the prediction contains, whatever the case."""
    found = _found(prediction, references)
    return sum(found) / len(found)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """1 if the prediction contains one of the references, whatever the case, else 0."""
    return float(any(_found(prediction, references)))


def score(task: str, prediction: str, outputs: Sequence[str]) -> float:
    """The official score of a task, 0 to 1: any answer counts in question answering, all of them elsewhere."""
    return (string_match_part if task.startswith("qa_") else string_match_all)(prediction, outputs)


def _found(prediction: str, references: Sequence[str]) -> list[bool]:
    if not references:
        raise ConfigError("There are no references to compare with; give at least one answer.")
    text = clean(prediction).lower()
    return [reference.lower() in text for reference in references]
