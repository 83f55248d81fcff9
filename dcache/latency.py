"""Where the time of a decode step goes: attention, what a policy looks at, its decision; tokens per second (paper, Table 3).

The paper does not say how often its policy decides. Here features and policy are the time of one decision, attention that of
one token, and the throughput is that of a decision every `evict_every` tokens. All methods are measured in turn within one run,
because machines are shared and noisy; a difference that is smaller than the noise may come out below zero.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dcache import budget as budgets
from dcache import cache as kv
from dcache import model, rollout
from dcache.attention import Segment, StatsRequest, attend
from dcache.bench import Numbers, interleaved, random_prompt
from dcache.config import ModelConfig
from dcache.errors import ConfigError
from dcache.evaluate.tables import grid
from dcache.generate import pad_prompts
from dcache.load import LanguageModel
from dcache.policies import make
from dcache.policies.base import Policy, Trained, keep_set, read
from dcache.policies.distillcache import DistillCache

FULL = "full"
BUDGET = 0.25
EVICT_EVERY = 16


def measure(
    lm: LanguageModel, methods: Mapping[str, Trained], *, budget: float | int = BUDGET, prompt: int = 2000,
    evict_every: int = EVICT_EVERY, repeats: int = 5,
) -> dict[str, Numbers]:  # fmt: skip
    """Times of one sequence after a prompt of random tokens, for the full cache and each method under one budget.

    Args:
      methods: label -> policy. prompt: tokens. evict_every: tokens between two decisions, and decoded in one measurement.

    Returns:
      Label ("full" first) -> medians over the repeats:
      `attention_ms`: attention of one token to the cache in all layers. `step_ms`: a whole decode step without any statistics.
      `features_ms`: how much longer that step is with the policy's statistics, plus the signals of one decision where a policy
      has them apart from its scores (DistillCache). `policy_ms`: the rest of a decision, scores and selection.
      `tokens_per_second`: decoding with statistics and a decision every `evict_every` tokens.
      The full cache has no features and no policy. What a policy does once for the prompt is in none of them. A policy under
      which one head may keep everything (RLKV) decodes over as many slots as the full cache has.

    Raises:
      ConfigError: a label "full", or a policy that does not fit the model. BudgetError: a budget too small for a policy.
    """
    check(lm, methods)
    methods = {FULL: Trained(make(FULL), ()), **methods}
    allowed = budgets.tokens_kept(budget, prompt)
    query = jax.random.normal(jax.random.key(0), (1, 1, lm.config.num_heads, lm.config.head_dim), lm.config.dtype)
    caches: dict[str, kv.Cache] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for label, trained in methods.items():
        policy = trained.policy.bind(lm.tokenizer).fit(allowed)
        cache = _evicted(lm, policy, trained.params, prompt, allowed, evict_every)
        plain = kv.restrict(cache, StatsRequest())
        # Decoding donates its cache: no two may share arrays.
        caches[f"{label}.plain"] = jax.tree.map(jnp.copy, plain)
        calls[f"{label}.plain"] = functools.partial(_decode, lm, caches, f"{label}.plain", evict_every)
        calls[f"{label}.attention"] = functools.partial(
            _attend, lm.config, query, caches, f"{label}.plain", evict_every
        )
        if label == FULL:
            continue
        now = f"{label}.plain"
        if len(jax.tree.leaves(cache)) > len(jax.tree.leaves(plain)):  # there are statistics to carry on
            now = f"{label}.watched"
            caches[now] = cache
            calls[now] = functools.partial(_decode, lm, caches, now, evict_every)
        decide = functools.partial(_decide, policy, trained.params, caches, now, allowed)
        calls[f"{label}.decision"] = decide
        if isinstance(policy, DistillCache):
            calls[f"{label}.signals"] = functools.partial(decide, signals=True)
    seconds = interleaved(calls, repeats)
    return {label: _parts(seconds, label, evict_every) for label in methods}


def check(lm: LanguageModel, methods: Mapping[str, Trained]) -> None:
    """Raises ConfigError for a method that is called "full", or that does not fit the model."""
    if FULL in methods:
        raise ConfigError(f"A method is called {FULL!r}, as the full cache is, which is always measured; leave it out.")
    for trained in methods.values():
        trained.policy.check_model(lm.config)


def describe(lm: LanguageModel, prompt: int) -> dict[str, Any]:
    """What times of `measure` with its default budget and schedule are times of, JSON-ready."""
    device = jax.devices()[0]
    machine = f"{device.device_kind}, {os.cpu_count()} processors" if device.platform == "cpu" else device.device_kind
    return {"model": lm.name, "prompt": prompt, "budget": BUDGET, "evict_every": EVICT_EVERY, "machine": machine}


def text(found: Mapping[str, Numbers]) -> str:
    """The numbers as a table for the terminal."""
    names = max(found.values(), key=len)  # the full cache's row lacks some
    heads = ("method", *(name.replace("_", " ") for name in names))
    return grid(heads, [(label, *(f"{row[n]:.3g}" if n in row else "" for n in names)) for label, row in found.items()])


def _parts(seconds: Numbers, label: str, count: int) -> Numbers:
    """The numbers of a method from the seconds of its calls; count: tokens that were decoded by one call."""
    plain = seconds[f"{label}.plain"]
    found = {"attention_ms": 1e3 * seconds[f"{label}.attention"] / count, "step_ms": 1e3 * plain / count}
    decoded = seconds.get(f"{label}.watched", plain)
    decision, signals = seconds.get(f"{label}.decision", 0.0), seconds.get(f"{label}.signals", 0.0)
    if label != FULL:
        found["features_ms"] = 1e3 * ((decoded - plain) / count + signals)
        found["policy_ms"] = 1e3 * (decision - signals)
    return found | {"tokens_per_second": count / (decoded + decision)}


def _evicted(lm: LanguageModel, policy: Policy, weights: Any, prompt: int, allowed: int, room: int) -> kv.Cache:
    """The cache for decoding after a prompt of random tokens was read and evicted once, with the policy's statistics."""
    tokens, length = pad_prompts([random_prompt(lm, prompt)])
    kept = policy.most_kept(allowed, prompt, lm.config)
    cache = _start(policy, lm.config, kept, room, lm.params, weights, tokens, length, jnp.int32(allowed))
    return kv.unstack(cache) if isinstance(lm.decode_params["layers"], tuple) else cache


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _start(
    policy: Policy, config: ModelConfig, kept: int, room: int, params: model.Params, weights: Any, tokens: Array,
    length: Array, allowed: Array,
) -> kv.Cache:  # fmt: skip
    _, cache = read(policy, weights, params, config, tokens, length)
    keep = keep_set(policy, weights, cache, jnp.broadcast_to(allowed, length.shape), jax.random.key(0))
    return kv.compact(cache, keep, kept, room)


def _decode(lm: LanguageModel, caches: dict[str, kv.Cache], name: str, count: int) -> Array:
    """Decodes `count` tokens with the named cache, which is then as full as before."""
    token, caches[name] = _steps(lm.config, count, lm.decode_params, caches[name])
    return token


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _steps(config: ModelConfig, count: int, params: model.Params, cache: kv.Cache) -> tuple[Array, kv.Cache]:
    """The last of `count` greedy tokens, int32[B], and the cache with their slots empty again."""
    tokens, used = rollout.greedy(params, config, jnp.zeros_like(cache.length), cache, count)

    def emptied(layer: kv.LayerCache, position: Array) -> kv.LayerCache:
        return dataclasses.replace(layer, position=position)

    return tokens[:, -1], dataclasses.replace(kv.map_layers(emptied, used, kv.positions(cache)), length=cache.length)


def _attend(config: ModelConfig, query: Array, caches: Mapping[str, kv.Cache], name: str, count: int) -> Array:
    """Attention of `count` tokens, one after the other, to the named cache, in all layers."""
    return _attentions(config, count, caches[name], query)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attentions(config: ModelConfig, count: int, cache: kv.Cache, query: Array) -> Array:
    """query [B, 1, N, H]. What comes out of a layer asks the next one, so that nothing is left out or done at once."""
    position = cache.length[:, None]

    def one(query: Array, layer: kv.LayerCache) -> tuple[Array, None]:
        out, _ = attend(query, [Segment(layer.k, layer.v)], position, layer.position, config.sliding_window)
        return out, None

    def all_layers(query: Array, _) -> tuple[Array, None]:
        if not isinstance(cache.layers, tuple):
            return jax.lax.scan(one, query, cache.layers)
        for layer in cache.layers:
            query, _ = one(query, layer)
        return query, None

    return jax.lax.scan(all_layers, query, None, length=count)[0]


def _decide(
    policy: Policy, weights: Any, caches: Mapping[str, kv.Cache], name: str, allowed: int, *, signals: bool = False
) -> Array:
    """A decision over the named cache or, of a policy that has them, its signals alone."""
    return _decisions(policy, signals, weights, caches[name], jnp.int32(allowed))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decisions(policy: Policy, signals: bool, weights: Any, cache: kv.Cache, allowed: Array) -> Array:
    allowed = jnp.broadcast_to(allowed, cache.length.shape)
    if signals and isinstance(policy, DistillCache):
        return policy.features(cache, allowed)
    return keep_set(policy, weights, cache, allowed, jax.random.key(0))
