"""Answers, choices and perplexities of many arms from one reading of a prompt.

An arm is a policy under a budget. All arms share the prompt's keys and values and are decoded as one batch, each under its own
mask (`dcache.evaluate.fidelity`): a benchmark costs one prefill a prompt, not one an arm. Arm 0 is the full cache.

With `prefill_chunk` a longer prompt is read by each arm for itself, chunk by chunk with an eviction after each
(`dcache.chunked`), which costs one prefill an arm.

What acts when: a generated answer's first token comes from the whole prompt, as in the paper, unless the end of the prompt
is withheld from the policy; a given text (a choice, the second half of a document) is scored with its prompt evicted before the
prompt's last token is fed, so that eviction touches the text's first token, too.
"""

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dcache import budget as budgets
from dcache import cache as kv
from dcache import chunked, model, rollout
from dcache.attention import EMPTY, StatsRequest
from dcache.config import ModelConfig
from dcache.errors import ConfigError
from dcache.evaluate import fidelity
from dcache.evaluate.fidelity import Arm
from dcache.generate import Ends, check_tokens
from dcache.load import LanguageModel
from dcache.policies.base import Policy

HORIZON = 16
"""Tokens of the full cache's answer along which the KL of the others is measured."""

_CHUNK = 16
_LEAST = 128  # padded length of the shortest prompts
_UNIT = 16  # withheld tokens come in multiples of it: few shapes, few compilations


def size(tokens: int, least: int = _LEAST) -> int:
    """The padded length of a prompt: powers of two, so that a benchmark compiles few programs."""
    return max(least, 1 << (tokens - 1).bit_length())


def hidden_of(withheld: int) -> int:
    """How many tokens a prompt really hides where so many are to be withheld: whole multiples of 16."""
    return -(-withheld // _UNIT) * _UNIT


@dataclasses.dataclass(frozen=True)
class Compared:
    """How one arm compares with the full cache on one prompt.

    Attributes:
      kl: mean KL to the full cache in nats, along the first `HORIZON` tokens of its answer or along a given text; top1: the
        share of those tokens after which the most likely token is the same; None if there are none.
      kept: share of what the policy saw that stays. retained: the same by relative position.
      during: whether evictions came between the prompt's chunks, not after the whole of it.
    """

    kl: float | None
    top1: float | None
    kept: float
    retained: tuple[float, ...]
    during: bool


@dataclasses.dataclass(frozen=True)
class Answer(Compared):
    """One arm's answer: text without what ended it; tokens generated, an end included; whether an end was reached."""

    text: str
    tokens: int
    ended: bool


@dataclasses.dataclass(frozen=True)
class Scored(Compared):
    """One arm's log-likelihood of a given text in nats; whether every token was the most likely one; its tokens."""

    nats: float
    greedy: bool
    tokens: int


@dataclasses.dataclass(frozen=True)
class _Read:
    """A prompt that all arms have read and evicted: their caches, what stayed, their first tokens int32[A] (see `_read`).

    during: see `Compared`.
    opening: log-likelihood in nats of the tokens after the prompt's first, under the full cache; None if not asked for.
    """

    students: kv.Cache
    kept: np.ndarray
    retained: np.ndarray
    first: Array
    allowed: Array
    key: Array
    opening: float | None
    during: bool


@functools.partial(jax.jit, static_argnames=("config", "request", "policies"))
def _prefill(
    params: model.Params, config: ModelConfig, tokens: Array, length: Array, following: Array | None, weights: Any, *,
    request: Any, policies: tuple[Policy, ...],
) -> tuple[Array, kv.Cache, Array | None]:  # fmt: skip
    """The first token that the whole prompt chooses, int32[1], and the cache with all that the policies look at.

    Third, log-likelihoods f32[S / 128] of `following` (int32[1, S], what comes after each token or `EMPTY`), 128 tokens each.
    """
    hidden, cache = model.prefill(params, config, tokens, length, request)
    nats = None if following is None else _log_likelihoods(params, config, hidden[0], following[0])
    first = jnp.argmax(model.last_logits(params, config, hidden, length), axis=-1).astype(jnp.int32)
    for policy, own in zip(policies, weights, strict=True):
        cache = policy.observe(own, params, config, cache, tokens, None)
    return first, dataclasses.replace(cache, hidden=None), nats


def _log_likelihoods(params: model.Params, config: ModelConfig, hidden: Array, following: Array) -> Array:
    """Of tokens int32[S] after hidden states [S, D], in nats, summed over parts of 128: all logits at once would be large."""

    def part(xs) -> Array:
        h, token = xs
        log_p = jax.nn.log_softmax(model.unembed(params, h, config))
        own = jnp.take_along_axis(log_p, jnp.maximum(token, 0)[:, None], axis=1)[:, 0]
        return jnp.sum(jnp.where(token >= 0, own, 0.0))

    return jax.lax.map(part, (hidden.reshape(-1, _LEAST, hidden.shape[-1]), following.reshape(-1, _LEAST)))


def _bound(lm: LanguageModel, arms: Sequence[Arm]) -> list[Arm]:
    """The arms with what their policies need to know of the tokenizer."""
    return [dataclasses.replace(arm, policy=arm.policy.bind(lm.tokenizer)) for arm in arms]


def _read(
    lm: LanguageModel, tokens: np.ndarray, arms: Sequence[Arm], room: int, every: int, name: str, seed: int, chunk: int,
    following: np.ndarray | None = None,
) -> _Read:  # fmt: skip
    """Reads a prompt once and evicts for every arm; or arm by arm, if it is read in chunks.

    Args:
      room: static, tokens that will follow. every: tokens between evictions, 0 for once. name: of the prompt.
      chunk: see `answers`.
      following: int32[len(tokens)], what comes after each token, if its log-likelihood is asked for.
    """
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
    if 0 < chunk < len(tokens):
        if every:
            raise ConfigError(f"prefill_chunk is {chunk} and evict_every {every}; set one of them to 0.")
        return _read_chunks(lm, tokens, arms, room, chunk, key)
    padded = np.zeros((1, size(len(tokens))), np.int32)
    padded[0, : len(tokens)] = tokens
    policies, weights = tuple(arm.policy for arm in arms), tuple(arm.params for arm in arms)
    observers = {arm.policy: arm.params for arm in arms}
    request = functools.reduce(lambda a, b: a | b, (policy.needs for policy in observers))
    if following is not None:
        following = np.pad(following, (0, padded.shape[1] - len(following)), constant_values=EMPTY)[None]
    first, cache, nats = _prefill(
        lm.params, lm.config, jnp.asarray(padded), jnp.asarray([len(tokens)], jnp.int32), following,
        tuple(observers.values()), request=request, policies=tuple(observers),
    )  # fmt: skip
    seen = range(len(tokens), len(tokens) + room + 1, every or room)
    allowed = jnp.asarray([[budgets.tokens_kept(arm.budget, n) for arm in arms] for n in seen], jnp.int32)
    students, kept, retained = fidelity.evict_prompt(
        cache, jnp.int32(0), policies, weights, allowed[0], jax.random.fold_in(key, 0), room=room, once=every == 0
    )
    opening = None if nats is None else float(np.asarray(nats, np.float64).sum())
    first = jnp.broadcast_to(first, (len(arms),))
    return _Read(students, np.asarray(kept), np.asarray(retained), first, allowed, key, opening, during=False)


def _read_chunks(
    lm: LanguageModel, tokens: np.ndarray, arms: Sequence[Arm], room: int, chunk: int, key: Array
) -> _Read:  # fmt: skip
    """`_read` of a prompt that each arm reads in chunks."""
    allowed = [budgets.tokens_kept(arm.budget, len(tokens)) for arm in arms]
    slots = size(len(tokens))  # shapes must not depend on the prompt
    layers, first, kept, retained = [], [], [], []
    for arm, most in zip(arms, allowed, strict=True):
        held = arm.policy.most_kept(budgets.tokens_kept(arm.budget, slots), slots, lm.config)
        plan = chunked.Plan(lm.config, arm.policy, slots if arm.method == "full" else held)
        hidden, cache, _ = chunked.read(
            plan, lm.params, arm.params, [tokens], chunk, jnp.asarray([most], jnp.int32), key
        )
        token, layer = _student(lm.params, lm.config, hidden, cache, slots=slots, room=room)
        layers.append(layer)
        first.append(token)
        position = np.asarray(kv.positions(cache))
        heads = position.size // position.shape[-1]
        stays = np.bincount(position[position >= 0], minlength=len(tokens)) / heads
        bins = np.arange(len(tokens)) * fidelity.BINS // len(tokens)
        kept.append(stays.mean())
        retained.append(
            np.bincount(bins, stays, fidelity.BINS) / np.maximum(np.bincount(bins, minlength=fidelity.BINS), 1)
        )
    students = kv.Cache(
        jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *layers), None, jnp.full(len(arms), len(tokens), jnp.int32)
    )
    allowed_once = jnp.asarray([allowed, allowed], jnp.int32)
    return _Read(
        students, np.asarray(kept), np.stack(retained), jnp.concatenate(first), allowed_once, key, None, during=True
    )


@functools.partial(jax.jit, static_argnames=("config", "slots", "room"))
def _student(
    params: model.Params, config: ModelConfig, hidden: Array, cache: kv.Cache, *, slots: int, room: int
) -> tuple[Array, kv.LayerCache]:  # fmt: skip
    """The first token int32[1] of hidden states [1, D], and the layers in `slots` slots, `room` empty ones before them."""
    cache = kv.restrict(cache, StatsRequest())
    layers = kv.grow(cache, slots + room - kv.positions(cache).shape[-1]).layers
    layers = dataclasses.replace(
        layers, k=jnp.roll(layers.k, room, axis=-2), v=jnp.roll(layers.v, room, axis=-2),
        position=jnp.roll(layers.position, room, axis=-1), key_norm=jnp.roll(layers.key_norm, room, axis=-1),
        value_norm=jnp.roll(layers.value_norm, room, axis=-1),
    )  # fmt: skip
    return jnp.argmax(model.unembed(params, hidden, config), axis=-1).astype(jnp.int32), layers


@functools.partial(jax.jit, static_argnames="config")
def _ask(
    params: model.Params, config: ModelConfig, students: kv.Cache, question: Array
) -> tuple[kv.Cache, Array]:  # fmt: skip
    """Feeds what was withheld, int32[Q], to all arms: their caches and first tokens int32[A]."""
    arms = students.length.shape[0]
    fed = jnp.broadcast_to(question[None], (arms, question.shape[0]))
    hidden, students = model.extend(params, config, fed, students, jnp.int32(0))
    return students, jnp.argmax(model.unembed(params, hidden[:, -1], config), axis=-1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("config", "policies", "evict", "count"))
def _decode(
    params: model.Params, config: ModelConfig, students: kv.Cache, token: Array, at: Array, allowed: Array, key: Array,
    weights: Any, *, policies: tuple[Policy, ...], evict: bool, count: int,
) -> tuple[kv.Cache, Array]:  # fmt: skip
    """The next `count` greedy tokens of all arms, int32[A, count], then an eviction if asked for.

    Args:
      params: in the layout for decoding. token: int32[A], not yet fed. at: int32 scalar, tokens fed so far.
    """
    tokens, students = rollout.greedy(params, config, token, students, count, at)
    if evict:
        students = fidelity.evict_again(students, policies, weights, allowed, key)
    return students, tokens


def answers(
    lm: LanguageModel, prompt: Sequence[int] | np.ndarray, arms: Sequence[Arm], *, new_tokens: int,
    stop: Sequence[str] = (), withheld: int = 0, evict_every: int = 0, prefill_chunk: int = 0, name: str = "", seed: int = 0,
) -> list[Answer]:  # fmt: skip
    """Greedy answers of all arms to one prompt.

    Args:
      arms: of `fidelity.make_arms`, the full cache first. new_tokens: the longest answer.
      stop: texts that end an answer. withheld: last tokens of the prompt that policies must not see; rounded up to a multiple
        of 16. They are fed after the eviction.
      evict_every: tokens between evictions while the answer is written; 0 for none after the prefill. name: for `random`.
      prefill_chunk: tokens that are read at once where the prompt is longer, with an eviction after each chunk; 0 to read it
        whole.

    Raises:
      ConfigError: a prompt that does not leave room for the answer, or nothing left to see.
    """
    arms = _bound(lm, arms)
    tokens = check_tokens(prompt, lm.config, new_tokens)
    hidden = hidden_of(withheld)
    if hidden >= len(tokens) or (hidden and evict_every):
        raise ConfigError(
            f"{hidden} of {len(tokens)} tokens are withheld with evict_every = {evict_every}; withhold fewer tokens, and evict "
            "once (0) where the end of the prompt is withheld."
        )
    shown, question = tokens[: len(tokens) - hidden], jnp.asarray(tokens[len(tokens) - hidden :])
    chunk = evict_every or _CHUNK
    answer_room = -(-max(new_tokens, HORIZON) // chunk) * chunk
    read = _read(lm, shown, arms, hidden + size(answer_room, 32), evict_every, name, seed, prefill_chunk)
    policies, weights = tuple(arm.policy for arm in arms), tuple(arm.params for arm in arms)
    students, token = read.students, read.first
    if hidden:
        students, token = _ask(lm.params, lm.config, students, question)
    if isinstance(lm.decode_params["layers"], tuple):
        students = kv.unstack(students)
    ends = Ends(lm.tokenizer, len(arms), None, stop)
    rows, fed = np.asarray(token)[:, None], 0
    ends.push(rows)
    while fed + 1 < new_tokens and not ends.all_done:
        students, new = _decode(
            lm.decode_params, lm.config, students, jnp.asarray(rows[:, -1]), jnp.int32(hidden + fed),
            read.allowed[min(fed // chunk + 1, len(read.allowed) - 1)], jax.random.fold_in(read.key, fed // chunk + 1),
            weights, policies=policies, evict=bool(evict_every), count=chunk,
        )  # fmt: skip
        rows = np.asarray(new)
        ends.push(rows[:, : new_tokens - 1 - fed])
        fed += chunk
    kl, top1 = _along(lm, read, arms, ends.tokens[0], question, evict_every)
    return [
        Answer(
            kl[a],
            top1[a],
            float(read.kept[a]),
            _rounded(read.retained[a]),
            read.during,
            text,
            len(ends.tokens[a]),
            ends.done[a],
        )
        for a, text in enumerate(ends.texts())
    ]


def _along(
    lm: LanguageModel, read: _Read, arms: Sequence[Arm], answer: Sequence[int], question: Array, every: int
) -> tuple[list[float | None], list[float | None]]:  # fmt: skip
    """KL and agreement of all arms along the full cache's answer, which all of them are fed after the question."""
    horizon = -(-HORIZON // every) * every if every else HORIZON
    fed = np.zeros(horizon, np.int32)
    count = min(len(answer), HORIZON)
    fed[:count] = answer[:count]
    # The last withheld token's distribution is the first that eviction touches.
    skip = max(len(question) - 1, 0)
    weight = (np.arange(horizon + len(question) - skip) < count + len(question) - skip).astype(np.float32)
    kl, agrees, _, _ = fidelity.score_students(
        lm.params, lm.config, read.students, jnp.concatenate([question, jnp.asarray(fed)]),
        tuple(arm.policy for arm in arms), tuple(arm.params for arm in arms), read.allowed, read.key, evict_every=every,
        skip=skip,
    )  # fmt: skip
    return (
        [fidelity.weighted_mean(row, weight) for row in np.asarray(kl)],
        [fidelity.weighted_mean(row, weight) for row in np.asarray(agrees)],
    )


def scores(
    lm: LanguageModel, prompt: Sequence[int] | np.ndarray, texts: Sequence[Sequence[int]], arms: Sequence[Arm], *,
    withheld: int = 0, evict_every: int = 0, prefill_chunk: int = 0, name: str = "", seed: int = 0,
) -> list[list[Scored]]:  # fmt: skip
    """Log-likelihoods of given texts after one prompt: for each text the results of all arms.

    Args:
      texts: token ids, each scored on its own. withheld, ...: as in `answers`; at least the prompt's last token is fed
        after the eviction.
    """
    return _scores(lm, prompt, texts, arms, withheld, evict_every, prefill_chunk, name, seed, False)[1]


def window(
    lm: LanguageModel, first: Sequence[int], second: Sequence[int], arms: Sequence[Arm], *, evict_every: int = 0,
    name: str = "", seed: int = 0,
) -> tuple[float, list[Scored]]:  # fmt: skip
    """A text in two halves, for perplexities: the first is read whole, then evicted, and the second scored under what stayed.

    Returns:
      The log-likelihood in nats of the first half (of all its tokens but the first) under the full cache, which no policy
      changes, and the results of all arms on the second; none if it is empty.
    """
    opening, found = _scores(lm, first, [second] if second else [], arms, 0, evict_every, 0, name, seed, True)
    return opening, found[0] if found else []


def _scores(
    lm: LanguageModel, prompt: Sequence[int] | np.ndarray, texts: Sequence[Sequence[int]], arms: Sequence[Arm],
    withheld: int, evict_every: int, prefill_chunk: int, name: str, seed: int, opening: bool,
) -> tuple[float, list[list[Scored]]]:  # fmt: skip
    """The log-likelihood of the prompt itself, if asked for with `opening` (else 0), and the results of `scores`."""
    arms = _bound(lm, arms)
    longest = max(map(len, texts), default=0)
    tokens = check_tokens(prompt, lm.config, longest)
    if len(tokens) < 2 or not all(len(text) for text in texts):
        raise ConfigError(
            f"A prompt of {len(tokens)} tokens and texts of {[len(t) for t in texts]}; give a prompt of two or more tokens and "
            "texts of one or more."
        )
    hidden = hidden_of(withheld) if withheld > 1 else 1
    hidden = min(hidden, len(tokens) - 1)
    unit = evict_every or _UNIT
    fed_length = -(-(hidden + longest) // unit) * unit
    fed_length = size(fed_length, 32) if not evict_every else fed_length
    shown = len(tokens) - hidden
    following = tokens[1 : shown + 1] if opening else None
    read = _read(lm, tokens[:shown], arms, fed_length, evict_every, name, seed, prefill_chunk, following)
    results = []
    for text in texts:
        fed = np.zeros(fed_length, np.int32)
        fed[: hidden + len(text)] = [*tokens[shown:], *text]
        kl, agrees, nll, hits = map(
            np.asarray,
            fidelity.score_students(
                lm.params, lm.config, read.students, jnp.asarray(fed), tuple(arm.policy for arm in arms),
                tuple(arm.params for arm in arms), read.allowed, read.key, evict_every=evict_every, skip=hidden - 1,
            ),
        )  # fmt: skip
        counted = slice(0, len(text))
        weight = np.ones(len(text), np.float32)
        results.append(
            [
                Scored(
                    fidelity.weighted_mean(kl[a, counted], weight), fidelity.weighted_mean(agrees[a, counted], weight),
                    float(read.kept[a]), _rounded(read.retained[a]), read.during, -float(nll[a, counted].sum()),
                    bool(hits[a, counted].all()), len(text),
                )
                for a in range(len(arms))
            ]
        )  # fmt: skip
    return read.opening or 0.0, results


def _rounded(shares: np.ndarray) -> tuple[float, ...]:
    return tuple(round(float(share), 4) for share in shares)
