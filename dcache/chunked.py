"""Prompts read chunk by chunk, with an eviction after each: memory depends on budget and chunk, not on the prompt.

After every chunk the policy chooses, among what is left of the prompt so far and the chunk, the tokens of the budget that the
*whole* prompt has; nothing goes before the cache holds more than that. A prompt of one chunk is read as `model.prefill` reads
it. What differs from one reading: tokens are judged before the rest of the prompt, a question at its end included, is seen,
and later chunks read an evicted cache. Statistics of the most recent queries are those of the newest chunk; what a policy
notes when it looks at the prompt (`Policy.observe`) it notes of each chunk, relative to that chunk.

The host loops over chunks and one program serves them all, so prompts of any length compile nothing new.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dcache import cache as kv
from dcache import model
from dcache.ahead import compiled
from dcache.attention import EMPTY, Stats
from dcache.config import ModelConfig
from dcache.errors import ConfigError
from dcache.policies.base import Policy, keep_set


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static facts of one reading. kept: slots of each head between chunks, at least what the policy may keep of the prompt."""

    config: ModelConfig
    policy: Policy
    kept: int


def check(policy: Policy, chunk: int) -> None:
    """Raises ConfigError if a policy cannot evict between chunks of this many tokens."""
    if policy.offline:
        raise ConfigError(f"{policy.name} cannot evict while a prompt is read in chunks: {policy.offline}.")
    if chunk < max(policy.needs.tail, 1):
        raise ConfigError(
            f"{policy.name} looks at the attention of the last {policy.needs.tail} queries; read the prompt in chunks of at "
            f"least that many tokens, not {chunk}."
        )


def grid(prompts: Sequence[np.ndarray], chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts int32[T_i] as chunks: tokens and positions int32[C, B, chunk], padded on the left.

    All prompts end with the last chunk, so that the statistics of the last queries are of the last chunk for all of them.
    """
    count = -(-max(map(len, prompts)) // chunk)
    tokens = np.zeros((len(prompts), count * chunk), np.int32)
    position = np.full_like(tokens, EMPTY)
    for b, prompt in enumerate(prompts):
        tokens[b, -len(prompt) :] = prompt
        position[b, -len(prompt) :] = np.arange(len(prompt))
    shape = (len(prompts), count, chunk)
    return tokens.reshape(shape).swapaxes(0, 1), position.reshape(shape).swapaxes(0, 1)


def read(
    plan: Plan,
    params: model.Params,
    weights: Any,
    prompts: Sequence[np.ndarray],
    chunk: int,
    allowed: Array,
    key: Array,
) -> tuple[Array, kv.Cache, float]:
    """Reads prompts and evicts after each chunk.

    Args:
      params: stacked weights of the language model. weights: the policy's. prompts: int32[T_i] each.
      chunk: tokens read at once. allowed: int32[B], tokens that stay of each whole prompt.

    Returns:
      The last token's hidden state [B, D]; a stacked cache of `plan.kept` slots with the statistics that the policy needs; and
      the seconds that compiling took.

    Raises:
      ConfigError: see `check`.
    """
    check(plan.policy, chunk)
    tokens, position = grid(prompts, chunk)
    hidden, cache, compiling = jnp.zeros(()), _nothing(plan, len(prompts)), 0.0
    for c in range(len(tokens)):
        args = (
            params,
            weights,
            cache,
            jnp.asarray(tokens[c]),
            jnp.asarray(position[c]),
            allowed,
            jax.random.fold_in(key, c),
        )
        # The first chunk's cache is empty: there is nothing to donate.
        step, seconds = compiled(_NEXT if c else _FIRST, plan, *args)
        compiling += seconds
        hidden, cache = step(*args)
    return hidden, cache, compiling


def _nothing(plan: Plan, batch: int) -> kv.Cache:
    """A cache without slots."""
    config, request = plan.config, plan.policy.needs
    heads = (config.num_layers, batch, config.num_kv_heads)
    none = jnp.zeros((*heads, 0))
    statistic = jnp.zeros((config.num_layers, batch, config.num_heads, 0))
    keys = jnp.zeros((*heads, 0, config.head_dim), config.dtype)
    layers = kv.LayerCache(
        k=keys, v=jnp.array(keys), position=jnp.zeros((*heads, 0), jnp.int32), key_norm=none,
        value_norm=jnp.array(none),
        stats=Stats(mass=statistic if request.mass else None, projected=statistic if request.projected else None),
    )  # fmt: skip
    queries = None
    if request.queries:
        shape = (batch, config.num_layers, config.num_heads, config.head_dim)
        half = jnp.zeros((batch, config.head_dim // 2))
        queries = kv.QueryMoments(jnp.zeros(batch), jnp.zeros(shape), jnp.zeros((*shape, config.head_dim)), half)
    return kv.Cache(layers, None, jnp.zeros(batch, jnp.int32), queries=queries)


def _step(
    plan: Plan,
    params: model.Params,
    weights: Any,
    cache: kv.Cache,
    tokens: Array,
    position: Array,
    allowed: Array,
    key: Array,
) -> tuple[Array, kv.Cache]:
    """One chunk: the last column's hidden states [B, D] and the cache of `kept` slots after the eviction."""
    before = cache.layers.stats.extra
    hidden, cache = model.prefill_chunk(params, plan.config, tokens, position, cache, plan.policy.needs)
    noted = plan.policy.observe(weights, params, plan.config, _newest(cache, tokens.shape[1]), tokens, None)
    extra = noted.layers.stats.extra
    if before:
        extra = {name: jnp.concatenate([before[name], new], axis=-1) for name, new in extra.items()}
    stats = dataclasses.replace(cache.layers.stats, extra=extra)
    cache = dataclasses.replace(cache, layers=dataclasses.replace(cache.layers, stats=stats), hidden=None)
    slots = kv.positions(cache).shape[-1]
    if slots < plan.kept:
        cache = kv.grow(cache, plan.kept - slots)
    # A prompt of a batch that has not begun yet holds nothing, and no policy is made to divide by its length.
    begun = dataclasses.replace(cache, length=jnp.maximum(cache.length, 1))
    keep = keep_set(plan.policy, weights, begun, allowed, key) & (kv.positions(cache) >= 0)
    return hidden[:, -1], kv.compact(cache, keep, plan.kept, 0)


def _newest(cache: kv.Cache, count: int) -> kv.Cache:
    """The last `count` slots of a stacked cache, as a policy looks at a prompt that was just read."""
    layers = cache.layers
    newest = kv.LayerCache(
        k=layers.k[..., -count:, :], v=layers.v[..., -count:, :], position=layers.position[..., -count:],
        key_norm=layers.key_norm[..., -count:], value_norm=layers.value_norm[..., -count:],
        stats=jax.tree.map(lambda x: x[..., -count:], layers.stats),
    )  # fmt: skip
    rows = None if cache.rows is None else cache.rows[..., -count:]
    return dataclasses.replace(cache, layers=newest, rows=rows, length=jnp.maximum(cache.length, 1))


_FIRST = jax.jit(_step, static_argnums=0)
_NEXT = jax.jit(_step, static_argnums=0, donate_argnums=3)
