"""RULER's variable tracking, `vt` (arXiv 2404.06654, section 3): which variables hold a value, through a chain of copies."""

import random
import string
from collections.abc import Callable

from dcache.data.ruler import filler
from dcache.data.ruler.fitting import Draft, NoRoomError, fit
from dcache.data.ruler.source import constant

_HOPS = 4
_EXAMPLE_TOKENS = 500
_LETTERS, _EXAMPLE_LETTERS = 5, 3  # In a variable's name; shorter in the example, so that its names are no answer.


def draft(rng: random.Random, length: int, count_tokens: Callable[[str], int], answer: int) -> Draft:
    """One prompt: a solved example of about 500 tokens, then the question; texts as in the harness's `vt_utils.CONFIG`.

    One chain of one assignment and four copies. At least as many lines of noise as statements, so that no two stand together
    by need.
    """
    value, example_value = (str(number) for number in rng.sample(range(10000, 100000), 2))
    shown = _chain(rng, length, example_value, _EXAMPLE_LETTERS)

    def solved(text: str) -> str:
        return f"{text}{shown.prefix} {' '.join(shown.outputs)}"

    try:
        text = fit(shown, lambda text: count_tokens(solved(text)), _EXAMPLE_TOKENS, answer)
    except NoRoomError:  # A tokenizer with many tokens a word.
        text = shown.render(shown.least, 0)
    example = solved(text) + "\n\n\n\n"
    question = _chain(rng, length, value, _LETTERS)
    return Draft(
        lambda units, pieces: example + question.render(units, pieces),
        question.prefix.strip(),
        question.outputs,
        question.least,
        question.most,
        question.pieces,
    )


def _chain(rng: random.Random, length: int, value: str, letters: int) -> Draft:
    config = constant("vt_utils", "CONFIG")["variable_tracking"]
    noise = constant("vt_utils", "noise")
    names: list[str] = []
    while len(names) <= _HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    statements = [f"VAR {names[0]} = {value}"]
    statements += [f"VAR {name} = VAR {before} " for before, name in zip(names, names[1:], strict=False)]
    places = rng.getrandbits(64)

    def render(units: int, cut: int) -> str:
        found = [noise] * units
        positions = sorted(random.Random(places).sample(range(units), len(statements)))
        for position, statement in reversed(list(zip(positions, statements, strict=True))):
            found.insert(position, statement)
        if cut:
            found.append(filler.cut(noise, cut).rstrip() + "\n")
        return config["template"].format(context=" ".join(found), query=value)

    prefix = config["answer_prefix"].format(num_v=len(names), query=value)
    return Draft(render, prefix, tuple(names), len(statements) + 1, length, lambda _: len(filler.pieces(noise)) - 1)
