"""RULER's aggregation tasks (arXiv 2404.06654, section 3): the most common words of a list, `cwe`, and of a code, `fwe`."""

import math
import random
import string
from collections.abc import Callable, Sequence

from dcache.data.ruler.fitting import Draft
from dcache.data.ruler.source import constant
from dcache.data.ruler.words import WORDS, all_pairs

_COMMON = 10
_SHORT = 4096  # Below this length words repeat less often.


def common_words(rng: random.Random, length: int, count_tokens: Callable[[str], int]) -> Draft:
    """One prompt of `cwe`: a solved example, then the list; texts as in the harness's `cwe_utils.CONFIG`.

    Ten common words stand 30 times each and the others 3 times (6 and 1 below 4,096 tokens). A list that needs more different
    words than there are consists of pairs of words. The example is part of the prompt as in the paper; the harness's port
    leaves it out.
    """
    config = constant("cwe_utils", "CONFIG")
    often, seldom, example_words, example_often, example_seldom = (
        (6, 1, 20, 3, 1) if length < _SHORT else (30, 3, 40, 10, 3)
    )
    chosen = rng.sample(WORDS, example_words)
    numbered = _list(rng.getrandbits(64), chosen, example_often, example_seldom)
    # The example's answer is a numbered list like the answer asked for.
    answer = " ".join(f"{i}. {word}" for i, word in enumerate(chosen[:_COMMON], 1))
    example = config["template"].format(context=numbered) + config["answer_prefix"] + " " + answer + "\n"
    order = rng.getrandbits(64)
    pool: Sequence[str] = rng.sample(WORDS, len(WORDS))

    def render(units: int, _: int) -> str:
        return example + config["template"].format(context=_list(order, pool[:units], often, seldom))

    if count_tokens(render(len(pool), 0)) < length:
        pairs = all_pairs()
        pool = rng.sample(pairs, min(len(pairs), length))
    return Draft(render, config["answer_prefix"].strip(), tuple(pool[:_COMMON]), _COMMON + 1, len(pool), lambda _: 0)


def _list(order: int, words: Sequence[str], often: int, seldom: int) -> str:
    entries = list(words[:_COMMON]) * often + list(words[_COMMON:]) * seldom
    random.Random(order).shuffle(entries)
    return " ".join(f"{i}. {word}" for i, word in enumerate(entries, 1))


_EXPONENT = 2.0
_ZETA = math.pi**2 / 6  # Riemann's zeta of the exponent.
_FEWEST = 74  # So many words that the third most frequent code stands at least once more than the fourth.


def frequent_words(rng: random.Random, length: int) -> Draft:
    """One prompt of `fwe`: random codes of six letters, frequencies by Zipf's law; texts as in `fwe_utils.CONFIG`.

    The code of rank k stands n * k^-2 / zeta(2) times, rounded down; there are length / 50 codes. Rank 1 is noise ("..."), the
    answer is ranks 2 to 4.
    """
    config = constant("fwe_utils", "CONFIG")
    codes: dict[str, None] = {}
    while len(codes) < max(5, length // 50):
        codes["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    ranked = ["...", *list(codes)[1:]]
    order = rng.getrandbits(64)

    def render(units: int, _: int) -> str:
        words = [w for k, w in enumerate(ranked, 1) for _ in range(int(units * k**-_EXPONENT / _ZETA))]
        random.Random(order).shuffle(words)
        return config["template"].format(context=" ".join(words))

    return Draft(render, config["answer_prefix"].strip(), tuple(ranked[1:4]), _FEWEST, length, lambda _: 0)
