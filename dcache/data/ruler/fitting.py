"""Makes a prompt as long as asked: a search over how much filler it holds."""

import dataclasses
import math
from collections.abc import Callable

from dcache.errors import ConfigError

_TOLERANCE = 0.02  # A prompt may fall short of its length by this share of it.
_ENOUGH = 0.015  # Where the search stops: a little better than what is promised.
_INTERPOLATIONS = 8  # Then halving, which is slow but always ends.


class NoRoomError(ConfigError):
    """The shortest form of a prompt exceeds the length. `smallest` is the length that it needs, answer included."""

    def __init__(self, message: str, smallest: int):
        super().__init__(message)
        self.smallest = smallest


@dataclasses.dataclass(frozen=True)
class Draft:
    """A prompt whose amount of filler is still open.

    Attributes:
      render: (units, pieces) -> text. The filler has so many whole units and then `pieces` pieces of one more, the cut unit.
        The same arguments give the same text, and more filler is (nearly always) more tokens.
      prefix: the beginning of the answer, which follows the chat template.
      outputs: the answers.
      least: the smallest number of units; most: the largest.
      pieces: units -> the number of pieces of the unit that may be cut; 0 where none may.
    """

    render: Callable[[int, int], str]
    prefix: str
    outputs: tuple[str, ...]
    least: int
    most: int
    pieces: Callable[[int], int]


def fit(draft: Draft, measure: Callable[[str], int], length: int, answer: int) -> str:
    """The text of a draft that has, with the answer, at most `length` tokens and at least 98% of it.

    Whole units where they come near enough; otherwise the last one is cut. A draft whose filler is exhausted stays shorter.

    Args:
      measure: tokens of the prompt with a given text. answer: tokens kept free for the answer.

    Raises:
      NoRoomError: not even the smallest number of units fits.
    """
    limit = length - answer
    enough = math.ceil(length * (1 - _ENOUGH)) - answer
    smallest = measure(draft.render(draft.least, 0))
    if smallest > limit:
        raise NoRoomError(
            f"The shortest prompt and {answer} tokens for the answer need {smallest + answer} tokens, but the length is "
            f"{length}; ask for at least {smallest + answer}.",
            smallest + answer,
        )
    units, tokens = _largest(
        lambda n: measure(draft.render(n, 0)), draft.least, smallest, draft.most + 1, enough, limit
    )
    pieces = draft.pieces(units)
    if tokens + answer >= length * (1 - _TOLERANCE) or not pieces:
        return draft.render(units, 0)
    cut, _ = _largest(lambda n: measure(draft.render(units, n)), 0, tokens, pieces + 1, enough, limit)
    return draft.render(units, cut)


def _largest(
    size: Callable[[int], int], low: int, low_size: int, high: int, enough: int, limit: int
) -> tuple[int, int]:
    """A number n in low..high-1 and its size, at most `limit`: one of at least `enough`, or else the largest n.

    Sizes are nearly linear in n, so interpolation finds it in three or four steps; halving bounds the number of steps.
    """
    best = latest = (low, low_size)
    step = 0
    while best[1] < enough and high - best[0] > 1:
        if step == 0:
            guess = low + 32
        elif step < _INTERPOLATIONS:
            slope = (latest[1] - low_size) / (latest[0] - low)
            guess = latest[0] + int(((enough + limit) / 2 - latest[1]) / max(slope, 1e-3))
        else:
            guess = (best[0] + high) // 2
        guess = min(max(guess, best[0] + 1), high - 1)
        latest = (guess, size(guess))
        if latest[1] <= limit:
            best = latest
        else:
            high = guess
        step += 1
    return best
