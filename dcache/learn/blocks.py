"""The prompts that a run trains on, and the padded blocks of them that the teacher reads at once."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from dcache.data.benchmarks import GSM8K_HUB, LONGBENCH_HUB, gsm8k_prompts, longbench_prompts
from dcache.data.prompts import Prompt, PromptStream
from dcache.data.text import directory_text, installed_text, split_documents
from dcache.errors import ConfigError
from dcache.experiment import BENCHMARKS, DataConfig, Trajectory
from dcache.tokenizer import Tokenizer

_UNSEEN_UNIT = 16  # few lengths of hidden questions, few compilations


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
      asked: bool[B], the first `unseen` given tokens are the prompt's question. unseen: tokens of a hidden question.
    """

    prompts: tuple[Prompt, ...]
    tokens: np.ndarray
    length: np.ndarray
    given: np.ndarray
    given_length: np.ndarray
    own: np.ndarray
    asked: np.ndarray
    unseen: int


def unseen_tokens(prompts: Sequence[Prompt]) -> int:
    """How many tokens at the end of retrieval prompts hold the longest of their questions, a multiple of 16; 0 without any."""
    longest = max((prompt.question for prompt in prompts if prompt.kind == "retrieval"), default=0)
    return -(-longest // _UNSEEN_UNIT) * _UNSEEN_UNIT


def check_unseen(prompts: Sequence[Prompt], unseen: int) -> None:
    """Raises ConfigError if the last `unseen` tokens of a retrieval prompt are not its question and some of what is before."""
    for prompt in prompts if unseen else ():
        if prompt.kind == "retrieval" and not prompt.question:
            raise ConfigError(f"Prompt {prompt.name!r} does not say which of its tokens are the question to be hidden.")
        if prompt.kind == "retrieval" and not prompt.question <= unseen < len(prompt.tokens):
            raise ConfigError(
                f"Prompt {prompt.name!r} has {len(prompt.tokens)} tokens, its question {prompt.question}; hide at least the "
                f"question and fewer than all tokens, not {unseen}."
            )


def make_block(
    prompts: Sequence[Prompt], length: int, horizon: int, trajectory: Trajectory, unseen: int = 0
) -> Block:  # fmt: skip
    """Pads prompts of at most `length` tokens and cuts their continuations to `horizon` tokens.

    Args:
      unseen: last tokens of retrieval prompts that are cut off and given before the continuation (see `unseen_tokens`).

    Raises:
      ConfigError: a prompt without a question to hide, or one that does not fit into `unseen` tokens.
    """
    check_unseen(prompts, unseen)
    asked = np.array([bool(unseen) and prompt.kind == "retrieval" for prompt in prompts])
    # Beside hidden questions, which come first of what is given, plain text is followed by the document's own text.
    mixed = trajectory == "mixed" or (trajectory == "teacher" and unseen > 0)
    own = [trajectory == "teacher" and not mixed or mixed and prompt.kind == "retrieval" for prompt in prompts]
    tokens = np.zeros((len(prompts), length), np.int32)
    given = np.zeros((len(prompts), unseen + horizon), np.int32)
    lengths, given_lengths = [], []
    for i, prompt in enumerate(prompts):
        seen = len(prompt.tokens) - (unseen if asked[i] else 0)
        following = np.concatenate([prompt.tokens[seen:], prompt.continuation[:horizon]])
        tokens[i, :seen] = prompt.tokens[:seen]
        given[i, : len(following)] = following
        lengths.append(seen)
        given_lengths.append(len(following))
    return Block(
        tuple(prompts), tokens, np.array(lengths, np.int32), given, np.array(given_lengths, np.int32), np.array(own), asked,
        unseen,
    )  # fmt: skip
