"""The public functions. They take Python values, choose shapes, and call the pure functions of the other modules."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcache import budget as budgets
from dcache import model, rollout
from dcache.attention import EMPTY
from dcache.checkpoint import load_policy
from dcache.errors import ConfigError
from dcache.generate import Generation, check_tokens, pad_prompts
from dcache.generate import generate as generate_ids
from dcache.load import LanguageModel
from dcache.policies import REGISTRY, around, innermost, make, parse
from dcache.policies.base import Policy, Trained, keep_set, read, spread
from dcache.policies.wrapper import Wrapper
from dcache.sharding import on_its_mesh

PRETRAINED = pathlib.Path(__file__).resolve().parent.parent / "policies"
"""Policies that this project trained, `<model>-<policy>/`; a learned policy's name stands for the one in here."""


@dataclasses.dataclass(frozen=True, eq=False)
class Fidelity:
    """How faithful a pruned cache is to the full one along a continuation of T tokens.

    Attributes:
      kl: f32[T], KL(full || pruned) in nats after continuation token i was fed.
      top1_agrees: bool[T], whether both then name the same most likely token.
      nll, nll_full: f32[T], negative log-likelihood (nats) of continuation token i itself under the pruned and the full
        cache. Token 0 is predicted before anything is evicted, so its two values are equal.
    """

    kl: np.ndarray
    top1_agrees: np.ndarray
    nll: np.ndarray
    nll_full: np.ndarray


def resolve(policy: str | os.PathLike[str] | Policy | Trained, **settings: Any) -> Trained:
    """A policy with its weights: by name or description, from the folder of a trained policy (or its workdir), or as it is.

    A description is a text such as "protected(snapkv(window=16), first=4)", see `dcache.policies.parse`.

    Raises:
      ConfigError: unknown name or setting, or settings given for something that has its own.
      CheckpointError: a folder that holds no usable policy.
    """
    if isinstance(policy, Policy | Trained):
        if settings:
            raise ConfigError(
                f"Settings {sorted(settings)} were given with a policy object; set its own fields instead."
            )
        if isinstance(policy, Policy) and hasattr(innermost(policy), "init"):
            raise ConfigError(
                f"A {innermost(policy).name!r} policy was given without its weights; give its name, the folder of a trained "
                "one, or a Trained(policy, params)."
            )
        return policy if isinstance(policy, Trained) else Trained(policy, ())
    if not isinstance(policy, str | os.PathLike) or not os.fspath(policy):
        raise ConfigError(
            f"policy is {policy!r}; give a policy's name, the folder of a trained one, or a policy object."
        )
    name = os.fspath(policy)
    if ("(" in name or "@" in name) and "/" not in name and os.sep not in name and not os.path.exists(name):
        if settings:
            raise ConfigError(f"Settings {sorted(settings)} were given with {name!r}; write them into the description.")
        return _described(name)
    if name in REGISTRY:
        if not hasattr(REGISTRY[name], "init"):
            return Trained(make(name, **settings), ())
        path = PRETRAINED / f"smollm2-{name}"
        if not path.exists():
            raise ConfigError(
                f"No trained {name!r} policy lies in {path.name!r}; give the folder of one that you trained."
            )
    elif pathlib.Path(name).exists():
        path = pathlib.Path(name)
    elif "/" in name or os.sep in name or isinstance(policy, os.PathLike):
        raise ConfigError(f"There is no folder {name!r}; give the folder of a trained policy, or a policy's name.")
    else:
        make(name)  # raises, and lists the names
    if settings:
        raise ConfigError(
            f"Settings {sorted(settings)} were given with a trained policy; they are part of its training."
        )
    return load_policy(path)


def _described(text: str) -> Trained:
    """The policy of a description; inside it a learned one's name stands for the trained one that comes with the project."""
    policy = parse(text)
    inside = innermost(policy)
    if not hasattr(inside, "init"):
        return Trained(policy, ())
    if inside != make(inside.name):
        raise ConfigError(
            f"{text!r} gives settings to {inside.name}; they are part of its training. Give its name alone."
        )
    trained = resolve(inside.name)
    return around(trained, policy) if isinstance(policy, Wrapper) else trained


@on_its_mesh
def logits(lm: LanguageModel, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Logits of the full-cache model after every token: int[T] -> f32[T, V].

    Raises:
      ConfigError: no tokens, ids outside the vocabulary, or more than the context holds.
    """
    tokens = check_tokens(tokens, lm.config, what="`tokens`")
    padded, _ = pad_prompts([tokens])  # nothing looks ahead, so the padding changes no logits before it
    return np.asarray(_logits(lm.params, lm.config, padded)[0, : len(tokens)])


_logits = jax.jit(model.full_logits, static_argnames="config")


@functools.partial(jax.jit, static_argnames=("config", "policy"))
def _score(params, config, policy, weights, tokens, length, key):
    _, cache = read(policy, weights, params, config, tokens, length)
    return spread(policy.scores(weights, cache, key), cache, policy.granularity)[:, 0]


@functools.partial(jax.jit, static_argnames=("config", "policy"))
def _keep(params, config, policy, weights, tokens, length, budget, key):
    _, cache = read(policy, weights, params, config, tokens, length)
    return keep_set(policy, weights, cache, budgets.tokens_kept_traced(budget, length), key)[:, 0]


@functools.partial(jax.jit, static_argnames=("config", "policy", "evict_every"))
def _follow(params, config, policy, weights, tokens, length, continuation, count, budget, key, evict_every):
    future = jnp.where(jnp.arange(continuation.shape[0]) < count, continuation, EMPTY)
    hidden, cache = read(policy, weights, params, config, tokens, length, future[None])
    first = jax.nn.log_softmax(model.last_logits(params, config, hidden, length))
    teacher = rollout.teacher_log_probs(params, config, cache, continuation)
    student, _ = rollout.follow(
        params, config, policy, weights, cache, continuation, budget, key, evict_every=evict_every
    )
    return first[0], teacher, student[0], rollout.kl_divergence(teacher, student[0])


@on_its_mesh
def score(
    lm: LanguageModel,
    tokens: Sequence[int] | np.ndarray,
    policy: str | Policy | Trained,
    *,
    seed: int = 0,
    **settings: Any,
) -> np.ndarray:
    """Scores of a prompt's tokens after the prefill: int[T] -> f32[L, K, T], higher = keep.

    A method that decides per layer or per sequence gives the same value to all heads (and layers). Tokens that the method
    always keeps (see `keep`) have scores like all others.

    Args:
      policy: name, path or object, see `dcache.policies`. settings: the policy's own fields. seed: for `random`.
    """
    tokens = check_tokens(tokens, lm.config, what="`tokens`")
    trained = resolve(policy, **settings)
    padded, length = pad_prompts([tokens])
    policy = trained.policy.bind(lm.tokenizer)
    scores = _score(lm.params, lm.config, policy, trained.params, padded, length, jax.random.key(seed))
    return np.asarray(scores[..., : len(tokens)])


@on_its_mesh
def keep(
    lm: LanguageModel, tokens: Sequence[int] | np.ndarray, policy: str | Policy | Trained, budget: float | int, *,
    seed: int = 0, **settings: Any,
) -> np.ndarray:  # fmt: skip
    """The keep-set of a prompt after the prefill: int[T] -> bool[L, K, T].

    Args:
      budget: ratio (float in (0, 1], never below 32 tokens) or number of tokens (int), per head.

    Raises:
      BudgetError: no budget, or smaller than what the method always keeps.
    """
    tokens = check_tokens(tokens, lm.config, what="`tokens`")
    trained = resolve(policy, **settings)
    fitted = trained.policy.bind(lm.tokenizer).fit(budgets.tokens_kept(budget, len(tokens)))
    padded, length = pad_prompts([tokens])
    encoded = jnp.float32(budgets.encode(budgets.check(budget)))
    kept = _keep(lm.params, lm.config, fitted, trained.params, padded, length, encoded, jax.random.key(seed))
    return np.asarray(kept[..., : len(tokens)])


@on_its_mesh
def fidelity(
    lm: LanguageModel, prompt_tokens: Sequence[int] | np.ndarray, continuation_tokens: Sequence[int] | np.ndarray,
    policy: str | Policy | Trained, budget: float | int, *, evict_every: int = 0, seed: int = 0, **settings: Any,
) -> Fidelity:  # fmt: skip
    """Compares the pruned with the full cache along a given continuation.

    The prompt is prefilled whole, then evicted; then the continuation is fed, with another eviction every `evict_every`
    tokens (0: none).

    Args:
      prompt_tokens: int[S]. continuation_tokens: int[T].

    Raises:
      ConfigError, BudgetError: bad tokens, policy, settings or budget.
    """
    prompt = check_tokens(prompt_tokens, lm.config, what="`prompt_tokens`")
    continuation = check_tokens(continuation_tokens, lm.config, len(prompt), what="`continuation_tokens`")
    if evict_every < 0:
        raise ConfigError(f"evict_every is {evict_every}; give 0 (once, after the prefill) or a number of tokens.")
    trained = resolve(policy, **settings)
    fitted = trained.policy.bind(lm.tokenizer).fit(budgets.tokens_kept(budget, len(prompt)))
    # Padding the continuation to whole chunks (or to few shapes) changes nothing before the padding.
    unit = min(evict_every, len(continuation)) or 16
    fed = np.zeros(-(-len(continuation) // unit) * unit, np.int32)
    fed[: len(continuation)] = continuation
    padded, length = pad_prompts([prompt])
    encoded = jnp.asarray([budgets.encode(budgets.check(budget))], jnp.float32)
    first, teacher, student, kl = _follow(
        lm.params, lm.config, fitted, trained.params, padded, length, jnp.asarray(fed), jnp.int32(len(continuation)),
        encoded, jax.random.key(seed), evict_every=unit if evict_every else 0,
    )  # fmt: skip
    count = len(continuation)
    before = np.arange(count - 1)

    def nll(log_probs):
        rest = np.asarray(log_probs)[before, continuation[1:]]
        return -np.concatenate([[np.asarray(first)[continuation[0]]], rest]).astype(np.float32)

    agrees = np.asarray(jnp.argmax(teacher, axis=-1) == jnp.argmax(student, axis=-1))[:count]
    return Fidelity(np.asarray(kl)[:count], agrees, nll(student), nll(teacher))


def generate(
    lm: LanguageModel, prompts: str | Sequence[str | np.ndarray | Sequence[int]],
    policy: str | Policy | Trained = "distillcache", budget: float | int = 0.25, *, max_new_tokens: int = 64,
    temperature: float = 0.0, top_p: float = 1.0, seed: int = 0, evict_every: int = 16, chat: bool = True,
    on_tokens: Callable[[np.ndarray], None] | None = None, stop: Sequence[str] = (), **settings: Any,
) -> Generation:  # fmt: skip
    """Generates text with an evicted cache, for one or more prompts of any lengths at once.

    Args:
      prompts: texts, or token ids that are taken as they are.
      policy: name, path or object. budget: ratio or number of tokens; it grows with the tokens seen if it is a ratio.
      max_new_tokens: a sequence ends earlier at an end-of-text token.
      temperature: 0 for the most likely token. top_p: sample from the smallest set with this mass. seed: of the sampling.
      evict_every: tokens between evictions while decoding; 0 for one eviction after the prefill.
      chat: put texts through the model's chat template.
      on_tokens: called with new tokens int32[B, n] as they come, -1 after a sequence's end.
      stop: texts at which a sequence ends, too; they are not part of its text.

    Raises:
      ConfigError, BudgetError: empty or too long prompts, unknown policy or setting, a budget that is none.
    """
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Iterable):
        raise ConfigError(
            f"prompts are of type {type(prompts).__name__}; give a text, or a list of texts or of token ids."
        )
    trained = resolve(policy, **settings)

    def ids(prompt) -> np.ndarray:
        if not isinstance(prompt, str):
            return np.asarray(prompt)
        if not prompt.strip():
            raise ConfigError("A prompt is an empty text; give at least one word.")
        return lm.tokenizer.chat(prompt) if chat else lm.tokenizer.encode(prompt)

    return generate_ids(
        lm, [ids(p) for p in prompts], trained, budget, max_new_tokens=max_new_tokens, temperature=temperature,
        top_p=top_p, seed=seed, evict_every=evict_every, on_tokens=on_tokens, stop=stop,
    )  # fmt: skip
