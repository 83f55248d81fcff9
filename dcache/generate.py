"""Budgeted generation: prefill, evict by compaction, decode with re-eviction, for batches of prompts of different lengths.

After the prefill the survivors are gathered into a smaller cache of fixed shape; from then on evicted slots are reused in
place, so the cache never grows and is never copied. Shapes depend on the prompts only through `bucket`, so that prompts of
different lengths share compiled code.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dcache import budget as budgets
from dcache import cache as kv
from dcache import chunked, model
from dcache.ahead import compiled
from dcache.attention import StatsRequest
from dcache.axes import constrain
from dcache.config import ModelConfig
from dcache.errors import ConfigError
from dcache.load import LanguageModel
from dcache.policies.base import Policy, Trained, keep_set, read
from dcache.sharding import on_its_mesh
from dcache.tokenizer import StreamDecoder, Tokenizer

_CHUNK = 16
"""Tokens between two returns to the host when nothing is evicted during decoding."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns, for B prompts.

    Attributes:
      texts: the generated texts, without the end-of-text token.
      tokens: int32 arrays of generated ids, the end-of-text token included if it was reached.
      cache_bytes: bytes of keys and values allocated during decoding, all prompts together.
      full_cache_bytes: what the same call allocates with nothing evicted. Both count padding: prompts fill whole blocks
        of 128 slots, and a batch as many as its longest prompt.
      prompt_tokens: real tokens of all prompts.
      prefill_seconds: reading the prompts and the first eviction. decode_seconds: the decoding loop.
      tokens_per_second: decoded tokens of all prompts (each prompt until its end) over `decode_seconds`.
      compile_seconds: spent compiling, in none of the above.
    """

    texts: tuple[str, ...]
    tokens: tuple[np.ndarray, ...]
    cache_bytes: int
    full_cache_bytes: int
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    compile_seconds: float


def bucket(length: int) -> int:
    """The padded length of a prompt: the next multiple of 128, or of an eighth of the next lower power of two."""
    step = max(128, 1 << max((length - 1).bit_length() - 4, 0))
    return -(-length // step) * step


def pad_prompts(prompts: Sequence[np.ndarray], length: int | None = None) -> tuple[Array, Array]:
    """Prompts int32[T_i] as one batch: int32[B, S] padded on the right to `bucket` (or `length`), and lengths int32[B]."""
    lengths = np.asarray([len(p) for p in prompts], np.int32)
    tokens = np.zeros((len(prompts), length or bucket(int(lengths.max()))), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(tokens), jnp.asarray(lengths)


def check_tokens(tokens: Any, config: ModelConfig, more: int = 0, what: str = "The prompt") -> np.ndarray:
    """A prompt as int32[T].

    Raises:
      ConfigError: empty, not a list of integers, ids outside the vocabulary, or longer than the context leaves room for.
    """
    array = np.asarray(tokens)
    if array.ndim != 1 or array.size == 0:
        raise ConfigError(f"{what} has shape {array.shape}; give at least one token, as a one-dimensional list of ids.")
    if not np.issubdtype(array.dtype, np.integer):
        raise ConfigError(f"{what} has dtype {array.dtype}; give integer token ids.")
    if array.min() < 0 or array.max() >= config.vocab_size:
        raise ConfigError(
            f"{what} has ids from {array.min()} to {array.max()}; the vocabulary has {config.vocab_size}."
        )
    if array.size + more > config.max_positions:
        raise ConfigError(
            f"{what} has {array.size} tokens and {more} more are to follow; the context holds {config.max_positions}. "
            "Shorten it (dcache.data.prompts.truncate_middle) or ask for fewer new tokens."
        )
    return array.astype(np.int32)


def sample_token(logits: Array, temperature: Array, top_p: Array, keys: Array, *, greedy: bool) -> Array:
    """Next tokens int32[B] of logits f32[B, V].

    Args:
      temperature, top_p: f32 scalars; the smallest set of tokens with at least `top_p` of the mass is sampled from.
      keys: one random key per sequence. greedy: static; take the most likely token and ignore the rest.
    """
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scaled = logits / temperature
    descending = -jnp.sort(-scaled, axis=-1)
    mass = jnp.cumsum(jax.nn.softmax(descending, axis=-1), axis=-1)
    # A token is in the set if the mass before it is below top_p: the first one always is.
    inside = mass - jax.nn.softmax(descending, axis=-1) < top_p
    threshold = jnp.min(jnp.where(inside, descending, jnp.inf), axis=-1, keepdims=True)
    allowed = jnp.where(scaled >= threshold, scaled, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys, allowed).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static facts of one call."""

    config: ModelConfig
    policy: Policy
    evict_every: int  # 0: never again after the prefill
    kept: int  # upper bound of survivors of the prompt
    room: int  # slots for tokens to come
    chunk: int  # tokens per call of the decoding loop
    greedy: bool
    unrolled: bool


def _start(
    plan: _Plan, params: model.Params, weights: Any, tokens: Array, length: Array, budget: Array, sampling: tuple
) -> tuple[Array, kv.Cache]:
    """Prefill, first token, first eviction: (int32[B], the cache for decoding)."""
    temperature, top_p, key = sampling
    hidden, cache = read(plan.policy, weights, params, plan.config, tokens, length)
    logits = model.last_logits(params, plan.config, hidden, length)
    first = sample_token(logits, temperature, top_p, _keys(key, jnp.int32(0), length.shape[0]), greedy=plan.greedy)
    allowed = budgets.tokens_kept_traced(budget, length)
    keep = keep_set(plan.policy, weights, cache, jnp.broadcast_to(allowed, length.shape), jax.random.fold_in(key, 1))
    if not plan.evict_every:  # statistics serve no further eviction
        cache = kv.restrict(cache, StatsRequest())
    cache = kv.compact(cache, keep, plan.kept, plan.room)
    return constrain(first, "."), kv.unstack(cache) if plan.unrolled else cache


def _begin(
    plan: _Plan, params: model.Params, hidden: Array, cache: kv.Cache, sampling: tuple
) -> tuple[Array, kv.Cache]:
    """After a prompt that was read in chunks: the first token of hidden states [B, D], and the cache for decoding."""
    temperature, top_p, key = sampling
    logits = model.unembed(params, hidden, plan.config)
    first = sample_token(logits, temperature, top_p, _keys(key, jnp.int32(0), hidden.shape[0]), greedy=plan.greedy)
    if not plan.evict_every:
        cache = kv.restrict(cache, StatsRequest())
    cache = kv.grow(cache, plan.room)
    return constrain(first, "."), kv.unstack(cache) if plan.unrolled else cache


def _decode(
    plan: _Plan, params: model.Params, weights: Any, cache: kv.Cache, token: Array, step: Array, budget: Array,
    sampling: tuple,
) -> tuple[kv.Cache, Array, Array]:  # fmt: skip
    """Evicts if due, then decodes `chunk` tokens: (cache, last token int32[B], tokens int32[B, chunk]).

    Args:
      token: int32[B], sampled but not yet fed. step: int32 scalar, tokens fed so far. Token `step + 1` comes first out.
    """
    temperature, top_p, key = sampling
    if plan.evict_every:
        # Right after the prefill this finds the cache within its budget already and evicts nothing.
        allowed = budgets.tokens_kept_traced(budget, cache.length)
        allowed = jnp.broadcast_to(allowed, cache.length.shape)
        keep = keep_set(plan.policy, weights, cache, allowed, jax.random.fold_in(key, step + 2))
        cache = kv.evict(cache, keep)

    def one(carry, i):
        cache, token = carry
        hidden, cache = model.extend(params, plan.config, token[:, None], cache)
        logits = model.unembed(params, hidden[:, 0], plan.config)
        keys = _keys(key, step + i + 1, token.shape[0])
        token = sample_token(logits, temperature, top_p, keys, greedy=plan.greedy)
        return (cache, token), token

    (cache, token), tokens = jax.lax.scan(one, (cache, token), jnp.arange(plan.chunk, dtype=jnp.int32))
    # Every host reads all tokens, and the next call takes the cache as this one was given it.
    return kv.laid_out(cache), constrain(token, "."), constrain(tokens.T, "..")


def _keys(key: Array, step: Array, batch: int) -> Array:
    """A key per sequence that depends on the seed, the step and the sequence's place in the batch alone."""
    at_step = jax.random.fold_in(jax.random.fold_in(key, 0), step)
    return jax.vmap(lambda i: jax.random.fold_in(at_step, i))(jnp.arange(batch, dtype=jnp.int32))


PROGRAMS = {
    "start": jax.jit(_start, static_argnums=0),
    "begin": jax.jit(_begin, static_argnums=0),
    "decode": jax.jit(_decode, static_argnums=0, donate_argnums=3),
}


def make_plan(
    lm: LanguageModel, policy: Policy, budget: float | int, length: int, new: int, evict_every: int, greedy: bool
) -> _Plan:
    """Sizes for prompts padded to `length`, of which none keeps more than the longest possible one would."""
    full = policy.name == "full"
    evict_every = 0 if full or evict_every >= new else evict_every

    def most(seen: int) -> int:
        return seen if full else policy.most_kept(budgets.tokens_kept(budget, seen), seen, lm.config)

    kept, room = most(length), new
    if evict_every:
        # Between two evictions `evict_every` tokens come on top of a budget that grows with the tokens seen.
        room = min(new, most(length + new) - kept + evict_every)
    if lm.mesh is not None:  # slots that are split over devices come in equal parts
        room += -(kept + room) % lm.mesh.shape["sequence"]
    return _Plan(
        config=lm.config, policy=policy, evict_every=evict_every, kept=kept, room=room,
        chunk=min(evict_every or _CHUNK, max(new - 1, 1)), greedy=greedy,
        unrolled=isinstance(lm.decode_params["layers"], tuple),
    )  # fmt: skip


@on_its_mesh
def generate(
    lm: LanguageModel, prompts: Sequence[np.ndarray], trained: Trained, budget: float | int, *, max_new_tokens: int,
    temperature: float, top_p: float, seed: int, evict_every: int, on_tokens: Callable[[np.ndarray], None] | None = None,
    stop: Sequence[str] = (), prefill_chunk: int = 0,
) -> Generation:  # fmt: skip
    """Generates from token ids; see `dcache.generate` for the arguments.

    Args:
      on_tokens: called with the new tokens int32[B, n] as they come (those after a sequence's end are -1).
      stop: texts that end a sequence, too; its text is cut before the first of them.
      prefill_chunk: tokens that are read at once where a prompt is longer, with an eviction after each chunk
        (`dcache.chunked`); 0 to read all prompts whole.
    """
    budget = budgets.check(budget)
    if max_new_tokens < 1 or min(evict_every, prefill_chunk) < 0 or temperature < 0.0 or not 0.0 < top_p <= 1.0:
        raise ConfigError(
            f"max_new_tokens is {max_new_tokens}, evict_every {evict_every}, prefill_chunk {prefill_chunk}, temperature "
            f"{temperature}, top_p {top_p}; give max_new_tokens >= 1, evict_every >= 0, prefill_chunk >= 0, temperature "
            ">= 0 and top_p in (0, 1]."
        )
    if not prompts:
        raise ConfigError("generate was given no prompt; give at least one.")
    prompts = [check_tokens(p, lm.config, max_new_tokens) for p in prompts]
    shortest = min(len(p) for p in prompts)
    policy = trained.policy.bind(lm.tokenizer).fit(budgets.tokens_kept(budget, shortest))
    longest = max(len(p) for p in prompts)
    plan = make_plan(lm, policy, budget, bucket(longest), max_new_tokens, evict_every, temperature == 0.0)
    encoded = jnp.float32(budgets.encode(budget))
    sampling = (jnp.float32(temperature or 1.0), jnp.float32(top_p), jax.random.key(seed))
    began = time.perf_counter()
    if 0 < prefill_chunk < longest:
        token, cache, compile_seconds = _read_chunks(lm, plan, trained.params, prompts, prefill_chunk, budget, sampling)
    else:
        tokens, length = pad_prompts(prompts)
        start_args = (lm.params, trained.params, tokens, length, encoded, sampling)
        start, compile_seconds = compiled(PROGRAMS["start"], plan, *start_args)
        token, cache = start(*start_args)
    jax.block_until_ready((token, cache))
    prefill_seconds = time.perf_counter() - began - compile_seconds
    cache_bytes = kv.nbytes(cache)

    ends = Ends(lm.tokenizer, len(prompts), on_tokens, stop)
    ends.push(np.asarray(token)[:, None])
    decode, seconds = compiled(
        PROGRAMS["decode"], plan, lm.decode_params, trained.params, cache, token, jnp.int32(0), encoded, sampling
    )
    compile_seconds += seconds
    began, fed = time.perf_counter(), 0
    while fed + 1 < max_new_tokens and not ends.all_done:
        cache, token, new = decode(lm.decode_params, trained.params, cache, token, jnp.int32(fed), encoded, sampling)
        ends.push(np.asarray(new)[:, : max_new_tokens - 1 - fed])
        fed += plan.chunk
    decode_seconds = time.perf_counter() - began
    decoded = sum(len(t) for t in ends.tokens) - len(prompts)
    return Generation(
        texts=ends.texts(),
        tokens=tuple(np.asarray(t, np.int32) for t in ends.tokens),
        cache_bytes=cache_bytes,
        full_cache_bytes=len(prompts) * (bucket(longest) + max_new_tokens) * lm.config.kv_bytes_per_token(),
        prompt_tokens=sum(len(p) for p in prompts),
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        tokens_per_second=decoded / decode_seconds if decoded else 0.0,
        compile_seconds=compile_seconds,
    )


def _read_chunks(
    lm: LanguageModel,
    plan: _Plan,
    weights: Any,
    prompts: Sequence[np.ndarray],
    chunk: int,
    budget: float | int,
    sampling: tuple,
) -> tuple[Array, kv.Cache, float]:
    """First tokens int32[B], the cache for decoding, and the seconds that compiling took."""
    allowed = jnp.asarray([budgets.tokens_kept(budget, len(p)) for p in prompts], jnp.int32)
    hidden, cache, seconds = chunked.read(
        chunked.Plan(plan.config, plan.policy, plan.kept), lm.params, weights, prompts, chunk, allowed,
        jax.random.fold_in(sampling[2], 1),
    )  # fmt: skip
    begin, more = compiled(PROGRAMS["begin"], plan, lm.params, hidden, cache, sampling)
    return *begin(lm.params, hidden, cache, sampling), seconds + more


def cut_at(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """A text up to the first of the texts that end it, and whether there is one."""
    found = [at for at in (text.find(end) for end in stop) if at >= 0]
    return (text[: min(found)], True) if found else (text, False)


class Ends:
    """Collects tokens and notices where each sequence ends: at a token, or at a text.

    Attributes:
      tokens: of each sequence, with what ended it. done: whether each has ended.
    """

    def __init__(
        self, tokenizer: Tokenizer, batch: int, on_tokens: Callable[[np.ndarray], None] | None, stop: Sequence[str]
    ):
        self.tokenizer, self.on_tokens, self.stop = tokenizer, on_tokens, [text for text in stop if text]
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.done = [False] * batch

    @property
    def all_done(self) -> bool:
        """Whether every sequence has ended."""
        return all(self.done)

    def push(self, new: np.ndarray) -> None:
        """New tokens int32[B, n]."""
        shown = np.full_like(new, -1)
        for b, row in enumerate(new):
            for i, token in enumerate(row.tolist()):
                if self.done[b]:
                    break
                self.tokens[b].append(token)
                shown[b, i] = token
                self.done[b] = token in self.tokenizer.eos_ids or (
                    bool(self.stop) and cut_at(self.tokenizer.decode(self.tokens[b]), self.stop)[1]
                )
        if self.on_tokens is not None:
            self.on_tokens(shown)

    def texts(self) -> tuple[str, ...]:
        """Text of each sequence without what ends it."""
        return tuple(
            cut_at(self.tokenizer.decode([t for t in tokens if t not in self.tokenizer.eos_ids]), self.stop)[0]
            for tokens in self.tokens
        )


def stream_to(write: Callable[[str], None], lm: LanguageModel) -> Callable[[np.ndarray], None]:
    """An `on_tokens` that writes the text of the first sequence as soon as its characters are complete."""
    decoder = StreamDecoder(lm.tokenizer)

    def on_tokens(new: np.ndarray) -> None:
        for token in new[0].tolist():
            if token >= 0 and token not in lm.tokenizer.eos_ids:
                write(decoder.push(token))

    return on_tokens
