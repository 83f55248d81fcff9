"""RULER's eight needle tasks (arXiv 2404.06654, section 3 and appendix B): facts hidden in a long text."""

import dataclasses
import itertools
import pathlib
import random
import uuid
from collections.abc import Callable, Sequence

from dcache.data.ruler import filler
from dcache.data.ruler.fitting import Draft
from dcache.data.ruler.source import constant
from dcache.data.ruler.words import pair

_DEPTHS = tuple(round(100 * i / 39) for i in range(40))  # Per cent of the text's sentences.


@dataclasses.dataclass(frozen=True)
class Needles:
    """The settings of one task.

    Attributes:
      haystack: "repeat" (one line again and again), "essay", or "needle" (needles of other keys).
      key, value: "words", "numbers" or "uuids".
      keys: number of needle keys; values: of each; queries: number of keys that are asked for.
    """

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


SETTINGS = {
    "niah_single_1": Needles("repeat"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value="uuids"),
    "niah_multikey_1": Needles("essay", keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", key="uuids", value="uuids"),
    "niah_multivalue": Needles("essay", values=4),
    "niah_multiquery": Needles("essay", keys=4, queries=4),
}
"""The official configurations."""


def _fresh(rng: random.Random, kind: str) -> str:
    if kind == "words":
        return pair(rng)
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _unused(rng: random.Random, kind: str, used: set[str]) -> str:
    """A key or value that is not in `used`, where it is added: the official generator may repeat one, which has two answers."""
    text = next(text for text in iter(lambda: _fresh(rng, kind), None) if text not in used)
    used.add(text)
    return text


def draft(task: str, rng: random.Random, length: int, data_dir: pathlib.Path | None) -> tuple[Draft, str]:
    """One prompt of a needle task, and what its needles are hidden in.

    The templates are those of the harness (`niah_utils.TEMPLATE`, `prepare_niah`'s needle and repeated line); the beginning of
    the answer, which stands there inside a formatted text, is written out here.
    """
    settings = SETTINGS[task]
    used: set[str] = set()
    keys = [_unused(rng, settings.key, used) for _ in range(settings.keys)]
    values = [[_unused(rng, settings.value, used) for _ in range(settings.values)] for _ in keys]
    template = constant("prepare_niah", "NEEDLE")

    def line(key: str, value: str) -> str:
        return template.format(type_needle_v=settings.value, key=key, value=value)

    needles = [line(key, value) for key, own in zip(keys, values, strict=True) for value in own]
    rng.shuffle(needles)
    asked = rng.sample(range(len(keys)), settings.queries)
    names = [keys[i] for i in asked]
    query = names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]
    outputs = tuple(value for i in asked for value in values[i])
    question, prefix = _wording(settings.value, query, single=len(outputs) == 1)
    places = rng.getrandbits(64)  # Each rendering draws its positions anew, from the same seed.

    if settings.haystack == "essay":
        words, label = filler.essays(data_dir)
        context, pieces = _in_essay(words, needles, places)
    else:
        label = {"repeat": "repeat", "needle": "needles"}[settings.haystack]
        repeated = constant("prepare_niah", "haystack")

        def next_line() -> str:
            if settings.haystack == "repeat":
                return repeated
            return line(_unused(rng, settings.key, used), _unused(rng, settings.value, used))

        context, pieces = _among_lines(next_line, needles, places)

    def render(units: int, cut: int) -> str:
        return question.format(context=context(units, cut), query=query)

    return Draft(render, prefix, outputs, len(needles), length, pieces), label


def _wording(kind: str, query: str, single: bool) -> tuple[str, str]:
    """The template with everything but {context} and {query} filled in, and the beginning of the answer."""
    template = constant("niah_utils", "TEMPLATE")
    if single:
        kind = kind.removesuffix("s")
        template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
    verb = "is" if single else "are"
    return (
        template.replace("{type_needle_v}", kind),
        f"The special magic {kind} for {query} mentioned in the provided text {verb}",
    )


_Context = Callable[[int, int], str]  # (units, pieces) -> filler with the needles in it; see `Draft.render`
_Pieces = Callable[[int], int]


def _in_essay(words: Sequence[str], needles: Sequence[str], places: int) -> tuple[_Context, _Pieces]:
    """Units are words, never cut. Needles stand at random, different ones of 40 depths, each in front of a sentence."""

    def context(units: int, _: int) -> str:
        found = filler.sentences(" ".join(itertools.islice(itertools.cycle(words), units)))
        depths = sorted(random.Random(places).sample(_DEPTHS, len(needles)))
        return " ".join(_insert(found, [int(len(found) * depth / 100) for depth in depths], needles))

    return context, lambda _: 0


def _among_lines(next_line: Callable[[], str], needles: Sequence[str], places: int) -> tuple[_Context, _Pieces]:
    """Units are lines, drawn one after the other as they are needed. Needles stand in front of random, different ones."""
    drawn: list[str] = []

    def lines(units: int) -> list[str]:
        while len(drawn) < units:
            drawn.append(next_line())
        return drawn[:units]

    def context(units: int, cut: int) -> str:
        found = lines(units)
        positions = sorted(random.Random(places).sample(range(units), len(needles)))
        _insert(found, positions, needles)
        return "\n".join(found + ([filler.cut(lines(units + 1)[-1], cut)] if cut else []))

    return context, lambda units: len(filler.pieces(lines(units + 1)[-1])) - 1


def _insert(found: list[str], positions: Sequence[int], needles: Sequence[str]) -> list[str]:
    """Puts each needle in front of its (ascending) position."""
    for position, needle in reversed(list(zip(positions, needles, strict=True))):
        found.insert(position, needle)
    return found
