"""Prompts for training and evaluation: hidden facts to retrieve, plain text to continue, endless mixtures of both."""

import bisect
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from dcache.data.facts import Fact, Split, sample_fact
from dcache.data.text import Document, sentences
from dcache.errors import ConfigError
from dcache.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_SHORTEST = 0.93  # A retrieval prompt has at least this share of the length asked for.

_INSTRUCTIONS = (
    "Read the text and answer the question.\n\n{passage}\n\nQuestion: {question}\nAnswer briefly.",
    "Here is a text.\n\n{passage}\n\nAnswer this question about the text with a few words: {question}",
    "{passage}\n\nBased on the text above, answer the question. Give only the answer.\n\nQuestion: {question}",
    "Text:\n{passage}\n\nQuestion: {question}\nGive a short answer from the text.",
    "Read the following passage.\n\n{passage}\n\n{question} Answer in a few words.",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt with what follows it.

    Attributes:
      tokens: int32[T].
      kind: "retrieval" (a question with known answers) or "text" (a plain window).
      continuation: int32[C], the rest of the answer, or the tokens that follow the window in the document.
      answers: accepted answers; empty for plain text.
      name: document and position, unique within a set of prompts.
      task: the kind of fact ("fact/price"), "text", or the name of a benchmark.
      question: how many of the last tokens are the question and what follows it: the part that someone who compresses the text
        before any question is asked cannot know. 0 where no question is marked.
    """

    tokens: np.ndarray
    kind: Literal["retrieval", "text"]
    continuation: np.ndarray
    answers: tuple[str, ...]
    name: str
    task: str
    question: int = 0


def truncate_middle(tokens: np.ndarray, length: int) -> np.ndarray:
    """Keeps the first and the last half of `length` tokens, as LongBench does; shorter inputs come back unchanged.

    Args:
      tokens: int[T]. length: at least 1; of an odd length the last part is one token longer.

    Returns:
      int[min(T, length)].

    Raises:
      ConfigError: a length below 1.
    """
    if length < 1:
        raise ConfigError(f"Cannot cut a prompt to {length} tokens; the length must be at least 1.")
    if len(tokens) <= length:
        return tokens
    head = length // 2
    return np.concatenate([tokens[:head], tokens[len(tokens) - (length - head) :]])


def warn_truncated(what: str, count: int, total: int, length: int) -> None:
    """Says once for a whole set of prompts how many of them were cut in the middle."""
    if count:
        logger.warning(
            "%s: %d of %d prompts are longer than %d tokens and were cut in the middle.", what, count, total, length
        )


def _normalise(text: str) -> str:
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text.lower())
    text = re.sub(r"[^\w]+", " ", text)
    return " " + " ".join(word for word in text.split() if word not in ("a", "an", "the")) + " "


def is_correct(prompt: Prompt, text: str) -> bool:
    """Whether a generated text holds one of the answers, as whole words, whatever the case, punctuation and articles.

    GSM8K is compared by the last number of the text, because a worked solution holds many numbers.
    """
    if prompt.task == "gsm8k":
        numbers = re.findall(r"-?\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d)", "", text))
        return bool(numbers) and any(float(numbers[-1]) == float(answer) for answer in prompt.answers)
    generated = _normalise(text)
    return any(_normalise(answer).strip() and _normalise(answer) in generated for answer in prompt.answers)


class Shelf(NamedTuple):
    """A stretch of text.

    Attributes:
      sentences: n sentences with the white space after them.
      cumulative: int64[n + 1], their cumulative token counts.
      places: document and number of each sentence.
      lower: the whole text in lower case.
    """

    sentences: list[str]
    cumulative: np.ndarray
    places: list[str]
    lower: str


class Corpus:
    """Tokenised sentences of documents, computed when first needed.

    Neighbouring short documents form one shelf of at least `shelf` tokens, so that long prompts can be made from short
    documents; passages may then run over from one document into the next.

    Raises:
      ConfigError: no text.
    """

    def __init__(self, documents: Sequence[Document], tokenizer: Tokenizer, shelf: int):
        self.tokenizer = tokenizer
        # Tokenising everything takes long with a large corpus; about four characters make a token, so shelves are
        # filled by characters, generously.
        self._shelves: list[list[Document]] = []
        size = 0
        for document in documents:
            if not self._shelves or size >= 8 * shelf:
                self._shelves.append([])
                size = 0
            self._shelves[-1].append(document)
            size += len(document.text)
        if len(self._shelves) > 1 and size < 8 * shelf:
            self._shelves[-2] += self._shelves.pop()
        sizes = [sum(len(document.text) for document in shelf) for shelf in self._shelves]
        self._ends = np.cumsum(sizes)
        if not sizes or not self._ends[-1]:
            raise ConfigError("There is no text to make prompts from; give documents.")
        self._cache: dict[int, Shelf] = {}

    def shelf(self, index: int) -> Shelf:
        """A shelf by its index."""
        if index not in self._cache:
            texts: list[str] = []
            places: list[str] = []
            for document in self._shelves[index]:
                parts = sentences(document.text + "\n\n")
                texts += parts
                places += [f"{document.name}@{i}" for i in range(len(parts))]
            # With a leading space, as within a passage; exact up to a token or two, which the prompts allow for.
            counts = [len(self.tokenizer.encode(" " + text.strip())) + text.endswith("\n\n") for text in texts]
            cumulative = np.concatenate([[0], np.cumsum(counts)])
            self._cache[index] = Shelf(texts, cumulative, places, "".join(texts).lower())
        return self._cache[index]

    def locate(self, fraction: float) -> int:
        """The shelf at a fraction, in [0, 1), of the whole text."""
        return bisect.bisect_right(self._ends.tolist(), fraction * float(self._ends[-1]))


def _passages(cumulative: np.ndarray, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """All non-empty runs of sentences [start, end) with a total in [low, high], the longest for each start."""
    starts = np.arange(len(cumulative) - 1)
    ends = np.searchsorted(cumulative, cumulative[:-1] + high, side="right") - 1
    fits = (ends > starts) & (cumulative[ends] - cumulative[starts] >= low)  # No run at all fits a negative total.
    return starts[fits], ends[fits]


_ATTEMPTS = 60


def _facts(rng: np.random.Generator, split: Split, number: int, text: str) -> list[Fact]:
    """Facts about different things, whose answers stand neither in `text` nor in each other's sentences or questions.

    Rejected one by one: in a long text most short numbers occur, so drawing them all anew would go on for ever.
    """
    facts: list[Fact] = []
    while len(facts) < number:
        fact = sample_fact(rng, split)
        mine = f"{fact.sentence} {fact.question}".lower()
        others = "\n".join([text, *(f"{other.sentence} {other.question}".lower() for other in facts)])
        if (
            fact.answer.lower() not in others
            and not any(other.answer.lower() in mine for other in facts)
            and fact.subject not in [other.subject for other in facts]
        ):
            facts.append(fact)
    return facts


def _retrieval_prompt(
    corpus: Corpus,
    length: int,
    rng: np.random.Generator,
    split: Split,
    facts_per_prompt: tuple[int, int],
    fraction: float,
) -> Prompt:
    """One retrieval prompt whose passage begins near a fraction of the corpus; tries others near it if one fails."""
    tokenizer = corpus.tokenizer
    excess = 0  # By how much the sentences' counts fall short of the passage's: a few tokens, or 1% of a long passage.
    for attempt in range(_ATTEMPTS):
        # The first attempts stay on the shelf; a shelf may have no fitting passage.
        shelf = corpus.shelf(corpus.locate(fraction if attempt < _ATTEMPTS // 4 else rng.random()))
        cumulative = shelf.cumulative
        facts = _facts(rng, split, int(rng.integers(facts_per_prompt[0], facts_per_prompt[1] + 1)), shelf.lower)
        asked = facts[int(rng.integers(len(facts)))]
        instruction = str(rng.choice(_INSTRUCTIONS))
        frame = instruction.format(passage=" ".join(fact.sentence for fact in facts), question=asked.question)
        lead = tokenizer.encode(asked.lead)
        room = length - len(tokenizer.chat(frame)) - len(lead)
        starts, ends = _passages(cumulative, _SHORTEST * length - length + room, room - excess)
        if not len(starts):
            continue
        pick = int(rng.integers(len(starts)))
        start, end = int(starts[pick]), int(ends[pick])
        passage = shelf.sentences[start:end]
        # Descending, so that an insertion does not move the places of the others.
        for fact, place in zip(facts, sorted(rng.integers(0, end - start + 1, len(facts)), reverse=True), strict=True):
            # Before a list or a listing the fact is a paragraph of its own, in prose it joins the next sentence.
            prose = place == len(passage) or re.match(r"[A-Z\"'“‘]", passage[place])
            passage.insert(int(place), fact.sentence + (" " if prose else "\n\n"))
        message = instruction.format(passage="".join(passage).strip(), question=asked.question)
        tokens = np.concatenate([tokenizer.chat(message), lead])
        if _SHORTEST * length <= len(tokens) <= length and message.lower().count(asked.answer.lower()) == 1:
            answer = tokenizer.encode(f" {asked.answer}.")
            unasked = tokenizer.chat(instruction.format(passage="".join(passage).strip(), question=""))
            shared = min(len(unasked), len(tokens))
            same = int(np.argmin(np.append(unasked[:shared] == tokens[:shared], False)))
            name, task = f"{shelf.places[start]}+{asked.subject}", f"fact/{asked.kind}"
            return Prompt(
                np.asarray(tokens, np.int32), "retrieval", np.asarray(answer, np.int32), (asked.answer,), name, task,
                question=len(tokens) - same,
            )  # fmt: skip
        excess += max(0, len(tokens) - length)
    raise ConfigError(
        f"No passage makes a retrieval prompt of {length} tokens with {facts_per_prompt[0]} to {facts_per_prompt[1]} "
        "facts; ask for longer prompts or fewer facts, or give more text."
    )


def _text_prompt(
    corpus: Corpus, length: int, continuation: int, prefix: Sequence[int], rng: np.random.Generator, fraction: float
) -> Prompt:
    needed = length - len(prefix) + continuation
    for attempt in range(_ATTEMPTS):
        shelf = corpus.shelf(corpus.locate(fraction if attempt < _ATTEMPTS // 4 else rng.random()))
        cumulative = shelf.cumulative
        # A little more than needed, because sentences are counted one by one.
        starts = np.flatnonzero(cumulative[-1] - cumulative[:-1] >= 1.05 * needed + 8)
        if not len(starts):
            continue
        start = int(rng.choice(starts))
        end = int(np.searchsorted(cumulative, cumulative[start] + 1.05 * needed + 8))
        tokens = np.asarray(corpus.tokenizer.encode("".join(shelf.sentences[start:end])), np.int32)
        if len(tokens) >= needed:
            tokens = np.concatenate([np.asarray(prefix, np.int32), tokens[:needed]])
            return Prompt(tokens[:length], "text", tokens[length:], (), shelf.places[start], "text")
    raise ConfigError(f"No document holds {needed} tokens in a row; ask for shorter prompts or give longer documents.")


def _check_prompts(length: int, count: int, facts_per_prompt: tuple[int, int] = (1, 1)) -> None:
    if length < 32 or count < 1:
        raise ConfigError(f"Cannot make {count} prompts of {length} tokens; ask for 1 or more of 32 tokens or more.")
    if not 1 <= facts_per_prompt[0] <= facts_per_prompt[1]:
        raise ConfigError(
            f"facts_per_prompt is {facts_per_prompt}; give (smallest, largest) with 1 <= smallest <= largest."
        )


def retrieval_prompts(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    length: int,
    count: int,
    seed: int,
    split: Split,
    facts_per_prompt: tuple[int, int] = (2, 5),
) -> list[Prompt]:
    """Prompts of real text with hidden facts and a question about one of them, as a chat message.

    The assistant's answer is opened up to the value ("The favourite dish of Oskar Yarrow is"), as RULER does, so that
    even a small model answers with the value instead of going on with the text. Each prompt has between 0.93 `length`
    and `length` tokens; the facts stand between sentences. The answer occurs exactly once in the message. The prompts are
    spread evenly over the documents.

    Args:
      split: which words and wordings the facts use, "train" or "test" (see `dcache.data.facts`).
      facts_per_prompt: smallest and largest number of facts.

    Raises:
      ConfigError: no text, or no passage that fits.
    """
    _check_prompts(length, count, facts_per_prompt)
    corpus = Corpus(documents, tokenizer, length)

    def one(rng: np.random.Generator, fraction: float) -> Prompt:
        return _retrieval_prompt(corpus, length, rng, split, facts_per_prompt, fraction)

    return _spread(one, count, seed)


def text_prompts(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    length: int,
    continuation: int,
    count: int,
    seed: int,
    prefix: Sequence[int] = (),
) -> list[Prompt]:
    """Plain windows of exactly `length` tokens with the `continuation` tokens after them, spread over the documents.

    Windows begin with a sentence and differ from each other; they may overlap if many are drawn from little text.

    Args:
      prefix: tokens before the text, such as a model's beginning-of-sequence token; counted in `length`.

    Raises:
      ConfigError: no text, or fewer than `count` windows that are long enough.
    """
    _check_prompts(length, count)
    if continuation < 0:
        raise ConfigError(f"continuation is {continuation}; the number of following tokens cannot be negative.")
    corpus = Corpus(documents, tokenizer, length + continuation)

    def one(rng: np.random.Generator, fraction: float) -> Prompt:
        return _text_prompt(corpus, length, continuation, prefix, rng, fraction)

    return _spread(one, count, seed)


def _spread(one: Callable[[np.random.Generator, float], Prompt], count: int, seed: int) -> list[Prompt]:
    """Calls `one` with evenly spread fractions, in random order, until `count` prompts of different names are found."""
    order = np.random.default_rng([seed, 0x5EED]).permutation(count)
    prompts: dict[str, Prompt] = {}
    for i in range(count):
        for attempt in range(_ATTEMPTS):
            rng = np.random.default_rng([seed, i, attempt])
            fraction = (order[i] + rng.random()) / count if attempt < _ATTEMPTS // 2 else rng.random()
            prompt = one(rng, fraction)
            if prompt.name not in prompts:
                prompts[prompt.name] = prompt
                break
        else:
            raise ConfigError(
                f"The documents hold only about {i} different prompts, {count} were asked for; give more text."
            )
    return list(prompts.values())


class PromptStream:
    """An endless stream of prompts in which `stream[step]` depends on the arguments and the step alone.

    So the position in the data is one integer: a resumed run goes on with `stream[step]`. Retrieval prompts have up to
    `length` tokens, text prompts exactly `length`.

    Args:
      documents, tokenizer, length, split, facts_per_prompt, prefix: see `retrieval_prompts` and `text_prompts`.
      continuation: tokens that follow a text prompt.
      retrieval: share of retrieval prompts, in [0, 1]; the others are plain text.

    Raises:
      ConfigError: a share outside [0, 1], no text, or no passage that fits.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        tokenizer: Tokenizer,
        length: int,
        *,
        continuation: int = 32,
        retrieval: float = 0.5,
        seed: int = 0,
        split: Split = "train",
        facts_per_prompt: tuple[int, int] = (2, 5),
        prefix: Sequence[int] = (),
    ):
        _check_prompts(length, 1, facts_per_prompt)
        if not 0.0 <= retrieval <= 1.0 or continuation < 0:
            raise ConfigError(
                f"retrieval is {retrieval} and continuation {continuation}; use a share between 0 and 1, "
                "and 0 or more tokens."
            )
        self._corpus = Corpus(documents, tokenizer, length + continuation)
        self._length, self._continuation, self._prefix = length, continuation, tuple(prefix)
        self._retrieval, self._seed, self._split = retrieval, seed, split
        self._facts_per_prompt = facts_per_prompt

    def __getitem__(self, step: int) -> Prompt:
        """The prompt of a step, 0 or larger."""
        if step < 0:
            raise ConfigError(f"Prompts are counted from 0; there is no prompt {step}.")
        rng = np.random.default_rng([self._seed, step])
        retrieval, fraction = rng.random() < self._retrieval, rng.random()
        if retrieval:
            prompt = _retrieval_prompt(self._corpus, self._length, rng, self._split, self._facts_per_prompt, fraction)
        else:
            prompt = _text_prompt(self._corpus, self._length, self._continuation, self._prefix, rng, fraction)
        return dataclasses.replace(prompt, name=f"{step}:{prompt.name}")

    def __iter__(self) -> Iterator[Prompt]:
        step = 0
        while True:
            yield self[step]
            step += 1
