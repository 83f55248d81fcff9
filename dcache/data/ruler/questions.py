"""RULER's question answering (arXiv 2404.06654, section 3): SQuAD (`qa_1`) and HotpotQA (`qa_2`) among other documents."""

import dataclasses
import functools
import json
import pathlib
import random
from typing import Any

from dcache.data.ruler import filler
from dcache.data.ruler.fitting import Draft
from dcache.data.ruler.source import constant
from dcache.errors import LoadError

FILES = {
    "qa_1": ("ruler/dev-v2.0.json", "ruler/xquad.en.json"),
    "qa_2": ("ruler/hotpot_dev_distractor_v1.json", "ruler/hotpotqa60.json"),
}
"""Files below the data folder, the first that exists is taken: the official one, or one in its format."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, its answers, the documents that hold the answer, and those that come with them (more alike than others)."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]
    related: tuple[str, ...]


def questions(task: str, data_dir: pathlib.Path | None) -> tuple[list[Question], list[str]]:
    """All questions of a task with an answer, and all documents (sorted, each once).

    Raises:
      LoadError: there is no file for the task, or it is not in the benchmark's format.
    """
    folder = data_dir or pathlib.Path("<data_dir>")
    path = next((folder / name for name in FILES[task] if data_dir is not None and (folder / name).is_file()), None)
    if path is None:
        raise LoadError(
            f"RULER's {task} needs {' or '.join(str(folder / name) for name in FILES[task])}; put the file there."
        )
    found, documents = _read(task, path)
    return list(found), list(documents)


@functools.lru_cache(maxsize=2)
def _read(task: str, path: pathlib.Path) -> tuple[tuple[Question, ...], tuple[str, ...]]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        found = _squad(contents) if task == "qa_1" else _hotpot(contents)
        documents = tuple(sorted({document for q in found for document in (*q.gold, *q.related)}))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        kind = "SQuAD" if task == "qa_1" else "HotpotQA"
        raise LoadError(
            f"{path} is not in {kind}'s format ({error!r}); take the file from the benchmark again."
        ) from error
    if not found:
        raise LoadError(f"{path} holds no question with an answer; take the file from the benchmark again.")
    return tuple(found), documents


def _squad(contents: Any) -> list[Question]:
    found = []
    for article in contents["data"]:
        paragraphs = list(dict.fromkeys(paragraph["context"] for paragraph in article["paragraphs"]))
        for paragraph in article["paragraphs"]:
            context = paragraph["context"]
            related = tuple(other for other in paragraphs if other != context)
            for item in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in item["answers"]))
                if answers and not item.get("is_impossible", False):
                    found.append(Question(item["question"], answers, (context,), related))
    return found


def _hotpot(contents: Any) -> list[Question]:
    found = []
    for item in contents:
        supporting = {title for title, _ in item["supporting_facts"]}
        documents = {f"{title}\n{''.join(text)}": title in supporting for title, text in item["context"]}
        gold, related = (tuple(d for d, is_gold in documents.items() if is_gold is want) for want in (True, False))
        if gold:
            found.append(Question(item["question"], (item["answer"],), gold, related))
    return found


def draft(question: Question, documents: list[str], rng: random.Random, length: int) -> Draft:
    """One prompt: the documents in random order, then the question; texts as in the harness's `qa_utils`.

    Distractors are first the documents that come with the question, then others. Official prompts hold all ten documents of a
    HotpotQA question; here the supporting ones always and the rest as far as there is room, so that short prompts exist.
    Where there are too few documents the distractors begin again, numbered anew; the gold documents stand once.
    """
    template = constant("qa_utils", "CONFIG")["template"]
    form = constant("qa_utils", "DOCUMENT_PROMPT")
    own = {*question.gold, *question.related}
    distractors = rng.sample(question.related, len(question.related))
    others = [document for document in documents if document not in own]
    distractors += rng.sample(others, len(others))
    order = rng.getrandbits(64)

    def next_one(units: int) -> str:
        return distractors[units % len(distractors)]

    def render(units: int, cut: int) -> str:
        chosen = [*question.gold, *(next_one(i) for i in range(units))]
        if cut:
            chosen.append(filler.cut(next_one(units), cut).rstrip())
        random.Random(order).shuffle(chosen)
        context = "\n\n".join(form.format(i=i, document=document) for i, document in enumerate(chosen, 1))
        return template.format(context=context, query=question.text)

    def pieces(units: int) -> int:
        return len(filler.pieces(next_one(units))) - 1 if distractors else 0

    return Draft(
        render, constant("qa_utils", "CONFIG")["answer_prefix"].strip(), question.answers, 0,
        length if distractors else 0, pieces,
    )  # fmt: skip
