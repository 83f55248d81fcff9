"""What the task files of this folder name with `!function utils.<name>`: RULER's prompts and their score."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dcache.data import ruler
from dcache.errors import ConfigError
from dcache.tasks.request import Request

if TYPE_CHECKING:
    import datasets


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

    request = Request.of(metadata)
    if request.tokenizer is None:
        raise ConfigError(
            "RULER's prompts are made to a length in tokens but there is no tokenizer; add 'tokenizer' (a model's name or "
            "directory) to the metadata."
        )
    lengths = metadata.get("max_seq_lengths", [4096])
    if isinstance(lengths, str) or not isinstance(lengths, Sequence) or not lengths:
        raise ConfigError(f"max_seq_lengths is {lengths!r}; give a list of lengths in tokens, such as [4096].")
    count, seed = request.count or 500, metadata.get("seed", 42)
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
        for sample in ruler.samples(dataset, request.tokenizer, length, count, seed, request.data_dir)
    ]
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(docs)})


def results(doc: Mapping[str, Any], answers: Sequence[str]) -> dict[str, float]:
    """The official score of an answer; see `dcache.data.ruler.score`."""
    return {"score": ruler.score(doc["dataset"], answers[0], doc["outputs"])}
