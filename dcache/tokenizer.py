"""Text to tokens and back: a thin layer over transformers' tokenizers, and a trivial one for the model "tiny"."""

import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dcache.errors import ConfigError, LoadError

if TYPE_CHECKING:
    import tokenizers

Messages = str | Sequence[Mapping[str, str]]
"""One user message, or a conversation: [{"role": "system" | "user" | "assistant", "content": text}, ...]."""

# Tokens that end a turn; models whose configuration names only the end of the text stop at these as well.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>")

# Kinds of tokens, as llama.cpp numbers them in a GGUF file.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")

SPLITS = ("smollm", "gpt-2", *_LLAMA3)
"""Names, as llama.cpp gives them, of the ways to cut text into words before byte-level BPE."""


class Tokenizer(Protocol):
    """What the rest of the package needs of a tokenizer.

    Attributes:
      bos_id: the token that begins every text, or None.
      eos_ids: all tokens that end a generation.
      adds_bos: whether texts that no template wraps begin with `bos_id`, as the model was trained.
      vocab_size: number of tokens, added ones included. The model's V may be larger (padding), never smaller.
    """

    bos_id: int | None
    eos_ids: tuple[int, ...]
    adds_bos: bool
    vocab_size: int

    def encode(self, text: str) -> np.ndarray:
        """int32[T], without special tokens around the text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out."""
        ...

    def render(self, messages: Messages, *, open_answer: bool = False) -> str:
        """The conversation in the model's own template as a text, special tokens written out, up to where the answer begins.

        Args:
          open_answer: the last message is the beginning of the answer, to be gone on with.

        Raises:
          ConfigError: as `chat`.
        """
        ...

    def chat(self, messages: Messages) -> np.ndarray:
        """int32[T], the conversation in the model's own template, up to where the answer begins.

        A model without a template gets its BOS token, if any, and the plain text.

        Raises:
          ConfigError: the template refuses the messages, for instance because two roles do not alternate.
        """
        ...


class StreamDecoder:
    """Turns tokens into text as they come. Text is held back while its last character is incomplete (UTF-8)."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._done = 0

    def push(self, token: int) -> str:
        """The text that `token` completes, possibly empty."""
        self._ids.append(int(token))
        text = self._pending()
        if not text or text.endswith("\ufffd"):
            return ""
        # The tokens just shown stay one more round as context: a first token alone may lose its leading space.
        self._ids = self._ids[self._done :]
        self._done = len(self._ids)
        return text

    def flush(self) -> str:
        """What is still held back; call it after the last token."""
        text = self._pending()
        self._ids, self._done = [], 0
        return text

    def _pending(self) -> str:
        shown = self._tokenizer.decode(self._ids[: self._done])
        return self._tokenizer.decode(self._ids)[len(shown) :]


def stream(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Yields the text of `ids` in non-empty pieces that consist of complete characters."""
    decoder = StreamDecoder(tokenizer)
    for token in ids:
        if text := decoder.push(token):
            yield text
    if text := decoder.flush():
        yield text


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a Hugging Face directory. No code of the directory is run.

    Raises:
      LoadError: the directory has no tokenizer, or one that transformers cannot read.
    """
    directory = pathlib.Path(directory)
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise LoadError(f"{directory} has no tokenizer.json; copy the model's tokenizer files into it.")
    transformers = _import_transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # A damaged file fails in whatever way the tokenizer's class happens to fail.
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise LoadError(f"The tokenizer of {directory} cannot be read ({reason}); fetch its files again.") from error
    return _HfTokenizer(tokenizer, _stop_ids(directory, tokenizer))


class ByteTokenizer:
    """64 tokens: 0 = BOS, 1 = EOS, then 62 characters. Letters are folded to lower case, other characters to "?"."""

    _ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,:;?!'\"()[]{}<>-_/+*=#|"

    def __init__(self) -> None:
        self.bos_id: int | None = 0
        self.eos_ids: tuple[int, ...] = (1,)
        self.adds_bos = True
        self.vocab_size = len(self._ALPHABET) + 2

    def encode(self, text: str) -> np.ndarray:
        """int32[len(text)]; see `Tokenizer`."""
        unknown = self._ALPHABET.index("?")
        found = (self._ALPHABET.find(character) for character in text.lower())
        return np.array([(unknown if i < 0 else i) + 2 for i in found], np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer`."""
        return "".join(self._ALPHABET[int(i) - 2] for i in ids if int(i) >= 2)

    def render(self, messages: Messages, *, open_answer: bool = False) -> str:
        """See `Tokenizer`; there is no template."""
        del open_answer
        return _plain(messages)

    def chat(self, messages: Messages) -> np.ndarray:
        """See `Tokenizer`; there is no template."""
        return np.concatenate([np.zeros(1, np.int32), self.encode(_plain(messages))])


def byte_level_bpe(
    tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str], split: str, prepend: str | None
) -> "tokenizers.Tokenizer":
    """Byte-level BPE (GPT-2, SmolLM2, Llama 3) from the lists that a GGUF file holds.

    Args:
      tokens: [V], in the byte-level alphabet. kinds: [V], NORMAL, CONTROL (special) ...
      merges: "left right", best first. split: one of SPLITS. prepend: the token that begins every text, or None.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    llama3 = split in _LLAMA3
    # Llama 3 takes a word that is a token whole, even where merges would not reach it.
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, pairs, ignore_merges=llama3)
    tokenizer = tokenizers.Tokenizer(model)
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not llama3)]
    if llama3:
        steps.insert(0, pre_tokenizers.Split(tokenizers.Regex(_LLAMA3_SPLIT), "isolated"))
    elif split == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added_tokens(tokenizer, tokens, kinds, prepend)


def sentencepiece_bpe(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float], spaced: bool, prepend: str | None
) -> "tokenizers.Tokenizer":
    """SentencePiece BPE with byte fallback (Llama 2, Mistral) from the lists that a GGUF file holds.

    Args:
      tokens, kinds, prepend: as for `byte_level_bpe`; a space is U+2581 in tokens.
      scores: [V], higher = merged first. spaced: a text gets a space in front.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers

    vocab = {token: i for i, token in enumerate(tokens)}
    # SentencePiece joins the neighbours whose result scores best: as a list of merges, all pairs by that score.
    merges = []
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        if kind == NORMAL:
            pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
            merges += [(-score, vocab[a], vocab[b], (a, b)) for a, b in pairs if a in vocab and b in vocab]
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    best_first = [pair for *_, pair in sorted(merges)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, best_first, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    into: list[Any] = [normalizers.Replace(" ", "\u2581")]
    back: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if spaced:
        into.insert(0, normalizers.Prepend("\u2581"))
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(into)
    tokenizer.decoder = decoders.Sequence(back)
    return _with_added_tokens(tokenizer, tokens, kinds, prepend)


def _with_added_tokens(
    tokenizer: "tokenizers.Tokenizer", tokens: Sequence[str], kinds: Sequence[int], prepend: str | None
) -> "tokenizers.Tokenizer":
    """Makes the tokens of the kinds CONTROL and USER_DEFINED indivisible, and has `prepend` begin every text."""
    import tokenizers
    from tokenizers import processors

    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        chosen = [token for token, k in zip(tokens, kinds, strict=True) if k == kind]
        tokenizer.add_tokens([tokenizers.AddedToken(token, special=special, normalized=False) for token in chosen])
    if prepend is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[prepend, "$A"],
            pair=[prepend, "$A", prepend, "$B"],
            special_tokens=[(prepend, tokens.index(prepend))],
        )
    return tokenizer


class _HfTokenizer:
    def __init__(self, tokenizer: Any, eos_ids: tuple[int, ...]):
        self._tokenizer = tokenizer
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_ids = eos_ids
        self.adds_bos = self.bos_id is not None and tokenizer.encode("a")[:1] == [self.bos_id]
        self.vocab_size = len(tokenizer)

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False, verbose=False), np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        # Cleaning up would remove spaces before punctuation, which the model did write.
        return self._tokenizer.decode(
            [int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def render(self, messages: Messages, *, open_answer: bool = False) -> str:
        if not self._tokenizer.chat_template:
            return _plain(messages)
        return self._templated(
            messages, tokenize=False, add_generation_prompt=not open_answer, continue_final_message=open_answer
        )

    def chat(self, messages: Messages) -> np.ndarray:
        if not self._tokenizer.chat_template:
            start = [] if self.bos_id is None else [self.bos_id]
            return np.concatenate([np.array(start, np.int32), self.encode(_plain(messages))])
        # Templates hold the BOS token themselves; the tokenizer adds none when it renders and encodes in one go.
        ids = self._templated(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        return np.asarray(ids, np.int32)

    def _templated(self, messages: Messages, **options: Any) -> Any:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(list(messages), **options)
        except jinja2.TemplateError as error:
            raise ConfigError(f"The model's chat template refuses these messages: {error}.") from error


def _plain(messages: Messages) -> str:
    return messages if isinstance(messages, str) else "\n\n".join(message["content"] for message in messages)


def _stop_ids(directory: pathlib.Path, tokenizer: Any) -> tuple[int, ...]:
    found: set[int] = set()
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found.update(int(end) for end in (ends if isinstance(ends, list) else [ends]) if end is not None)
        except (ValueError, TypeError, AttributeError) as error:
            raise LoadError(f"{path} is not valid ({error}); fetch it again.") from error
    vocabulary = tokenizer.get_vocab()
    found.update(vocabulary[token] for token in _TURN_ENDS if token in vocabulary)
    return tuple(sorted(found))


def _import_transformers() -> Any:
    """transformers, imported late (it takes seconds) and without its notice that PyTorch is missing: it is meant to."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        import transformers
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    return transformers
