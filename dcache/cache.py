"""The fixed-shape masked key/value cache: append, evict by mask (training) or by compaction (inference), account bytes.

A slot is described by one number per layer, sequence and key/value head: the position of its token, or `EMPTY`. Keys keep
the rotary embedding of their original position for ever, so slots may lie in any order and evicting a token is the same as
its never having been seen (at unchanged positions).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from dcache.attention import EMPTY, Segment, Stats, StatsRequest
from dcache.axes import constrain, shards
from dcache.errors import BudgetError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer of the cache; with a leading L on every field, all layers stacked.

    Attributes:
      k, v: [B, K, S', H], rotated keys, values. S' are the slots that each sequence owns.
      position: int32[B, K, S], position of the token in each slot or `EMPTY`. S = P + S', shared prompt slots first.
      key_norm, value_norm: f32[B, K, S], L2 norms of each key and value, kept so that scoring does not read them all.
      stats: attention statistics over the S slots.
    """

    k: Array
    v: Array
    position: Array
    key_norm: Array
    value_norm: Array
    stats: Stats


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys, values and statistics of a batch of sequences.

    Attributes:
      layers: all layers stacked (a `LayerCache` with leading axis L; scanned), or a tuple of L `LayerCache`s (unrolled;
        on CPU this avoids one copy of the cache per token).
      prompt: None, or a `Segment` [L, 1, K, P, H] that all sequences of the batch share: the prompt's keys and values
        exist once, and each sequence (a student of a rollout) is a mask over them plus its own tail.
      length: int32[B], tokens seen so far = position of the next token (evicted tokens count).
      rows: f32[B, W, S] or None: attention rows of the last W queries, averaged over heads and layers; the query at
        position p lies in row p % W. Only meaningful while all heads and layers share one slot layout.
      row_entropy: f32[B, W] or None: entropy in nats of each row when its query was processed; 0 for an absent row.
      queries: moments of all queries so far, or None.
      hidden: [B, L, T, D] or None: what entered each layer's attention, of a prompt's tokens. There only between the prefill
        and the policies' own looks at it (`Policy.observe`): it is larger than the keys and values.
    """

    layers: Any
    prompt: Segment | None
    length: Array
    rows: Any = None
    row_entropy: Any = None
    queries: Any = None
    hidden: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueryMoments:
    """Running moments of the queries before their rotary embedding, without those of the first tokens, which are outliers.

    Attributes:
      count: f32[B], queries counted. total: f32[B, L, N, H], their sum. outer: f32[B, L, N, H, H], sum of outer products.
      frequencies: f32[B, H/2], radians per position of the model's rotary embedding, so that the moments can be rotated.
    """

    SKIP: ClassVar[int] = 4

    count: Array
    total: Array
    outer: Array
    frequencies: Array


def axes(cache: Cache) -> Cache:
    """The logical axes of every array of a cache (or of its shapes), in its structure; "." is never split over devices.

    Only keys and values are split along their slots: what describes a slot takes a few percent of their bytes, and where
    it is whole a policy sees all slots, so that the best B of them are exact.
    """

    def layer(at: LayerCache, lead: str) -> LayerCache:
        # The tail behind a shared prompt is short: its slots are not split.
        own: Any = f"{lead}BK.H" if cache.prompt is not None else f"{lead}BKSH"
        slots: Any = f"{lead}BK."
        return LayerCache(own, own, slots, slots, slots, jax.tree.map(lambda _: f"{lead}BN.", at.stats))

    unrolled = isinstance(cache.layers, tuple)
    shared: Any = "L.KSH"
    per_sequence: Any = "B"
    moments: Any = ("B", "BLNH", "BLN..", "B.")
    return Cache(
        layers=tuple(layer(at, "") for at in cache.layers) if unrolled else layer(cache.layers, "L"),
        prompt=None if cache.prompt is None else Segment(shared, shared),
        length=per_sequence,
        rows=None if cache.rows is None else "B..",
        row_entropy=None if cache.row_entropy is None else "B.",
        queries=None if cache.queries is None else QueryMoments(*moments),
        hidden=None if cache.hidden is None else "BLSD",
    )


def laid_out(cache: Cache) -> Cache:
    """The cache, pinned to its place on the current mesh if there is one."""
    return jax.tree.map(lambda letters, x: constrain(x, letters), axes(cache), cache)


def stacked(cache: Cache) -> LayerCache:
    """All layers of a cache with a leading axis L, whatever its layout."""
    if isinstance(cache.layers, tuple):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *cache.layers)
    return cache.layers


def shape(cache: Cache) -> tuple[int, int, int, int]:
    """(L, B, K, S) of the cache's slots."""
    if isinstance(cache.layers, tuple):
        return (len(cache.layers), *cache.layers[0].position.shape)
    return cache.layers.position.shape


def by_layer(cache: Cache, read: Callable[[LayerCache], Array], first: int = 0) -> Array:
    """What `read` gives of each layer from `first` on, stacked: [L, ...]."""
    if isinstance(cache.layers, tuple):
        return jnp.stack([read(layer) for layer in cache.layers[first:]])
    return jax.vmap(read)(jax.tree.map(lambda x: x[first:], cache.layers) if first else cache.layers)


def positions(cache: Cache) -> Array:
    """int32[L, B, K, S] position of every slot's token, `EMPTY` where there is none."""
    return by_layer(cache, lambda layer: layer.position)


def map_layers(function: Callable[..., LayerCache], cache: Cache, *others: Array) -> Cache:
    """Applies `function(layer, *other_l)` to every layer; `others` are arrays with a leading axis L."""
    if isinstance(cache.layers, tuple):
        layers: Any = tuple(function(layer, *(o[i] for o in others)) for i, layer in enumerate(cache.layers))
    else:
        layers = jax.vmap(function)(cache.layers, *others)
    return dataclasses.replace(cache, layers=layers)


def unstack(cache: Cache) -> Cache:
    """The same cache as a tuple of layers (see `Cache.layers`)."""
    if isinstance(cache.layers, tuple):
        return cache
    count = cache.layers.position.shape[0]
    return dataclasses.replace(
        cache, layers=tuple(jax.tree.map(lambda x, i=i: x[i], cache.layers) for i in range(count))
    )


def from_prompt(
    k: Array, v: Array, position: Array, stats: Stats, rows: Array | None, queries: QueryMoments | None = None,
    hidden: Array | None = None,
) -> Cache:  # fmt: skip
    """The cache that a prefill leaves behind, slot t holding token t.

    Args:
      k, v: [L, B, K, T, H]. position: int32[B, T], `EMPTY` for padding. stats: fields [L, B, N, T].
      rows: f32[B, W, T] or None, see `Cache.rows`. queries, hidden: see `Cache`.
    """
    layers, _, heads, _, _ = k.shape
    full = jnp.broadcast_to(position[None, :, None], (layers, position.shape[0], heads, position.shape[1]))
    # Padding leaves no trace: attention statistics of empty slots are zero already, their norms are set so here.
    key_norm, value_norm = (jnp.where(full >= 0, norms(x), 0.0) for x in (k, v))
    length = jnp.sum(position >= 0, axis=1, dtype=jnp.int32)
    entropy = None if rows is None else row_entropies(rows)
    return laid_out(
        Cache(LayerCache(k, v, full, key_norm, value_norm, stats), None, length, rows, entropy, queries, hidden)
    )


def norms(x: Array) -> Array:
    """L2 norms f32[...] of keys or values [..., H]."""
    return jnp.linalg.norm(x.astype(jnp.float32), axis=-1)


def row_entropies(rows: Array) -> Array:
    """Entropy in nats of attention rows f32[..., S] that sum to one (or are all zero: entropy 0)."""
    return -jnp.sum(jnp.where(rows > 0, rows * jnp.log(jnp.where(rows > 0, rows, 1.0)), 0.0), axis=-1)


def first_free(position: Array) -> Array:
    """int32[...]: the first empty slot along the last axis of int32[..., S]."""
    return jnp.argmax(position < 0, axis=-1).astype(jnp.int32)


def append(layer: LayerCache, k: Array, v: Array, position: Array, start: Array) -> LayerCache:
    """Writes T new tokens into consecutive slots of one layer.

    Args:
      layer: one layer. k, v: [B, T, K, H] of the new tokens, k rotated. position: int32[B, T].
      start: int32[B, K], first of the T slots, counted among the slots that the sequence owns.

    Statistics of the new slots are left as they are: `accumulate` clears what was empty.
    """
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)  # [B, K, T, H]

    def write(slots, new, at):  # [S, ...], [T, ...], []
        return jax.lax.dynamic_update_slice(slots, new, (at, *(jnp.zeros_like(at),) * (slots.ndim - 1)))

    write_all = jax.vmap(jax.vmap(write))
    # What describes slots has those of a shared prompt too, before the sequence's own.
    among_all = start + (layer.position.shape[-1] - layer.k.shape[2])
    spread = jnp.broadcast_to(position[:, None], keys.shape[:-1])
    return LayerCache(
        k=write_all(layer.k, keys, start),
        v=write_all(layer.v, values, start),
        position=write_all(layer.position, spread, among_all),
        key_norm=write_all(layer.key_norm, norms(keys), among_all),
        value_norm=write_all(layer.value_norm, norms(values), among_all),
        stats=layer.stats,
    )


def evict(cache: Cache, keep: Array) -> Cache:
    """Evicts by mask: slots outside `keep` (bool[L, B, K, S]) become empty and are reused by later tokens."""

    def one(layer: LayerCache, keep_l: Array) -> LayerCache:
        return dataclasses.replace(layer, position=jnp.where(keep_l, layer.position, EMPTY))

    return map_layers(one, cache, keep)


def compact(cache: Cache, keep: Array, kept: int, room: int) -> Cache:
    """Evicts by compaction: gathers the survivors into a smaller cache.

    Args:
      cache: without a shared prompt. keep: bool[L, B, K, S], at most `kept` of the S per layer, sequence and head.
      kept: static upper bound of survivors. room: empty slots to add for tokens to come.

    Returns:
      A cache of `kept + room` slots, survivors in their former order. `rows` survive only if all heads and layers keep
      the same slots, which the caller states by passing a cache that has them.
    """
    if cache.prompt is not None:
        raise BudgetError("compact was given a cache with a shared prompt; evict by mask there.")
    slots = keep.shape[-1]
    if kept > slots:
        raise BudgetError(f"compact was asked to keep {kept} of {slots} slots; pass kept <= {slots}.")
    # Survivors first, each group in slot order: a stable sort of a boolean key.
    order = jnp.argsort(jnp.logical_not(keep), axis=-1, stable=True)[..., :kept]
    survives = jnp.take_along_axis(keep, order, axis=-1)

    def one(layer: LayerCache, order_l: Array, survives_l: Array) -> LayerCache:
        def pick(x):  # [B, K, S] -> [B, K, kept + room]
            return _pad(jnp.where(survives_l, jnp.take_along_axis(x, order_l, axis=-1), 0.0), room, 0)

        def pick_heads(x):  # [B, N, S], G query heads per key/value head
            b, n, s = x.shape
            heads = order_l.shape[1]
            grouped = x.reshape(b, heads, n // heads, s)
            taken = jnp.where(survives_l[:, :, None], jnp.take_along_axis(grouped, order_l[:, :, None], axis=-1), 0.0)
            return _pad(taken.reshape(b, n, kept), room, 0)

        taken_position = jnp.where(survives_l, jnp.take_along_axis(layer.position, order_l, axis=-1), EMPTY)
        return LayerCache(
            k=_pad(jnp.take_along_axis(layer.k, order_l[..., None], axis=2), room, 0, axis=2),
            v=_pad(jnp.take_along_axis(layer.v, order_l[..., None], axis=2), room, 0, axis=2),
            position=_pad(taken_position, room, EMPTY),
            key_norm=pick(layer.key_norm),
            value_norm=pick(layer.value_norm),
            stats=jax.tree.map(pick_heads, layer.stats),
        )

    new = map_layers(one, cache, order, survives)
    if cache.rows is None:
        return laid_out(new)
    # All layers and heads keep the same slots here, so those of the first stand for all.
    rows = jnp.where(survives[0, :, :1], jnp.take_along_axis(cache.rows, order[0, :, :1], axis=-1), 0.0)
    return laid_out(dataclasses.replace(new, rows=_pad(rows, room, 0)))


def _pad(x: Array, room: int, value: int, axis: int = -1) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, room)
    return jnp.pad(x, widths, constant_values=value)


def share_prompt(cache: Cache, students: int, room: int) -> Cache:
    """Turns the cache of one prompt into `students` sequences that share its keys and values.

    Args:
      cache: of a single sequence (B = 1), stacked. students: A. room: slots of each student's own tail.
    """
    layer = stacked(cache)
    layers, b, heads, _, width = layer.k.shape
    if b != 1 or cache.prompt is not None:
        raise BudgetError(f"share_prompt was given {b} sequences; give one prompt with its own cache.")

    def spread(x, value=0):  # [L, 1, ., P] -> [L, A, ., P + room]
        return _pad(jnp.broadcast_to(x, (x.shape[0], students, *x.shape[2:])), room, value)

    tail = (layers, students, heads, room, width)
    own = LayerCache(
        k=jnp.zeros(tail, layer.k.dtype),
        v=jnp.zeros(tail, layer.v.dtype),
        position=spread(layer.position, EMPTY),
        key_norm=spread(layer.key_norm),
        value_norm=spread(layer.value_norm),
        stats=jax.tree.map(spread, layer.stats),
    )

    def repeat(x):
        return None if x is None else jnp.broadcast_to(x, (students, *x.shape[1:]))

    rows = None if cache.rows is None else _pad(repeat(cache.rows), room, 0)
    queries = jax.tree.map(repeat, cache.queries)
    return laid_out(
        Cache(own, Segment(layer.k, layer.v), repeat(cache.length), rows, repeat(cache.row_entropy), queries)
    )


def nbytes(cache: Cache, *, statistics: bool = False) -> int:
    """Bytes of keys and values that are allocated; with `statistics`, of everything that the cache holds."""
    if statistics:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    layers = cache.layers if isinstance(cache.layers, tuple) else (cache.layers,)
    own = sum(layer.k.nbytes + layer.v.nbytes for layer in layers)
    return own + (0 if cache.prompt is None else cache.prompt.k.nbytes + cache.prompt.v.nbytes)


def restrict(cache: Cache, request: StatsRequest) -> Cache:
    """Drops the statistics that `request` does not ask for, so that a decode step does not carry them on."""

    def one(stats: Stats) -> Stats:
        return Stats(
            mass=stats.mass if request.mass else None,
            last=stats.last if request.last else None,
            windows={w: stats.windows[w] for w in request.windows},
            squares={w: stats.squares[w] for w in request.spreads},
            surprisals={w: stats.surprisals[w] for w in request.spreads},
            projected=stats.projected if request.projected else None,
            extra={name: stats.extra[name] for name in request.extra},
        )

    if isinstance(cache.layers, tuple):
        layers = tuple(dataclasses.replace(layer, stats=one(layer.stats)) for layer in cache.layers)
    else:
        layers = dataclasses.replace(cache.layers, stats=one(cache.layers.stats))
    rows = (cache.rows, cache.row_entropy) if request.rows else (None, None)
    queries = cache.queries if request.queries else None
    hidden = cache.hidden if request.hidden else None
    return dataclasses.replace(cache, layers=layers, rows=rows[0], row_entropy=rows[1], queries=queries, hidden=hidden)


def with_extra(cache: Cache, name: str, value: Array) -> Cache:
    """The cache (stacked) with f32[L, B, N or a multiple of K, S] among the statistics that policies put there themselves."""
    stats = cache.layers.stats
    stats = dataclasses.replace(stats, extra=stats.extra | {name: value})
    return dataclasses.replace(cache, layers=dataclasses.replace(cache.layers, stats=stats))


def select(cache: Cache, index: Array) -> Cache:
    """The cache of one sequence of a stacked batch: index int32 scalar -> batch size 1."""

    def pick(x: Array, axis: int) -> Array:
        if shards("data") * shards("fsdp") == 1:
            return jax.lax.dynamic_slice_in_dim(x, index, 1, axis)
        # A slice of a split axis would gather all sequences on every device; a sum of which one term counts does not.
        here = jnp.arange(x.shape[axis]) == index
        here = here.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
        return jnp.sum(jnp.where(here, x, 0), axis, x.dtype, keepdims=True)

    rest = dataclasses.replace(cache, layers=None, prompt=None)
    rest = jax.tree.map(lambda x: pick(x, 0), rest)
    return laid_out(dataclasses.replace(rest, layers=jax.tree.map(lambda x: pick(x, 1), cache.layers)))


def grow(cache: Cache, room: int) -> Cache:
    """Adds `room` empty slots to every sequence of a stacked cache without a shared prompt."""
    layers = cache.layers
    grown = LayerCache(
        k=_pad(layers.k, room, 0, axis=-2),
        v=_pad(layers.v, room, 0, axis=-2),
        position=_pad(layers.position, room, EMPTY),
        key_norm=_pad(layers.key_norm, room, 0),
        value_norm=_pad(layers.value_norm, room, 0),
        stats=jax.tree.map(lambda x: _pad(x, room, 0), layers.stats),
    )
    return laid_out(
        dataclasses.replace(cache, layers=grown, rows=None if cache.rows is None else _pad(cache.rows, room, 0))
    )
