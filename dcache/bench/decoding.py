"""What decoding costs: with the full cache and with a quarter of it, beside what their bytes allow, and what evicting adds.

Caches are filled with made-up keys and values, since their cost does not depend on what they say; no prompt is read.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dcache import budget as budgets
from dcache import cache as kv
from dcache import model, rollout
from dcache.attention import Stats, StatsRequest
from dcache.bench.timing import Copying, Numbers, Reading, interleaved
from dcache.config import ModelConfig
from dcache.load import LanguageModel
from dcache.policies.base import Policy, Trained, keep_set

RATIO = 0.25


def filled(lm: LanguageModel, request: StatsRequest, *, batch: int, slots: int, free: int, unrolled: bool) -> kv.Cache:
    """A cache of `batch` sequences whose `slots` slots are all filled but for the last `free`, with made-up contents."""
    config = lm.config
    shape = (config.num_layers, batch, config.num_kv_heads, slots, config.head_dim)
    key_k, key_v, key_s = jax.random.split(jax.random.key(0), 3)
    stats = jax.random.uniform(key_s, (config.num_layers, batch, config.num_heads, slots))
    layers = kv.LayerCache(
        k=jax.random.normal(key_k, shape, config.dtype),
        v=jax.random.normal(key_v, shape, config.dtype),
        position=jnp.broadcast_to(_positions(slots, free), shape[:-1]),
        key_norm=jnp.ones(shape[:-1], jnp.float32),
        value_norm=jnp.ones(shape[:-1], jnp.float32),
        stats=Stats(
            stats if request.mass else None, stats if request.last else None, {w: stats for w in request.windows}
        ),
    )
    rows = jnp.full((batch, request.rows, slots), 1 / slots) if request.rows else None
    entropy = jnp.ones((batch, request.rows)) if request.rows else None
    cache = kv.Cache(layers, None, jnp.full((batch,), slots, jnp.int32), rows, entropy)
    return kv.unstack(cache) if unrolled else cache


def _positions(slots: int, free: int) -> np.ndarray:
    """int32[S]; -1 marks an empty slot. An array of the host, because caches that are made from it are donated."""
    return np.where(np.arange(slots) < slots - free, np.arange(slots), -1).astype(np.int32)


class Decoding:
    """A call that decodes `steps` tokens of `batch` sequences, the same at every call.

    With a policy (`trained`) the cache carries its statistics, and before every `every` tokens all slots are scored and as
    many tokens are evicted as will come: the cache stays full. Without one there are `steps` empty slots.
    """

    def __init__(
        self, lm: LanguageModel, trained: Trained | None, *, batch: int, slots: int, steps: int, every: int = 0
    ):
        request = trained.policy.needs if trained else StatsRequest()
        self._free = _positions(slots, every if trained else steps)
        self._length = np.full((batch,), slots, np.int32)
        unrolled = isinstance(lm.decode_params["layers"], tuple)
        self._cache = filled(lm, request, batch=batch, slots=slots, free=every if trained else steps, unrolled=unrolled)
        self._token = jnp.zeros((batch,), jnp.int32)
        self._run = functools.partial(
            _decode, lm.decode_params, trained.params if trained else (), config=lm.config,
            policy=trained.policy if trained else None, steps=steps, every=every,
        )  # fmt: skip

    def __call__(self) -> Array:
        """int32[B], the last tokens."""
        last, cache = self._run(self._cache, self._token)
        # Only the arrays' contents have changed; positions are set back so that every call does the same work.
        self._cache = _reset(cache, self._free, self._length)
        return last


@functools.partial(jax.jit, static_argnames=("config", "policy", "steps", "every"), donate_argnames="cache")
def _decode(
    params: model.Params, weights: Any, cache: kv.Cache, token: Array, *, config: ModelConfig, policy: Policy | None,
    steps: int, every: int,
) -> tuple[Array, kv.Cache]:  # fmt: skip
    """Greedy tokens: the last ones, int32[B], and the cache."""
    if policy is None:
        tokens, cache = rollout.greedy(params, config, token, cache, steps)
        return tokens[:, -1], cache

    def between_evictions(carry, key):
        token, cache = carry
        allowed = jnp.full(token.shape, kv.positions(cache).shape[-1] - every, jnp.int32)
        cache = kv.evict(cache, keep_set(policy, weights, cache, allowed, key))
        tokens, cache = rollout.greedy(params, config, token, cache, every)
        return (tokens[:, -1], cache), None

    keys = jax.random.split(jax.random.key(0), steps // every)
    return jax.lax.scan(between_evictions, (token, cache), keys)[0]


@functools.partial(jax.jit, donate_argnums=0)
def _reset(cache: kv.Cache, position: Array, length: Array) -> kv.Cache:
    def one(layer: kv.LayerCache) -> kv.LayerCache:
        return dataclasses.replace(layer, position=jnp.broadcast_to(position, layer.position.shape))

    return dataclasses.replace(kv.map_layers(one, cache), length=length)


def step_bytes(lm: LanguageModel, batch: int, slots: int) -> int:
    """Bytes that a decode step must read: every weight that takes part once, and all keys and values.

    Of a separate embedding table one row per sequence is read, and a tied one is the output matrix: one of the two counts.
    """
    weights = sum(x.nbytes for x in jax.tree.leaves(lm.params))
    if not lm.config.tie_embeddings:
        weights -= lm.params["embed"].nbytes
    return weights + batch * slots * lm.config.kv_bytes_per_token()


def decode(
    lm: LanguageModel, trained: Trained, *, batch: int, slots: int, overheads: Sequence[int] = (), steps: int = 16,
    repeats: int = 5, copied: int = 2**30, bare: bool = True,
) -> Numbers:  # fmt: skip
    """Decoding with full caches of `slots` slots, with a quarter of them, and what they allow.

    Keys begin with `decode.b<batch>.s<slots>`, and `.bf16` if the model is in bfloat16:

      step_seconds, quarter_step_seconds: of one token of each sequence. The quarter evicts every `steps` tokens with the
        policy, and has `steps` slots for the tokens between.
      speedup_25: the first over the second. speedup_25_bare: the same without policy and statistics (if `bare`).
      speedup_bytes_limit: weights and full caches over weights and a quarter of the caches. speedup_share: of that limit.
      bandwidth_fraction: bytes of weights and full caches over time, over the bandwidth of copying measured in between.
      read_fraction: the same over the bandwidth of reading, since a step writes next to nothing.

    For every number in `overheads` (divisors of `steps`) also `policy.b<batch>.s<slots>.every<number>.overhead_fraction`: what
    statistics, policy and evictions add to a step with caches of `slots` slots.
    """
    kept = budgets.tokens_kept(RATIO, slots)
    copying, reading = Copying(copied), Reading(copied)
    arms = {
        "full": Decoding(lm, None, batch=batch, slots=slots, steps=steps),
        "quarter": Decoding(lm, trained, batch=batch, slots=kept + steps, steps=steps, every=steps),
    }
    if bare:
        arms["bare"] = Decoding(lm, None, batch=batch, slots=kept + steps, steps=steps)
    for every in overheads:
        arms[f"every{every}"] = Decoding(lm, trained, batch=batch, slots=slots, steps=steps, every=every)
    seconds = interleaved({"copy": copying, "read": reading, **arms}, repeats)
    step = {name: value / steps for name, value in seconds.items()}
    whole, quarter = (step_bytes(lm, batch, n) for n in (slots, kept))
    label = f"decode.b{batch}.s{slots}" + (".bf16" if lm.config.dtype == "bfloat16" else "")
    numbers = {
        f"{label}.step_seconds": step["full"],
        f"{label}.quarter_step_seconds": step["quarter"],
        f"{label}.speedup_25": step["full"] / step["quarter"],
        f"{label}.speedup_bytes_limit": whole / quarter,
        f"{label}.speedup_share": step["full"] / step["quarter"] * quarter / whole,
        f"{label}.bandwidth_fraction": whole / step["full"] / copying.rate(seconds["copy"]),
        f"{label}.read_fraction": whole / step["full"] / reading.rate(seconds["read"]),
    }
    if bare:
        numbers[f"{label}.speedup_25_bare"] = step["full"] / step["bare"]
    for every in overheads:
        numbers[f"policy.b{batch}.s{slots}.every{every}.overhead_fraction"] = step[f"every{every}"] / step["full"] - 1.0
    return numbers
