"""The paper's training prompts, LongBench 2wikimqa and GSM8K train, from the hub (through `datasets`) or a directory.

A local directory of LongBench holds `<task>.jsonl` (or `<task>_e.jsonl`) and `config/dataset2prompt.json`, one of GSM8K
holds `train.jsonl` and `test.jsonl`, as the benchmarks' own repositories have them.
"""

import dataclasses
import json
import re
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcache.data.prompts import Prompt, truncate_middle, warn_truncated
from dcache.errors import ConfigError, LoadError
from dcache.tokenizer import Tokenizer

LONGBENCH_HUB = "Xnhyacinth/LongBench"
"""LongBench as Parquet files; the original repository needs a loading script, which `datasets` 4 and newer refuse."""

LONGBENCH_PROMPTS = "https://raw.githubusercontent.com/THUDM/LongBench/main/LongBench/config/dataset2prompt.json"
"""The official prompts, used where the data does not come with a `config` directory."""

GSM8K_HUB = "openai/gsm8k"

_LONGBENCH_FIELDS = {"input": str, "context": str, "answers": list}
_GSM8K_FIELDS = {"question": str, "answer": str}

NO_CHAT = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")
"""LongBench asks these without a chat template: their prompts are completions of code or of few-shot examples."""


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A message that fits into a prompt.

    Attributes:
      text: the message, cut in the middle if it had to be, without chat template, prefix and tail.
      tokens: int32[T], the whole prompt. cut: whether the message was cut.
    """

    text: str
    tokens: np.ndarray
    cut: bool


def longbench_prompts(
    task: str,
    tokenizer: Tokenizer,
    length: int,
    source: str | Path = LONGBENCH_HUB,
    *,
    templates: str | Path | None = None,
    count: int | None = None,
    prefix: Sequence[int] = (),
) -> list[Prompt]:
    """Prompts of a LongBench task by the official protocol.

    The filled prompt is cut in the middle (first and last half kept, decoded again) *before* the chat template is
    applied, so that question and template survive. How many were cut is logged as a warning.

    Args:
      task: such as "2wikimqa"; "2wikimqa_e" asks for LongBench-E.
      length: the longest prompt, in tokens, chat template included.
      source: a local directory, or the id of a repository on the hub.
      templates: a `dataset2prompt.json` (path or URL); default: that of the directory, or the official one.
      count: the first so many items; None for all.
      prefix: tokens before a prompt without chat template (beginning of sequence); counted in `length`.

    Raises:
      LoadError: missing file, malformed line, unreachable hub, or no prompt text for the task.
      ConfigError: a length that the chat template alone exceeds.
    """
    base = task.removesuffix("_e")
    rows, template, origin = longbench_rows(task, source, templates=templates, count=count)
    prompts = []
    cut = 0
    for i, row in enumerate(rows):
        fitted = fit(fill(template, row), tokenizer, length, base not in NO_CHAT, prefix)
        cut += fitted.cut
        answers = tuple(str(answer) for answer in row["answers"])
        continuation = np.asarray(tokenizer.encode(answers[0] if answers else ""), np.int32)
        prompts.append(Prompt(fitted.tokens, "retrieval", continuation, answers, f"{origin}@{i}", base))
    warn_truncated(f"LongBench {task}", cut, len(prompts), length)
    return prompts


def longbench_rows(
    task: str,
    source: str | Path = LONGBENCH_HUB,
    *,
    templates: str | Path | None = None,
    count: int | None = None,
) -> tuple[list[dict[str, Any]], str, str]:
    """The items of a LongBench task, its prompt with "{context}" and "{input}" still to be filled, and the data's name.

    Args and errors: see `longbench_prompts`.
    """
    base = task.removesuffix("_e")
    directory = _directory(source)
    if directory is None:
        rows, origin = _hub(str(source), task, "test", _LONGBENCH_FIELDS), f"{source}/{task}"
        template = _template(templates or LONGBENCH_PROMPTS, base)
    else:
        path = _first_file(directory, (f"{task}.jsonl", f"{base}_e.jsonl"))
        rows, origin = read_jsonl(path, _LONGBENCH_FIELDS, count), path.stem
        template = _template(templates or directory / "config" / "dataset2prompt.json", base)
    return rows[:count], template, origin


def fill(template: str, row: Mapping[str, Any]) -> str:
    """A LongBench template with an item's context and input, in one pass: a context may itself hold "{input}"."""
    parts = re.split(r"\{(context|input)\}", template)
    return "".join(row[part] if k % 2 else part for k, part in enumerate(parts))


def gsm8k_prompts(
    split: str,
    tokenizer: Tokenizer,
    length: int,
    source: str | Path = GSM8K_HUB,
    *,
    exclude: Collection[str] = (),
    count: int | None = None,
) -> list[Prompt]:
    """Questions of GSM8K as chat messages; the continuation is the worked solution without calculator marks.

    The paper trains on questions "that are not few-shot exemplars". The eight standard chain-of-thought exemplars are
    not from GSM8K: their authors composed them, and distinctive phrases of them do not occur in 2,500 training
    questions that were searched. So nothing is left out for them. Exemplars that are drawn from the training set (as
    evaluation harnesses do) are left out by passing their questions as `exclude`; they are compared without regard to
    case, punctuation and white space.

    Args:
      split: "train" or "test".
      length: the longest prompt, in tokens; longer ones are cut in the middle, with a warning.
      source: a local directory, or the id of a repository on the hub.
      count: the first so many questions that are not excluded; None for all.

    Raises:
      LoadError: missing file, malformed line, an answer without "####", or unreachable hub.
      ConfigError: unknown split, or a length that the chat template alone exceeds.
    """
    if split not in ("train", "test"):
        raise ConfigError(f"GSM8K has no split {split!r}; use 'train' or 'test'.")
    directory = _directory(source)
    if directory is None:
        rows, origin = _hub(str(source), "main", split, _GSM8K_FIELDS), str(source)
    else:
        path = _first_file(directory, (f"{split}.jsonl",))
        rows, origin = read_jsonl(path, _GSM8K_FIELDS), str(path)
    excluded = {_key(question) for question in exclude}
    prompts: list[Prompt] = []
    cut = 0
    for i, row in enumerate(rows):
        if _key(row["question"]) in excluded:
            continue
        if count is not None and len(prompts) == count:
            break
        solution, mark, answer = row["answer"].rpartition("####")
        if not mark:
            raise LoadError(
                f"{origin}, item {i + 1}: the answer lacks its '####' line; take the file from GSM8K again."
            )
        fitted = fit(row["question"], tokenizer, length, True)
        cut += fitted.cut
        answer = answer.strip().replace(",", "")
        text = f"{re.sub(r'<<.*?>>', '', solution).strip()}\nThe answer is {answer}."
        continuation = np.asarray(tokenizer.encode(text), np.int32)
        prompts.append(Prompt(fitted.tokens, "retrieval", continuation, (answer,), f"gsm8k-{split}@{i}", "gsm8k"))
    warn_truncated(f"GSM8K {split}", cut, len(prompts), length)
    return prompts


def _key(question: str) -> str:
    return re.sub(r"\W+", " ", question.lower()).strip()


def fit(
    message: str, tokenizer: Tokenizer, length: int, chat: bool, prefix: Sequence[int] = (), tail: str = ""
) -> Fitted:
    """Cuts a message in the middle, if it must, so that the whole prompt has at most `length` tokens.

    Args:
      chat: whether the chat template is applied. prefix: tokens in front of a prompt without template.
      tail: text that follows the message in the prompt and is never cut.

    Raises:
      ConfigError: a length that the template and the tail alone exceed.
    """

    def wrap(text: str) -> np.ndarray:
        text += tail
        tokens = (
            tokenizer.chat(text) if chat else np.concatenate([np.asarray(prefix, np.int32), tokenizer.encode(text)])
        )
        return np.asarray(tokens, np.int32)

    tokens = wrap(message)
    if len(tokens) <= length:
        return Fitted(message, tokens, False)
    ids = tokenizer.encode(message)
    allowed = length - len(wrap(""))
    while allowed > 0:
        head = allowed // 2
        kept = truncate_middle(ids, allowed)
        # Decoded in two parts, as LongBench does: a token of the seam must not be joined with its new neighbour.
        text = tokenizer.decode(kept[:head]) + tokenizer.decode(kept[head:])
        tokens = wrap(text)
        if len(tokens) <= length:
            return Fitted(text, tokens, True)
        allowed -= len(tokens) - length  # Text decoded and encoded again may be a little longer.
    raise ConfigError(
        f"A prompt of {length} tokens has no room beside the chat template and what must stay; allow longer prompts."
    )


def _directory(source: str | Path) -> Path | None:
    """The source as a directory, or None if it is a hub id ("owner/name")."""
    path = Path(source)
    if path.is_dir():
        return path
    if isinstance(source, str) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        return None
    raise LoadError(f"There is no directory {str(source)!r}; give a directory with the data or a hub id 'owner/name'.")


def _first_file(directory: Path, names: Sequence[str]) -> Path:
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise LoadError(f"{str(directory)!r} holds no {' or '.join(dict.fromkeys(names))}; put the benchmark's file there.")


def _template(source: str | Path, task: str) -> str:
    try:
        if str(source).startswith("https://"):
            with urllib.request.urlopen(str(source), timeout=30) as response:
                text = response.read().decode("utf-8")
        else:
            text = Path(source).read_text(encoding="utf-8")
        return json.loads(text)[task]
    except (OSError, ValueError) as error:
        raise LoadError(
            f"Cannot read LongBench's prompts from {str(source)!r} ({error}); give its dataset2prompt.json."
        ) from error
    except (KeyError, TypeError) as error:
        raise LoadError(
            f"{str(source)!r} has no prompt for the LongBench task {task!r}; check the task's name."
        ) from error


def _invalid(row: Any, fields: Mapping[str, type]) -> str | None:
    """What is wrong with a row, or None."""
    if not isinstance(row, Mapping):
        return f"expected an object with {', '.join(fields)}"
    for name, kind in fields.items():
        if not isinstance(row.get(name), kind):
            return f"the field {name!r} is missing or not a {kind.__name__}"
    return None


def read_jsonl(path: Path, fields: Mapping[str, type], count: int | None = None) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, each of which has certain fields of certain types.

    Args:
      count: the first so many, and the file is read no further: what is wrong behind them does not matter. None: all.

    Raises:
      LoadError: the file is missing, not UTF-8 or without items, or a line is malformed; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(
            f"Cannot read {str(path)!r} as UTF-8 ({error}); take the file from the benchmark again."
        ) from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if count is not None and len(rows) == count:
            break
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            problem = _invalid(row, fields)
        except ValueError as error:
            problem = f"not JSON ({error})"
        if problem:
            raise LoadError(
                f"{path}, line {number}: {problem}; mend the line or take the file from the benchmark again."
            )
        rows.append(row)
    if not rows:
        raise LoadError(f"Cannot read {str(path)!r} (it holds no items); take the file from the benchmark again.")
    return rows


def _hub(repository: str, name: str, split: str, fields: Mapping[str, type]) -> list[dict[str, Any]]:
    import datasets

    try:
        rows = list(datasets.load_dataset(repository, name, split=split))
    except Exception as error:  # Network, authorisation and format errors come from several libraries.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise LoadError(
            f"Cannot load {name!r} of {repository!r} from the hub ({reason}); check the name and the network, "
            "or give a local directory with the benchmark's files."
        ) from error
    for i, row in enumerate(rows):
        problem = _invalid(row, fields)
        if problem:
            raise LoadError(
                f"{repository}, {name}, item {i + 1}: {problem}; give a repository in the benchmark's own format."
            )
    return rows
