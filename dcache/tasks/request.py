"""What a run asks of a task, read from the metadata that the harness passes on."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

from dcache.errors import ConfigError, LoadError
from dcache.load import find_directory
from dcache.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

_TOKENIZER_KEYS = ("tokenizer", "pretrained", "model")  # The last two: the harness's CLI passes the model's arguments.


@dataclasses.dataclass(frozen=True)
class Request:
    """What a run asks of a task.

    Attributes:
      tokenizer: the model's, or None: then nothing can be counted in tokens.
      data_dir: a folder with a sub-folder for each benchmark (`longbench/`, `ruler/` ...); None: the hub.
      length: the longest prompt, or the length of a text, in tokens; None: as long as it is.
      count: the first so many items; None: all.
    """

    tokenizer: Tokenizer | None = None
    data_dir: pathlib.Path | None = None
    length: int | None = None
    count: int | None = None

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "Request":
        """Reads the keys `tokenizer` (an object, a directory, a hub id, "tiny" or "smollm2"; also called `pretrained` or
        `model`), `data_dir`, `length` and `count`; others are left alone.

        Raises:
          ConfigError: a length or count that is no whole number from 1, or a length without a tokenizer.
          LoadError: the tokenizer or the folder does not exist.
        """
        given = next((metadata[key] for key in _TOKENIZER_KEYS if metadata.get(key) is not None), None)
        length, count = (_whole(metadata.get(key), key) for key in ("length", "count"))
        if length is not None and given is None:
            raise ConfigError(
                f"length is {length} tokens but there is no tokenizer; add 'tokenizer' (a model's name or directory) to the "
                "metadata."
            )
        folder = metadata.get("data_dir")
        directory = None if folder is None else pathlib.Path(folder).expanduser()
        if directory is not None and not directory.is_dir():
            raise LoadError(f"data_dir is {str(folder)!r}, which is no directory; give the folder with the benchmarks.")
        return cls(_tokenizer(given) if isinstance(given, str) else given, directory, length, count)

    def sized(self) -> tuple[Tokenizer, int]:
        """Tokenizer and length, for tasks that need both.

        Raises:
          ConfigError: there is no length.
        """
        if self.tokenizer is None or self.length is None:
            raise ConfigError("This task cuts text by tokens; give 'tokenizer' and 'length' in the metadata.")
        return self.tokenizer, self.length

    def file(self, name: str, what: str) -> pathlib.Path:
        """A file of `data_dir` that must exist; `what` it holds is said in errors.

        Raises:
          LoadError: there is no `data_dir`, or no such file in it.
        """
        if self.data_dir is None:
            raise LoadError(f"This task reads {what} from <data_dir>/{name}; give 'data_dir' in the metadata.")
        path = self.data_dir / name
        if not path.is_file():
            raise LoadError(f"There is no file {path}; put {what} there.")
        return path


@functools.lru_cache(maxsize=4)
def _tokenizer(name: str) -> Tokenizer:
    return ByteTokenizer() if name == "tiny" else load_tokenizer(find_directory(name))


def _whole(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; give a whole number from 1, or leave it out.")
    return value
