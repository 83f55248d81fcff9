"""The prompts that a run trains on, and the padded blocks of them that the teacher reads at once."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from dcache.data.benchmarks import GSM8K_HUB, LONGBENCH_HUB, gsm8k_prompts, longbench_prompts
from dcache.data.prompts import Prompt, PromptStream
from dcache.data.text import directory_text, installed_text, split_documents
from dcache.experiment import BENCHMARKS, DataConfig, Trajectory
from dcache.tokenizer import Tokenizer


class Stream(Protocol):
    """`stream[step]` is the prompt of a step, a pure function of the seed and the step."""

    def __getitem__(self, step: int) -> Prompt:
        """The prompt of a step, 0 or larger."""
        ...


class Shuffled:
    """Endless passes over a list of prompts, each pass in an order of its own."""

    def __init__(self, prompts: Sequence[Prompt], seed: int):
        self._prompts, self._seed = prompts, seed

    def __getitem__(self, step: int) -> Prompt:
        """The prompt of a step, 0 or larger."""
        epoch, place = divmod(step, len(self._prompts))
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))
        prompt = self._prompts[int(order[place])]
        return dataclasses.replace(prompt, name=f"{step}:{prompt.name}")


def training_prompts(data: DataConfig, tokenizer: Tokenizer, horizon: int, seed: int) -> tuple[Stream, str]:
    """The prompts of a run, and a digest of the text that they are made from.

    Raises:
      LoadError: text or benchmark files are missing or unreadable. ConfigError: the text is too short for the prompts.
    """
    prefix = () if tokenizer.bos_id is None else (tokenizer.bos_id,)
    if data.source == BENCHMARKS:
        longbench, gsm8k = data.longbench_dir or LONGBENCH_HUB, data.gsm8k_dir or GSM8K_HUB
        prompts = longbench_prompts("2wikimqa", tokenizer, data.length, longbench, prefix=prefix)
        prompts += gsm8k_prompts("train", tokenizer, data.length, gsm8k)
        return Shuffled(prompts, seed), _digest(part for p in prompts for part in (p.name.encode(), p.tokens.tobytes()))
    documents = installed_text() if data.source == "installed" else directory_text(data.source)
    train, _ = split_documents(documents, data.held_out)
    stream = PromptStream(
        train, tokenizer, data.length, continuation=horizon, retrieval=data.retrieval, seed=seed, split="train",
        prefix=prefix,
    )  # fmt: skip
    return stream, _digest(part for d in train for part in (d.name.encode(), d.text.encode()))


def _digest(parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """Prompts as the teacher reads them, padded on the right with token 0; arguments of `dcache.rollout.teach`.

    Attributes:
      prompts: B of them.
      tokens: int32[B, S]. length: int32[B], real tokens.
      given: int32[B, T], the text after each prompt. given_length: int32[B], its real tokens.
      own: bool[B], follow the model's own greedy continuation instead.
    """

    prompts: tuple[Prompt, ...]
    tokens: np.ndarray
    length: np.ndarray
    given: np.ndarray
    given_length: np.ndarray
    own: np.ndarray


def make_block(prompts: Sequence[Prompt], length: int, horizon: int, trajectory: Trajectory) -> Block:
    """Pads prompts of at most `length` tokens and cuts their continuations to `horizon` tokens."""
    count = len(prompts)
    block = Block(
        tuple(prompts),
        np.zeros((count, length), np.int32),
        np.array([len(prompt.tokens) for prompt in prompts], np.int32),
        np.zeros((count, horizon), np.int32),
        np.array([min(len(prompt.continuation), horizon) for prompt in prompts], np.int32),
        np.array([trajectory == "teacher" or (trajectory == "mixed" and p.kind == "retrieval") for p in prompts]),
    )
    for i, prompt in enumerate(prompts):
        block.tokens[i, : block.length[i]] = prompt.tokens
        block.given[i, : block.given_length[i]] = prompt.continuation[:horizon]
    return block
