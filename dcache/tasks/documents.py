"""The items of this project's harness tasks: benchmark files in, `datasets` out.

Each function is the `custom_dataset` of some task files. The harness calls it with the task's metadata: what the task
file says (`dataset`, `chat`) and what the run asks (see `dcache.tasks.request.Request`).
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dcache.data import benchmarks
from dcache.data.prompts import warn_truncated
from dcache.errors import LoadError
from dcache.evaluate import longbench as metrics
from dcache.tasks import WITHHELD
from dcache.tasks.request import Request

if TYPE_CHECKING:
    import datasets

Doc = dict[str, Any]


def longbench(*, dataset: str, chat: bool, **metadata: Any) -> "datasets.DatasetDict":
    """A LongBench task by the official protocol: filled prompts, cut in the middle to `length` tokens, template included.

    Without a data folder the items come from the hub. A task that the folder holds neither in `longbench/` is looked for
    among those of MiniLongBench (`minilongbench/`), whose prompts are filled already.

    Returns:
      The split "test" with prompt, answers, all_classes (empty but for trec), dataset, length (in words, as the
      benchmark gives it; counted for MiniLongBench, which gives none), cut and _id.

    Raises:
      LoadError: a missing file, a malformed line, or an unreachable hub.
      ConfigError: metadata of no use, or a length with no room for text.
    """
    request = Request.of(metadata)
    mini = None if request.data_dir is None else request.data_dir / "minilongbench" / f"MiniLongBench_{dataset}.json"
    if mini is not None and mini.is_file() and not _has_longbench(request, dataset):
        docs = [_mini_doc(mini, i, item, dataset) for i, item in enumerate(_items(mini)[: request.count])]
    else:
        rows, template, _ = benchmarks.longbench_rows(dataset, _source(request), count=request.count)
        docs = [_doc(benchmarks.fill(template, row), row, dataset, i) for i, row in enumerate(rows)]
    return _split(_cut(docs, request, chat, f"LongBench {dataset}"))


def withheld(*, dataset: str, chat: bool, **metadata: Any) -> "datasets.DatasetDict":
    """As `longbench`, but the policy sees the documents only; see `WITHHELD`.

    What the official prompt asks before the documents it asks again behind them: the first is left out, the second stands
    behind the mark and is never cut. A label right in front of the documents ("Report:") stays.
    """
    request = Request.of(metadata)
    rows, template, _ = benchmarks.longbench_rows(dataset, _source(request), count=request.count)
    before, _, after = template.partition("{context}")
    seen = before.rpartition("\n\n")[2] + "{context}"
    docs = []
    for i, row in enumerate(rows):
        # The mark must be the only one: the benchmark's own text may hold the character.
        shown, hidden = (benchmarks.fill(part, row).replace(WITHHELD, " ") for part in (seen, after))
        docs.append(_doc(shown, row, dataset, i) | {"tail": hidden})
    docs = _cut(docs, request, chat, f"{dataset}, question withheld")
    for doc in docs:
        doc["prompt"] += WITHHELD + doc.pop("tail")
    return _split(docs)


def xquad(*, chat: bool, **metadata: Any) -> "datasets.DatasetDict":
    """Questions about one paragraph each, from a file in SQuAD's format: the English part of XQuAD (arXiv 1910.11856).

    Returns:
      The split "test" with prompt, answers, dataset, cut and _id, the first question about each paragraph first. The question
      is never cut.
    """
    request = Request.of(metadata)
    path = request.file("ruler/xquad.en.json", "XQuAD's English part")
    docs: list[Doc] = []
    try:
        for article in _json(path)["data"]:
            for paragraph in article["paragraphs"]:
                for turn, question in enumerate(paragraph["qas"]):
                    tail = f"\n\nAnswer with a few words from the text.\nQuestion: {question['question']}\nAnswer:"
                    docs.append(
                        {
                            "prompt": _text(paragraph["context"]),
                            "tail": tail,
                            "answers": [_text(answer["text"]) for answer in question["answers"]],
                            "dataset": "xquad",
                            "_id": str(question["id"]),
                            "turn": turn,
                        }
                    )
    except (KeyError, TypeError) as error:
        raise LoadError(
            f"{path}, question {len(docs) + 1}: not in SQuAD's format ({error!r}); take the file from XQuAD again."
        ) from error
    docs.sort(key=lambda doc: doc.pop("turn"))  # so that the first so many are about as many paragraphs
    docs = _cut(docs[: request.count], request, chat, "XQuAD")
    for doc in docs:
        doc["prompt"] += doc.pop("tail")
    return _split(docs)


def conversations(**metadata: Any) -> "datasets.DatasetDict":
    """Texts of `length` tokens from English multi-turn conversations of OASST1 (arXiv 2304.07327).

    The KVP paper measures perplexity on conversations of OASST2 curated to about 4,096 tokens. These are from OASST1, and most
    are shorter, so whole conversations are joined until there are enough tokens, and the last one is cut. Of those
    that begin alike only the longest is taken. The order is that of the file.

    Returns:
      The split "test" with text, tokens (its length), dataset and _id.
    """
    request = Request.of(metadata)
    path = request.file("oasst/oa_questions.jsonl", "OASST1's conversations (input, output, lang)")
    rows = benchmarks.read_jsonl(path, {"input": str, "output": str})
    longest: dict[str, str] = {}
    for row in rows:
        text = f"{row['input'].strip()} {row['output'].strip()}"
        opening = text.split("### Assistant:")[0]
        if text.count("### Human:") > 1 and _english(row, text) and len(text) > len(longest.get(opening, "")):
            longest[opening] = text
    tokenizer, length = request.sized()
    pieces = []
    joined: list[int] = []
    for text in longest.values():
        joined += tokenizer.encode(text + "\n\n").tolist()
        if len(joined) >= length:
            pieces.append(joined[:length])
            joined = []
    return _texts(pieces[: request.count], request, path, "oasst1")


def wikitext(**metadata: Any) -> "datasets.DatasetDict":
    """WikiText-2's validation text (arXiv 1609.07843) in pieces of `length` tokens; what remains at the end is left out.

    Returns:
      The split "test" with text, tokens (its length), dataset and _id.
    """
    request = Request.of(metadata)
    path = request.file("wikitext2/valid.txt", "WikiText-2's validation text")
    tokenizer, length = request.sized()
    try:
        ids = tokenizer.encode(path.read_text(encoding="utf-8")).tolist()
    except UnicodeDecodeError as error:
        raise LoadError(f"Cannot read {path} as UTF-8 ({error}); take the file again.") from error
    pieces = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    return _texts(pieces[: request.count], request, path, "wikitext2")


def _source(request: Request) -> str | pathlib.Path:
    if request.data_dir is None:
        return benchmarks.LONGBENCH_HUB
    folder = request.data_dir / "longbench"
    if not folder.is_dir():
        raise LoadError(
            f"There is no directory {folder}; put LongBench's <task>.jsonl files and its config folder there."
        )
    return folder


def _has_longbench(request: Request, dataset: str) -> bool:
    folder = (request.data_dir or pathlib.Path()) / "longbench"
    return any((folder / name).is_file() for name in (f"{dataset}.jsonl", f"{dataset}_e.jsonl"))


def _doc(prompt: str, row: Mapping[str, Any], dataset: str, number: int) -> Doc:
    return {
        "prompt": prompt,
        "answers": [str(answer) for answer in row["answers"]],
        "all_classes": list(row.get("all_classes") or []),
        "dataset": dataset,
        "length": int(row.get("length") or len(prompt.split())),
        "_id": str(row.get("_id", number)),
    }


def _mini_doc(path: pathlib.Path, number: int, item: Any, dataset: str) -> Doc:
    """An item of MiniLongBench; trec's answers are one object that holds the answers and all classes."""
    try:
        answers, classes = item["answers"], None
        if isinstance(answers[0], Mapping):
            answers, classes = answers[0]["answers"], answers[0]["all_classes"]
        return _doc(_text(item["prompt"]), {"answers": answers, "all_classes": classes}, dataset, number)
    except (KeyError, TypeError, IndexError) as error:
        raise LoadError(
            f"{path}, item {number + 1}: expected an object with prompt and answers ({error!r}); take the file from "
            "MiniLongBench again."
        ) from error


def _cut(docs: Sequence[Doc], request: Request, chat: bool, what: str) -> list[Doc]:
    """The docs with prompts that fit, together with their `tail` if they have one, and whether each was cut."""
    if request.length is None:
        return [doc | {"cut": False} for doc in docs]
    tokenizer, length = request.sized()
    prefix = () if tokenizer.bos_id is None else (tokenizer.bos_id,)
    found = []
    for doc in docs:
        fitted = benchmarks.fit(doc["prompt"], tokenizer, length, chat, prefix, doc.get("tail", ""))
        found.append(doc | {"prompt": fitted.text, "cut": fitted.cut})
    warn_truncated(what, sum(doc["cut"] for doc in found), len(found), length)
    return found


def _texts(pieces: Sequence[Sequence[int]], request: Request, path: pathlib.Path, name: str) -> "datasets.DatasetDict":
    tokenizer, length = request.sized()
    if not pieces:
        raise LoadError(
            f"{path} has no text of {length} tokens for {name}; ask for a shorter length or take the whole file."
        )
    docs = []
    for i, piece in enumerate(pieces):
        text = tokenizer.decode(piece)
        # Counted again: text decoded and encoded may differ by a token where it was cut.
        docs.append({"text": text, "tokens": len(tokenizer.encode(text)), "dataset": name, "_id": str(i)})
    return _split(docs)


def _english(row: Mapping[str, Any], text: str) -> bool:
    """By the file's mark; without one, nearly all characters must be ASCII."""
    language = row.get("lang")
    return language == "en" if language else sum(map(str.isascii, text)) >= 0.98 * len(text)


def _json(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{path} is not JSON ({error}); take the file from the benchmark again.") from error


def _items(path: pathlib.Path) -> list[Any]:
    items = _json(path)
    if not isinstance(items, list) or not items:
        raise LoadError(f"{path} holds no list of items; take the file from the benchmark again.")
    return items


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r:.40}")
    return value


def _split(docs: Sequence[Doc]) -> "datasets.DatasetDict":
    import datasets

    return datasets.DatasetDict({"test": datasets.Dataset.from_list(list(docs))})


def longbench_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The official score of an answer and the paper's."""
    return {
        "score": metrics.score(doc["dataset"], results[0], doc["answers"], doc["all_classes"]),
        "rouge_l": metrics.paper_score(results[0], doc["answers"]),
    }


def xquad_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether the response holds one of the answers word for word; SQuAD's F1 and exact match (arXiv 1606.05250).

    The first is the score: chat models answer in sentences, which F1 counts against them.
    """
    given = metrics.normalise(results[0])
    return {
        "contains": float(any(f" {metrics.normalise(answer)} " in f" {given} " for answer in doc["answers"])),
        "f1": max(metrics.qa_f1(results[0], answer) for answer in doc["answers"]),
        "exact_match": float(any(given == metrics.normalise(answer) for answer in doc["answers"])),
    }


def rolling_results(doc: Mapping[str, Any], results: Sequence[float]) -> dict[str, tuple[float, int]]:
    """Log-likelihood of a text with the number of its tokens, words and bytes, over which the harness averages it."""
    (value,) = results
    text = doc["text"]
    return {
        "perplexity": (value, doc["tokens"]),
        "word_perplexity": (value, len(text.split())),
        "bits_per_byte": (value, len(text.encode("utf-8"))),
    }
