"""Fidelity of eviction policies to the full cache, and their answers, prompt by prompt.

One prefill serves all arms (an arm is a policy under a budget). Their keep-sets share the prompt's keys and values, so
all arms are fed the same continuation in one batch. Arm 0 is always the full cache: the teacher that all are compared
with. Nothing is random but the keep-sets of `random`, whose key depends on the seed and the prompt's name alone, so an
arm gives the same result whatever stands beside it.

What acts when: the first continuation token is chosen before anything is evicted; the numbers therefore describe what
happens after continuation token 0 was fed.
"""

import dataclasses
import functools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dcache import budget as budgets
from dcache import cache as kv
from dcache import model, rollout
from dcache.attention import StatsRequest
from dcache.config import ModelConfig
from dcache.data.prompts import Prompt, is_correct
from dcache.errors import ConfigError, DcacheError
from dcache.learn.blocks import check_unseen, make_block
from dcache.load import LanguageModel
from dcache.policies import innermost, make, parse
from dcache.policies.base import Policy, Trained, keep_set, slot_positions

BINS = 20
"""Bins of relative position in which the retained share is recorded."""

_LOGIT_BYTES = 200e6  # Logits [arms, T, V] that are held at once.


@dataclasses.dataclass(frozen=True)
class Settings:
    """How an evaluation is run.

    Attributes:
      length: S, to which all prompts are padded; the longest prompt allowed.
      horizon: T, continuation tokens that are fed.
      evict_every: 0 to evict once, after the prefill; n to evict again every n tokens.
      new_tokens: most tokens of an answer to a retrieval prompt; 0 to generate none.
      batch: prompts that the full-cache model reads at once.
      seed: of the policies that draw random numbers.
      unseen: last tokens of a retrieval prompt that the policies do not see: they are fed after the eviction, and what counts
        begins after the last of them (query-agnostic compression). Budgets are shares of what was seen.
    """

    length: int
    horizon: int = 16
    evict_every: int = 0
    new_tokens: int = 24
    batch: int = 4
    seed: int = 0
    unseen: int = 0

    def __post_init__(self):
        rollout.check_schedule(self.horizon, self.evict_every)
        if self.length < 1 or self.batch < 1 or self.new_tokens < 0:
            raise ConfigError(
                f"length is {self.length}, batch {self.batch} and new_tokens {self.new_tokens}; "
                "give a length and a batch of 1 or more, and 0 or more new tokens."
            )
        if self.unseen < 0 or (self.unseen and self.evict_every):
            raise ConfigError(
                f"unseen is {self.unseen} and evict_every {self.evict_every}; hide 0 or more tokens, and evict once (0) where "
                "the question is hidden."
            )

    def hidden(self, kind: str) -> int:
        """Tokens at the end of a prompt that the policies do not see."""
        return self.unseen if kind == "retrieval" else 0

    @property
    def room(self) -> int:
        """Slots of each arm's own tail."""
        return self.unseen + max(self.horizon, self.new_tokens)


@dataclasses.dataclass(frozen=True, eq=False)
class Arm:
    """A policy under a budget, fitted to it.

    Attributes:
      method: label of the policy in tables. policy, params: the policy and its weights. budget: ratio or count.
    """

    method: str
    policy: Policy
    params: Any
    budget: float | int


def heuristic(name: str) -> Trained:
    """A policy without weights by its description (see `policies.parse`).

    "h2o@sequence" is H2O with its scores averaged over layers and heads.

    Raises:
      ConfigError: a description that cannot be read, or a policy that must be trained.
    """
    policy = parse(name)
    if hasattr(innermost(policy), "init"):
        raise ConfigError(f"{name!r} has to be trained first; give the path of a trained policy instead of the name.")
    return Trained(policy, ())


def budget_name(budget: float | int) -> str:
    """0.25 -> "25%", 64 -> "64 tokens"."""
    return f"{100 * budget:g}%" if isinstance(budget, float) else f"{budget} tokens"


def make_arms(methods: Mapping[str, Trained], budget_list: Sequence[float | int], shortest: int) -> list[Arm]:
    """All methods under all budgets, after the full cache.

    Args:
      methods: label -> policy. "full" may be among them and is not repeated.
      budget_list: ratios or counts.
      shortest: tokens of the shortest prompt. A setting that depends on the budget (SnapKV's window) is fitted to it,
        so that it is the same for all prompts and never too large for one.

    Raises:
      BudgetError: a budget that is none, or is smaller than what a policy protects.
      ConfigError: no budget, or the same twice.
    """
    names = [budget_name(budgets.check(b)) for b in budget_list]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"The budgets are {', '.join(names) or '(none)'}; give one or more different budgets.")
    arms = [Arm("full", make("full"), (), 1.0)]
    for method, trained in methods.items():
        if method == "full":
            continue
        for budget in map(budgets.check, budget_list):
            fitted = trained.policy.fit(budgets.tokens_kept(budget, shortest))
            arms.append(Arm(method, fitted, trained.params, budget))
    return arms


# ---------------------------------------------------------------------------------------------------------------------
# Compiled parts. `policies_` is a static tuple, `weights` the tuple of their parameters, A arms.


@functools.partial(jax.jit, static_argnames=("config", "policies", "decode", "unseen"))
@functools.wraps(rollout.teach)  # whose argument names the static ones are
def _teach(*args: Any, **kwargs: Any) -> rollout.Trajectories:
    taught = rollout.teach(*args, **kwargs)
    return dataclasses.replace(taught, cache=dataclasses.replace(taught.cache, hidden=None))


def _decide(
    policies_: tuple[Policy, ...], weights: Any, caches: Sequence[kv.Cache], allowed: Array, key: Array
) -> Array:
    """Keep-sets bool[L, A, K, S] of all arms; caches: one of batch size 1 per arm; allowed int32[A], tokens."""
    keeps = [
        keep_set(policy, params, cache, allowed[a : a + 1], key)
        for a, (policy, params, cache) in enumerate(zip(policies_, weights, caches, strict=True))
    ]
    return jnp.concatenate(keeps, axis=1)


def _alone(cache: kv.Cache, arm: int) -> kv.Cache:
    """One arm of a stacked batch that shares a prompt, as a batch of one."""
    layers = jax.tree.map(lambda x: x[:, arm : arm + 1], cache.layers)
    rest = dataclasses.replace(cache, layers=None, prompt=None)
    rest = jax.tree.map(lambda x: x[arm : arm + 1], rest)
    return dataclasses.replace(rest, layers=layers, prompt=cache.prompt)


@functools.partial(jax.jit, static_argnames=("policies_", "room", "once"))
def evict_prompt(
    cache: kv.Cache, index: Array, policies_: tuple[Policy, ...], weights: Any, allowed: Array, key: Array, *,
    room: int, once: bool,
) -> tuple[kv.Cache, Array, Array]:  # fmt: skip
    """The first eviction of prompt `index`.

    Returns:
      The students; the share of the prompt that stays f32[A]; and the same by relative position f32[A, BINS]. Both are
      means over layers and heads.
    """
    prompt = kv.select(cache, index)
    keep = _decide(policies_, weights, [prompt] * len(policies_), allowed, key)
    students = kv.share_prompt(prompt, len(policies_), room)
    students = kv.evict(students, jnp.pad(keep, ((0, 0), (0, 0), (0, 0), (0, room))))
    position = slot_positions(prompt, "sequence")[0]
    place = jnp.where(position >= 0, position * BINS // prompt.length, BINS)
    member = jax.nn.one_hot(place, BINS, dtype=jnp.float32)  # [S, BINS]; padding belongs to no bin
    kept = jnp.mean(keep.astype(jnp.float32), axis=(0, 2))  # [A, S]
    by_position = kept @ member / jnp.maximum(jnp.sum(member, axis=0), 1.0)[None]
    share = jnp.sum(kept, axis=1) / prompt.length.astype(jnp.float32)
    return (kv.restrict(students, StatsRequest()) if once else students), share, by_position


def evict_again(
    students: kv.Cache, policies_: tuple[Policy, ...], weights: Any, allowed: Array, key: Array
) -> kv.Cache:
    """A later eviction of all arms; students: a batch with one arm a row. The rest as in `evict_prompt`."""
    # Decided on stacked layers: the tails are short, and the compiler sees each policy once instead of once per layer.
    view = dataclasses.replace(students, layers=kv.stacked(students))
    caches = [_alone(view, arm) for arm in range(len(policies_))]
    return kv.evict(students, _decide(policies_, weights, caches, allowed, key))


@functools.partial(jax.jit, static_argnames=("config", "policies_", "evict_every", "skip"))
def score_students(
    params: model.Params, config: ModelConfig, students: kv.Cache, continuation: Array, policies_: tuple[Policy, ...],
    weights: Any, allowed: Array, key: Array, *, evict_every: int, skip: int,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """Feeds the continuation int32[T] to all students, whose first eviction is done.

    Args:
      allowed: int32[D + 1, A], tokens that each arm may keep at each eviction.
      skip: first tokens of the continuation after which nothing counts; their logits are not computed.

    Returns:
      KL to arm 0 in nats f32[A, T - skip] and whether the most likely token is arm 0's bool[A, T - skip], after each token was
      fed; of continuation tokens skip + 1, ... the negative log-likelihood f32[A, T - skip - 1] and whether each was the most
      likely one bool[A, T - skip - 1].
    """
    arms, horizon = len(policies_), continuation.shape[0]
    decisions = rollout.check_schedule(horizon, evict_every)
    chunk = horizon // decisions

    def feed(students, xs):
        tokens, d = xs
        hidden, students = model.extend(
            params, config, jnp.broadcast_to(tokens[None], (arms, chunk)), students, d * chunk
        )
        if decisions > 1:  # The eviction after the last token acts on nothing; its cost is one part in D.
            students = evict_again(students, policies_, weights, allowed[d + 1], jax.random.fold_in(key, d + 1))
        return students, hidden

    steps = jnp.arange(decisions, dtype=jnp.int32)
    _, hidden = jax.lax.scan(feed, students, (continuation.reshape(decisions, chunk), steps))
    hidden = hidden.swapaxes(0, 1).reshape(arms, horizon, -1)[:, skip:]
    continuation = continuation[skip:]
    teacher = jax.nn.log_softmax(model.unembed(params, hidden[0], config))

    def compare(h):  # [T, D]
        log_q = jax.nn.log_softmax(model.unembed(params, h, config))
        nll = -jnp.take_along_axis(log_q[:-1], continuation[1:, None], axis=-1)[:, 0]
        best = jnp.argmax(log_q, axis=-1)
        agrees = best == jnp.argmax(teacher, axis=-1)
        return rollout.kl_divergence(teacher, log_q), agrees, nll, best[:-1] == continuation[1:]

    at_once = max(1, int(_LOGIT_BYTES / (4 * (horizon - skip) * config.vocab_size)))
    return jax.lax.map(compare, hidden, batch_size=min(at_once, arms))


@functools.partial(jax.jit, static_argnames=("config", "policies_", "evict_every", "new_tokens"))
def _answer(
    params: model.Params, config: ModelConfig, students: kv.Cache, question: Array, first: Array, stop: Array,
    policies_: tuple[Policy, ...], weights: Any, allowed: Array, key: Array, *, evict_every: int, new_tokens: int,
) -> Array:  # fmt: skip
    """Greedy answers of all students at once, int32[A, new_tokens]; what follows a stop token means nothing.

    Args:
      params: in the layout for decoding. question: int32[Q], what the policies have not seen of the prompt.
      first: int32 scalar, the token that the whole prompt's logits choose; with a question each student chooses its own.
      stop: int32[E]. allowed: as in `score_students`.
    """
    arms, asked = len(policies_), question.shape[0]
    if isinstance(params["layers"], tuple):
        students = kv.unstack(students)
    opening = jnp.broadcast_to(first, (arms,))
    if asked:
        fed = jnp.broadcast_to(question[None], (arms, asked))
        hidden, students = model.extend(params, config, fed, students, jnp.int32(0))
        opening = jnp.argmax(model.unembed(params, hidden[:, -1], config), axis=-1).astype(jnp.int32)

    def stops(token):
        return jnp.any(token[:, None] == stop[None], axis=-1)

    def unfinished(carry):
        i, _, ended, _ = carry
        return (i < new_tokens) & ~jnp.all(ended)

    def step(carry):
        i, tokens, ended, cache = carry
        fed = jax.lax.dynamic_slice_in_dim(tokens, i - 1, 1, axis=1)
        hidden, cache = model.extend(params, config, fed, cache, asked + i - 1)
        if evict_every:
            cache = jax.lax.cond(
                i % evict_every == 0,
                lambda c: evict_again(
                    c, policies_, weights, allowed[i // evict_every], jax.random.fold_in(key, i // evict_every)
                ),
                lambda c: c,
                cache,
            )
        new = jnp.argmax(model.unembed(params, hidden[:, 0], config), axis=-1).astype(jnp.int32)
        return i + 1, jax.lax.dynamic_update_slice(tokens, new[:, None], (0, i)), ended | stops(new), cache

    start = jnp.zeros((arms, new_tokens), jnp.int32).at[:, 0].set(opening)
    return jax.lax.while_loop(unfinished, step, (jnp.int32(1), start, stops(start[:, 0]), students))[1]


# ---------------------------------------------------------------------------------------------------------------------


def evaluate(
    lm: LanguageModel,
    prompts: Sequence[Prompt],
    arms: Sequence[Arm],
    settings: Settings,
    skip: frozenset[str] = frozenset(),
) -> Iterator[dict[str, Any]]:
    """Evaluates all arms on prompts, one by one.

    Retrieval prompts are followed by the full-cache model's own greedy continuation, of which only the tokens before
    the first stop token count; plain text by the document's own text. Blocks of `settings.batch` prompts of one kind
    are read together; a prompt's block does not depend on `skip`, so a resumed run repeats the numbers of an
    uninterrupted one.

    Args:
      arms: of `make_arms`, the full cache first. skip: names of prompts that need not be evaluated.

    Yields:
      One JSON-ready record per prompt: `name`, `kind`, `task`, `length` (tokens), `counted` (continuation tokens that
      count) and `arms`: method -> budget -> a dict with
      `kl` mean KL to the full cache in nats, `top1` share of tokens with the same most likely token,
      `nll` mean negative log-likelihood of the counted tokens but the first (which eviction cannot influence),
      `kept` share of the prompt that stays after the first eviction (mean over layers and heads),
      `retained` the same by relative position (20 numbers),
      and for retrieval prompts, if answers are generated, `answer` (text) and `correct`.
      A mean over no token is None.

    Raises:
      ConfigError: a prompt is empty or longer than `settings.length`, two prompts have one name, or the first arm is
        not the full cache.
      DcacheError: a KL is not finite.
    """
    _check(prompts, arms, settings)
    arms = [dataclasses.replace(arm, policy=arm.policy.bind(lm.tokenizer)) for arm in arms]
    observers = {arm.policy: arm.params for arm in arms}
    for kind in ("retrieval", "text"):
        chosen = [p for p in prompts if p.kind == kind]
        for at in range(0, len(chosen), settings.batch):
            block = chosen[at : at + settings.batch]
            if all(p.name in skip for p in block):
                continue
            taught = _read(lm, block, settings, observers)
            for i, prompt in enumerate(block):
                if prompt.name not in skip:
                    yield _evaluate_one(lm, prompt, i, taught, arms, settings)


def _check(prompts: Sequence[Prompt], arms: Sequence[Arm], settings: Settings) -> None:
    for prompt in prompts:
        if not 1 <= len(prompt.tokens) <= settings.length:
            raise ConfigError(
                f"Prompt {prompt.name!r} has {len(prompt.tokens)} tokens; evaluation takes 1 to {settings.length}: "
                "cut it, or raise the length."
            )
    check_unseen(prompts, settings.unseen)
    names = [prompt.name for prompt in prompts]
    if len(set(names)) < len(names):
        raise ConfigError("Two prompts have the same name; results are kept by name, give each its own.")
    if not arms or arms[0].method != "full":
        raise ConfigError("The first arm must be the full cache; build the arms with make_arms.")
    looking: dict[str, str] = {innermost(arm.policy).name: arm.method for arm in reversed(arms) if arm.policy.looks}
    for arm in arms:
        name = innermost(arm.policy).name
        if arm.policy.looks and looking[name] != arm.method:
            raise ConfigError(
                f"{looking[name]!r} and {arm.method!r} are both trained {name} policies; evaluate them "
                "in two runs: each leaves what it sees while the prompt is read in the same place."
            )


def _read(
    lm: LanguageModel, block: Sequence[Prompt], settings: Settings, observers: Mapping[Policy, Any]
) -> rollout.Trajectories:  # fmt: skip
    """The full-cache model's pass over up to `settings.batch` prompts, always in the same shape, and the policies' own."""
    rows = [*block, *[block[-1]] * (settings.batch - len(block))]
    unseen = settings.hidden(block[0].kind)
    own = block[0].kind == "retrieval"
    # What the policies see ends before the question, which is fed like a continuation; only what comes after it counts.
    padded = make_block(rows, settings.length, settings.horizon, "mixed", unseen)
    return _teach(
        lm.params, lm.decode_params, lm.config, padded.tokens, padded.length, padded.given, padded.given_length, padded.own,
        jnp.asarray(lm.tokenizer.eos_ids, jnp.int32), tuple(observers), tuple(observers.values()), decode=own,
        asked=padded.asked, unseen=unseen,
    )  # fmt: skip


def _evaluate_one(
    lm: LanguageModel, prompt: Prompt, index: int, taught: rollout.Trajectories, arms: Sequence[Arm],
    settings: Settings,
) -> dict[str, Any]:  # fmt: skip
    """The record of one prompt; see `evaluate`."""
    unseen = settings.hidden(prompt.kind)
    length = len(prompt.tokens) - unseen
    policies_, weights = tuple(arm.policy for arm in arms), tuple(arm.params for arm in arms)
    every = settings.evict_every or settings.room
    seen = range(length, length + settings.room + 1, every)  # at each eviction
    allowed = jnp.asarray([[budgets.tokens_kept(arm.budget, n) for arm in arms] for n in seen], jnp.int32)
    key = jax.random.fold_in(jax.random.key(settings.seed), zlib.crc32(prompt.name.encode()))
    students, kept, retained = evict_prompt(
        taught.cache, jnp.int32(index), policies_, weights, allowed[0], jax.random.fold_in(key, 0),
        room=settings.room, once=settings.evict_every == 0,
    )  # fmt: skip
    skip = max(unseen - 1, 0)
    continuation, weight = taught.continuation[index], np.asarray(taught.weight[index])[skip:]
    kl, agrees, nll, _ = map(
        np.asarray,
        score_students(
            lm.params, lm.config, students, continuation, policies_, weights, allowed, key,
            evict_every=settings.evict_every, skip=skip,
        ),
    )  # fmt: skip
    if not np.all(np.isfinite(kl)):
        raise DcacheError(
            f"The KL of prompt {prompt.name!r} is not finite; the model's weights or a policy's weights are damaged."
        )
    results: list[dict[str, Any]] = [
        {
            "kl": weighted_mean(kl[a], weight),
            "top1": weighted_mean(agrees[a], weight),
            "nll": weighted_mean(nll[a], weight[1:]),
            "kept": round(float(kept[a]), 6),
            "retained": [round(float(x), 4) for x in retained[a]],
        }
        for a in range(len(arms))
    ]
    if settings.new_tokens and prompt.kind == "retrieval":
        tokens = np.asarray(
            _answer(
                lm.decode_params, lm.config, students, continuation[:unseen], continuation[unseen],
                jnp.asarray(lm.tokenizer.eos_ids, jnp.int32), policies_, weights, allowed, key,
                evict_every=settings.evict_every, new_tokens=settings.new_tokens,
            )
        )  # fmt: skip
        for row, result in zip(tokens, results, strict=True):
            text = lm.tokenizer.decode(_before_stop(row, lm.tokenizer.eos_ids))
            result |= {"answer": text, "correct": is_correct(prompt, text)}
    table: dict[str, dict[str, Any]] = {}
    for arm, result in zip(arms, results, strict=True):
        table.setdefault(arm.method, {})[budget_name(arm.budget)] = result
    return {
        "name": prompt.name, "kind": prompt.kind, "task": prompt.task, "length": len(prompt.tokens),
        "counted": int(weight.sum()), "arms": table,
    }  # fmt: skip


def weighted_mean(values: np.ndarray, weight: np.ndarray) -> float | None:
    """Mean of values f32[T] where the weight f32[T] says so; None where it says so nowhere."""
    total = float(weight.sum())
    return float((values * weight).sum() / total) if total else None


def _before_stop(tokens: np.ndarray, stop: Sequence[int]) -> list[int]:
    ends = np.flatnonzero(np.isin(tokens, stop))
    return tokens[: ends[0] if len(ends) else len(tokens)].tolist()
