"""The text that hides the needles, and how text is cut into sentences and pieces."""

import functools
import json
import logging
import pathlib
import re

from dcache.data.text import installed_text
from dcache.errors import LoadError

logger = logging.getLogger(__name__)

ESSAYS = "ruler/essays.json"
"""Paul Graham's essays below the data folder: {"text": all of them}."""


def essays(data_dir: pathlib.Path | None) -> tuple[tuple[str, ...], str]:
    """The words of the essays, and "essays"; where the file is missing those of `installed_text`, and "installed_text".

    Raises:
      LoadError: the file is there but not as described.
    """
    path = None if data_dir is None else data_dir / ESSAYS
    if path is not None and path.is_file():
        return _words(path), "essays"
    if path is not None:
        logger.warning(
            "There is no file %s: RULER's needles are hidden in this machine's installed texts instead.", path
        )
    return _installed_words(), "installed_text"


@functools.lru_cache(maxsize=2)
def _words(path: pathlib.Path) -> tuple[str, ...]:
    try:
        words = tuple(json.loads(path.read_text(encoding="utf-8"))["text"].split())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(
            f'Cannot read {path} ({error!r}); expected JSON with the essays as one text: {{"text": ...}}.'
        ) from error
    if not words:
        raise LoadError(f"{path} holds no text; put the essays there or remove the file.")
    return words


@functools.cache
def _installed_words() -> tuple[str, ...]:
    words = tuple(word for document in installed_text() for word in document.text.split())
    if not words:
        raise LoadError(f"This Python has no documentation to hide needles in; give a data folder with {ESSAYS}.")
    return words


def sentences(text: str) -> list[str]:
    """Splits behind full stops, question and exclamation marks. Needles stand between sentences, so nothing finer is needed."""
    return re.split(r"(?<=[.!?])\s+", text)


def pieces(text: str) -> list[str]:
    """Words and the single characters between them; joined they are the text again."""
    return re.findall(r"\w+|\W", text)


def cut(text: str, count: int) -> str:
    """The first `count` pieces."""
    return "".join(pieces(text)[:count])
