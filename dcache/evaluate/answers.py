"""How answers go wrong, how long they are, and at which lengths of the context.

One example is a record of a benchmark run (`dcache.evaluate.runs`): `record["arms"][method][budget]` holds a policy's answer.
"""

import re
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]

FULL = ("full", "100%")
"""The arm that everything is measured against."""

MODES = ("repetitive", "overlength", "incorrect")

LOOP = 12
"""Fewest words of a loop; three copies of a shorter phrase may be the answer to a question."""

COPIES = 3

_EXACT = r"(gsm8k|bbh|boolq|dcache_ruler)\w*"


def right(task: str, score: float) -> bool:
    """Whether an answer counts as right: a full score where a task is exact, half of it elsewhere (F1, ROUGE-L)."""
    return score >= (1.0 - 1e-6 if re.fullmatch(_EXACT, task) else 0.5)


def repetitive(answer: str) -> bool:
    """Whether an answer ends in a loop.

    Its last words (runs of letters and digits, or single signs; case counts) repeat a block of p words `COPIES` times or more
    in a row, and the repetition covers at least `LOOP` words; the last copy may be unfinished, as answers are cut. In other
    words: the longest suffix of period p has at least max(COPIES p, LOOP) words, for some p.
    """
    words = re.findall(r"\w+|[^\w\s]", answer)
    for period in range(1, len(words) // COPIES + 1):
        same = 0
        while same + period < len(words) and words[-1 - same] == words[-1 - same - period]:
            same += 1
        if same + period >= max(COPIES * period, LOOP):
            return True
    return False


def mode(record: Record, method: str, budget: str) -> str | None:
    """One of `MODES`, or "right", for an answer (paper, Table 8); None where the full cache is wrong or nothing was answered.

    The paper names the modes and does not define them. Here a wrong answer is *repetitive* if it ends in a loop; else
    *overlength* if it did not end within the tokens allowed, while the full cache's did; else *incorrect*. So each wrong answer
    has one mode, and a loop that runs into the limit counts once, as a loop.
    """
    full, ours = record["arms"][FULL[0]][FULL[1]], record["arms"][method][budget]
    if None in (full.get("score"), ours.get("score"), full.get("answer"), ours.get("answer")):
        return None
    if not right(record["task"], full["score"]):
        return None
    if right(record["task"], ours["score"]):
        return "right"
    if repetitive(ours["answer"]):
        return "repetitive"
    return "overlength" if full["ended"] and not ours["ended"] else "incorrect"


def lengths(record: Record, method: str, budget: str) -> tuple[float, float] | None:
    """Tokens of an answer and of the full cache's, or None where there is no answer.

    The response length ratio is the mean of the first over the mean of the second. A mean of ratios would be ruled by answers
    of a word or two, where one token more is twice the length.
    """
    full, ours = record["arms"][FULL[0]][FULL[1]], record["arms"][method][budget]
    if not full.get("answer_tokens") or ours.get("answer_tokens") is None:
        return None
    return float(ours["answer_tokens"]), float(full["answer_tokens"])


def length_bin(record: Record) -> str:
    """The power of two nearest to the length of the prompt as the model read it, such as "2K" for 1,449 to 2,896 tokens.

    For generated prompts that were made for a length (RULER), that length.
    """
    made = record.get("doc_length") if record["task"].startswith("dcache_ruler") else None
    tokens = made or record["length"]
    # Nearest in ratio; integers, so that no logarithm decides a tie.
    power = 1
    while power * power * 2 < tokens * tokens:
        power *= 2
    return f"{power // 1024}K" if power >= 1024 else str(power)


def bins(records: Sequence[Record]) -> list[str]:
    """The bins that occur, shortest first."""

    def size(name: str) -> int:
        return 1024 * int(name[:-1]) if name.endswith("K") else int(name)

    return sorted({length_bin(record) for record in records}, key=size)
