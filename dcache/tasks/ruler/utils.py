"""What the task files of this folder name with `!function utils.<name>`: RULER's prompts and their score."""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dcache.data import ruler
from dcache.errors import ConfigError
from dcache.load import find_directory
from dcache.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import datasets

_TOKENIZER_KEYS = ("tokenizer", "pretrained", "model")  # The last two: the harness's CLI passes the model's arguments.


def prompts(*, dataset: str, **metadata: Any) -> "datasets.DatasetDict":
    """The `custom_dataset` of the task files: prompts of the RULER task `dataset`.

    Args:
      metadata: `tokenizer` (an object, "tiny", "smollm2", a directory or a hub id; also called `pretrained` or `model`),
        `max_seq_lengths` (default [4096]), `count` for each length (500), `seed` (42), `data_dir`; others are left alone.

    Returns:
      The split "test" with input, gen_prefix, outputs, max_length, tokens, filler and dataset.

    Raises:
      ConfigError: no tokenizer, or settings that `ruler.samples` refuses. LoadError: no such tokenizer or data file.
    """
    import datasets

    tokenizer = next((metadata[key] for key in _TOKENIZER_KEYS if metadata.get(key) is not None), None)
    if tokenizer is None:
        raise ConfigError(
            "RULER's prompts are made to a length in tokens but there is no tokenizer; add 'tokenizer' (a model's name or "
            "directory) to the metadata."
        )
    if isinstance(tokenizer, str):
        tokenizer = _tokenizer(tokenizer)
    lengths = metadata.get("max_seq_lengths", [4096])
    if isinstance(lengths, str) or not isinstance(lengths, Sequence) or not lengths:
        raise ConfigError(f"max_seq_lengths is {lengths!r}; give a list of lengths in tokens, such as [4096].")
    count, seed, data_dir = metadata.get("count", 500), metadata.get("seed", 42), metadata.get("data_dir")
    docs = [
        {
            "input": sample.input,
            "gen_prefix": sample.answer_prefix,
            "outputs": list(sample.outputs),
            "max_length": sample.max_length,
            "tokens": sample.tokens,
            "filler": sample.filler,
            "dataset": dataset,
        }
        for length in lengths
        for sample in ruler.samples(dataset, tokenizer, length, count, seed, data_dir)
    ]
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(docs)})


@functools.lru_cache(maxsize=4)
def _tokenizer(name: str) -> Tokenizer:
    return ByteTokenizer() if name == "tiny" else load_tokenizer(find_directory(name))


def results(doc: Mapping[str, Any], answers: Sequence[str]) -> dict[str, float]:
    """The official score of an answer; see `dcache.data.ruler.score`."""
    return {"score": ruler.score(doc["dataset"], answers[0], doc["outputs"])}
