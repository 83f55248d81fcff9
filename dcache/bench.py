"""Costs measured in one run: a training step, prefill memory, the overhead of eviction while decoding, allocated bytes.

Every time is the median of repeats after a warm-up call that compiles. Ratios are formed within one run, interleaving what
is compared, because machines are shared and noisy.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcache import budget as budgets
from dcache import cache as kv
from dcache import model, rollout
from dcache.attention import Stats, StatsRequest
from dcache.errors import ConfigError
from dcache.generate import generate, pad_prompts
from dcache.learn.distill import DistillConfig, init_state, train_step
from dcache.load import LanguageModel
from dcache.policies.base import Trained, keep_set
from dcache.policies.distillcache import DistillCache
from dcache.signals import PAPER_SIGNALS, needs

Numbers = dict[str, float]


def interleaved(calls: dict[str, Callable[[], Any]], repeats: int) -> Numbers:
    """Median seconds of each call; all are warmed up first, then run in turn `repeats` times."""
    for call in calls.values():
        jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def random_prompt(lm: LanguageModel, length: int, seed: int = 0) -> np.ndarray:
    """int32[length] of random ids; costs do not depend on what a text says."""
    return np.random.default_rng(seed).integers(2, lm.config.vocab_size, length).astype(np.int32)


def training_step(
    lm: LanguageModel, trained: Trained, *, prompt: int = 512, samples: int = 8, horizon: int = 32, evict_every: int = 8,
    teacher_batch: int = 8, repeats: int = 5,
) -> Numbers:  # fmt: skip
    """A training step beside the teacher's prefill of its prompt and `horizon` single-sequence decode steps.

    The step is the whole of it: the teacher reads the prompt, continues it greedily, and K students follow. As in the
    training loop the teacher works on `teacher_batch` prompts at once, and a step costs one share of that; `..._alone` is
    the same with a teacher that reads one prompt at a time.
    """
    policy = trained.policy
    if not isinstance(policy, DistillCache):
        raise ConfigError(f"A training step needs a distillcache policy; {policy.name!r} is not trained.")
    config = DistillConfig(
        steps=100, horizon=horizon, evict_every=evict_every, samples=samples, ratios=(0.25,), warmup_steps=1
    )
    state = init_state(jax.random.key(0), policy, config)
    teach = jax.jit(functools.partial(rollout.teach, config=lm.config, policies=(policy,), weights=((),), decode=True))
    most = budgets.tokens_kept(0.25, prompt + horizon)
    update = jax.jit(functools.partial(train_step, model_config=lm.config, policy=policy, config=config, most=most))
    prefill = jax.jit(functools.partial(model.prefill, config=lm.config, request=StatsRequest()))
    unrolled = isinstance(lm.decode_params["layers"], tuple)

    @jax.jit
    def decode(params, cache, token):
        room = kv.grow(kv.restrict(cache, StatsRequest()), horizon + 1)
        return rollout.greedy_continuation(
            params, lm.config, token, kv.unstack(room) if unrolled else room, horizon + 1
        )

    def read(count: int):
        tokens, length = pad_prompts([random_prompt(lm, prompt, seed) for seed in range(count)], prompt)
        return teach(
            lm.params, lm.decode_params, tokens=tokens, length=length, given=jnp.zeros((count, horizon), jnp.int32),
            given_length=jnp.zeros(count, jnp.int32), own=jnp.ones(count, bool), stop=jnp.asarray([0], jnp.int32),
        )  # fmt: skip

    trajectories = read(1)
    tokens, length = pad_prompts([random_prompt(lm, prompt)], prompt)
    _, cache = prefill(lm.params, tokens=tokens, length=length)
    seconds = interleaved(
        {
            "teach": lambda: read(teacher_batch),
            "teach_alone": lambda: read(1),
            "update": lambda: update(state, lm.params, trajectories, jnp.int32(0), jax.random.key(1)),
            "prefill": lambda: prefill(lm.params, tokens=tokens, length=length),
            "decode": lambda: decode(lm.decode_params, cache, tokens[:, 0]),
        },
        repeats,
    )
    unit = seconds["prefill"] + seconds["decode"]
    step = seconds["teach"] / teacher_batch + seconds["update"]
    alone = seconds["teach_alone"] + seconds["update"]
    return {
        "train.prefill_seconds": seconds["prefill"],
        "train.decode_seconds": seconds["decode"],
        "train.update_seconds": seconds["update"],
        "train.step_seconds": step,
        "train.step_ratio": step / unit,
        "train.step_seconds_alone": alone,
        "train.step_ratio_alone": alone / unit,
    }


def prefill_memory(lm: LanguageModel, length: int = 8000) -> Numbers:
    """Bytes that a prefill with all five signals needs: weights, result, and what XLA reserves while it runs."""
    tokens, lengths = pad_prompts([random_prompt(lm, length)], length)
    run = functools.partial(model.prefill, config=lm.config, request=needs(PAPER_SIGNALS))
    memory: Any = jax.jit(run).lower(lm.params, tokens=tokens, length=lengths).compile().memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return {
        f"prefill.s{length}.total_bytes": total,
        f"prefill.s{length}.temporary_bytes": memory.temp_size_in_bytes,
        f"prefill.s{length}.cache_bytes": memory.output_size_in_bytes,
    }


def eviction_overhead(
    lm: LanguageModel, trained: Trained, *, batch: int, slots: int = 2000, evict_every: int = 16, repeats: int = 5
) -> Numbers:
    """What signals, policy and eviction add to decoding over a cache of the same number of slots.

    Both arms decode `evict_every` tokens from a filled cache; one carries the policy's statistics, scores all slots and
    evicts once.
    """
    # Arrays of the host, because the caches that are made from them are donated.
    length = np.full((batch,), slots, np.int32)
    shape = (lm.config.num_layers, batch, lm.config.num_kv_heads, slots, lm.config.head_dim)
    position = np.where(np.arange(slots) < slots - evict_every, np.arange(slots), -1).astype(np.int32)

    def filled(request: StatsRequest) -> kv.Cache:
        key_k, key_v, key_s = jax.random.split(jax.random.key(0), 3)
        stats = jax.random.uniform(key_s, (shape[0], batch, lm.config.num_heads, slots))
        layers = kv.LayerCache(
            k=jax.random.normal(key_k, shape, lm.config.dtype),
            v=jax.random.normal(key_v, shape, lm.config.dtype),
            position=jnp.broadcast_to(position, shape[:-1]),
            value_norm=jnp.ones(shape[:-1], jnp.float32),
            stats=Stats(
                stats if request.mass else None, stats if request.last else None, {w: stats for w in request.windows}
            ),
        )
        rows = jnp.full((batch, request.rows, slots), 1 / slots) if request.rows else None
        entropy = jnp.ones((batch, request.rows)) if request.rows else None
        cache = kv.Cache(layers, None, jnp.asarray(length), rows, entropy)
        return kv.unstack(cache) if isinstance(lm.decode_params["layers"], tuple) else cache

    @functools.partial(jax.jit, static_argnames="evicts", donate_argnames="cache")
    def run(params, weights, cache, token, *, evicts):
        if evicts:
            allowed = jnp.full((batch,), slots - evict_every, jnp.int32)
            cache = kv.evict(cache, keep_set(trained.policy, weights, cache, allowed, jax.random.key(0)))

        def one(carry, _):
            token, cache = carry
            hidden, cache = model.extend(params, lm.config, token[:, None], cache)
            return (jnp.argmax(model.unembed(params, hidden[:, 0], lm.config), axis=-1).astype(jnp.int32), cache), None

        return jax.lax.scan(one, (token, cache), None, length=evict_every)[0]

    arms = {"plain": (filled(StatsRequest()), False), "evicting": (filled(trained.policy.needs), True)}
    token = jnp.zeros((batch,), jnp.int32)

    def call(name: str) -> Callable[[], Any]:
        def again():
            cache, evicts = arms[name]
            # Only the arrays' contents change; positions are set back so that every repeat does the same work.
            last, cache = run(lm.decode_params, trained.params, cache, token, evicts=evicts)
            arms[name] = (_reset(cache, position, length), evicts)
            return last

        return again

    seconds = interleaved({name: call(name) for name in arms}, repeats)
    label = f"policy.b{batch}.s{slots}.every{evict_every}"
    return {
        f"{label}.plain_step_seconds": seconds["plain"] / evict_every,
        f"{label}.evicting_step_seconds": seconds["evicting"] / evict_every,
        f"{label}.overhead_fraction": seconds["evicting"] / seconds["plain"] - 1.0,
    }


@functools.partial(jax.jit, donate_argnums=0)
def _reset(cache: kv.Cache, position: jax.Array, length: jax.Array) -> kv.Cache:
    def one(layer: kv.LayerCache) -> kv.LayerCache:
        return dataclasses.replace(layer, position=jnp.broadcast_to(position, layer.position.shape))

    return dataclasses.replace(kv.map_layers(one, cache), length=length)


def generation_bytes(lm: LanguageModel, trained: Trained, length: int = 7900, new: int = 16) -> Numbers:
    """Bytes of keys and values that `generate` allocates at 25% on a long prompt, over those of the full cache."""
    result = generate(
        lm,
        [random_prompt(lm, length)],
        trained,
        0.25,
        max_new_tokens=new,
        temperature=0.0,
        top_p=1.0,
        seed=0,
        evict_every=16,
    )
    exact = (length + new) * lm.config.kv_bytes_per_token()
    return {
        f"generate.s{length}.cache_bytes": result.cache_bytes,
        f"generate.s{length}.full_cache_bytes": exact,
        f"generate.s{length}.cache_fraction": result.cache_bytes / exact,
        f"generate.s{length}.prefill_seconds": result.prefill_seconds,
    }
