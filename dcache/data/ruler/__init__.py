"""RULER (Hsieh et al. 2024, arXiv 2404.06654): its 13 tasks at any length, in the 13 official configurations.

Prompts are the benchmark's own text (see `source`). What differs from the official generator, so that prompts are the same on
every machine and near their length even when they are short:

  * Words come from a fixed list of this package (see `words`).
  * Lengths include the chat template and the beginning of the answer, that is, all tokens that the model gets. The search for
    the amount of filler works in single units; where whole lines or documents miss the length by more than 2% (below about
    4,096 tokens), the last one is cut. Needles and documents with the answer never are.
  * Keys and values of needles are all different, so each question has one answer.
  * Questions come in an order that the seed decides, each at most once.
"""

import dataclasses
import functools
import logging
import pathlib
import random
from collections.abc import Iterator

from dcache.data.ruler import counting, niah, questions, tracking
from dcache.data.ruler.fitting import Draft, NoRoomError, fit
from dcache.data.ruler.scores import score, string_match_all, string_match_part
from dcache.errors import ConfigError
from dcache.tokenizer import Tokenizer

__all__ = [
    "ANSWER_TOKENS",
    "TASKS",
    "NoRoomError",
    "Sample",
    "samples",
    "score",
    "string_match_all",
    "string_match_part",
]

logger = logging.getLogger(__name__)

ANSWER_TOKENS = dict.fromkeys(niah.SETTINGS, 128) | {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
"""Tokens that the answer of each task may have."""

TASKS = tuple(ANSWER_TOKENS)
"""The names of the 13 tasks."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt.

    Attributes:
      input: the user's message, question included. answer_prefix: the beginning of the answer, behind the chat template.
      outputs: the answers, as `score` takes them.
      max_length: the length asked for. tokens: of the whole prompt (message in the chat template, and prefix), to which
        `ANSWER_TOKENS[task]` come.
      filler: what makes the prompt long: "essays", "installed_text" (where the essays' file is missing), "repeat", "needles",
        "noise", "words", "codes" or "documents".
    """

    input: str
    answer_prefix: str
    outputs: tuple[str, ...]
    task: str
    max_length: int
    tokens: int
    filler: str


def samples(
    task: str,
    tokenizer: Tokenizer,
    length: int,
    count: int,
    seed: int = 42,
    data_dir: str | pathlib.Path | None = None,
) -> list[Sample]:
    """Prompts of a task. Sample i depends on task, tokenizer, length, seed and i, not on count.

    Args:
      length: of the prompt together with its answer, in tokens. No prompt is longer, and none more than 2% shorter (`cwe` and
        `fwe`, which cannot be cut, keep this for tokenizers of whole words or parts of words).
      count: how many; the question answering tasks have fewer where the file has fewer questions that fit.
      data_dir: a folder with `ruler/essays.json` and the files of `questions.FILES`. Without the essays needles are hidden in
        `installed_text`, which depends on the installed versions.

    Raises:
      ConfigError: an unknown task, a length or count that is no whole number from 1, or (`NoRoomError`) a length that has no
        room for the task; the message says the smallest.
      LoadError: a data file that the task needs is missing or malformed, or the harness with the prompts is.
    """
    if task not in ANSWER_TOKENS:
        raise ConfigError(f"RULER has no task {task!r}; its tasks are {', '.join(TASKS)}.")
    for name, value in (("length", length), ("count", count)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {value!r}; give a whole number from 1.")
    answer = ANSWER_TOKENS[task]
    found: list[Sample] = []
    refused: list[NoRoomError] = []
    for draft, filler in _drafts(
        task, tokenizer, length, count, seed, None if data_dir is None else pathlib.Path(data_dir)
    ):
        measure = functools.partial(_prompt_tokens, tokenizer, draft.prefix)
        try:
            text = fit(draft, measure, length, answer)
        except NoRoomError as error:
            if not task.startswith("qa_"):
                raise
            refused.append(error)  # The documents with the answer are too long; another question may have shorter ones.
            continue
        found.append(Sample(text, draft.prefix, draft.outputs, task, length, measure(text), filler))
        if len(found) == count:
            break
    if not found:
        raise min(refused, key=lambda error: error.smallest)
    if refused:
        logger.warning("RULER %s: %d questions need more than %d tokens and were left out.", task, len(refused), length)
    return found


def _prompt_tokens(tokenizer: Tokenizer, prefix: str, text: str) -> int:
    return len(tokenizer.chat(text)) + len(tokenizer.encode(prefix))


def _drafts(
    task: str, tokenizer: Tokenizer, length: int, count: int, seed: int, data_dir: pathlib.Path | None
) -> Iterator[tuple[Draft, str]]:
    """Drafts one after the other, with the name of their filler; for question answering as many as there are questions."""

    def rng(name: str | int) -> random.Random:
        return random.Random(f"{seed}/{task}/{length}/{name}")  # Text as a seed is hashed, the same everywhere.

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text))

    if task in questions.FILES:
        asked, documents = questions.questions(task, data_dir)
        rng("order").shuffle(asked)
        for i, question in enumerate(asked):
            yield questions.draft(question, documents, rng(i), length), "documents"
        return
    for i in range(count):
        if task == "vt":
            yield tracking.draft(rng(i), length, count_tokens, ANSWER_TOKENS[task]), "noise"
        elif task == "cwe":
            yield counting.common_words(rng(i), length, count_tokens), "words"
        elif task == "fwe":
            yield counting.frequent_words(rng(i), length), "codes"
        else:
            yield niah.draft(task, rng(i), length, data_dir)
