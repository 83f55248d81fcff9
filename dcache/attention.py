"""Attention, and the statistics of it that eviction policies read: the reference, behind the seam `dcache.kernels.seam`.

No matrix of all queries by all keys is ever held: the prefill runs over blocks of queries and recomputes nothing, so its
memory is linear in the prompt. Logits, softmax and statistics are float32 whatever the dtype of the cache.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from dcache.axes import constrain, platform, shards

EMPTY = -1
"""Position of a cache slot that holds no token, and of a query that is padding."""

LATER = float("inf")
"""Value in `Stats.extra` of a token that came after a policy looked at the prompt."""

# Finite, so that a padded query (which sees nothing) gives the mean of V instead of NaN; its output is never used.
_MASKED = -1e30
_LARGEST_EXPONENT = 60.0  # of what was left out; its exponential is finite in float32
_QUERY_BLOCK = 128
_MAX_KEY_PREFIXES = 8
_SPLIT = "sequence"  # the mesh axis along which slots lie


@dataclasses.dataclass(frozen=True)
class StatsRequest:
    """Which attention statistics a policy needs; nothing else is computed.

    Attributes:
      mass: attention mass that each slot received from all queries so far, per query head.
      last: attention of the most recent query, per query head.
      windows: for each width w in it, the attention mass of the w most recent queries is summed per query head.
      spreads: for each width w in it, squares and surprisals of the attention of the w most recent queries are summed.
      rows: number of most recent queries whose attention, averaged over all heads and layers, is kept row by row (it
        gives the paper's entropy signal); 0 for none.
      projected: L1 norm of each value after its query head's output projection.
      queries: mean and second moment of the queries before their rotary embedding.
      hidden: normalised hidden states that enter each layer's attention, of the prompt's tokens, for `Policy.observe` only.
      extra: names of statistics that the policy itself puts into `Stats.extra` (see `Policy.observe`).
    """

    mass: bool = False
    last: bool = False
    windows: tuple[int, ...] = ()
    rows: int = 0
    spreads: tuple[int, ...] = ()
    projected: bool = False
    queries: bool = False
    hidden: bool = False
    extra: tuple[str, ...] = ()

    def __or__(self, other: "StatsRequest") -> "StatsRequest":
        """The union of two requests."""
        return StatsRequest(
            self.mass or other.mass,
            self.last or other.last,
            tuple(sorted({*self.windows, *other.windows})),
            max(self.rows, other.rows),
            tuple(sorted({*self.spreads, *other.spreads})),
            self.projected or other.projected,
            self.queries or other.queries,
            self.hidden or other.hidden,
            tuple(sorted({*self.extra, *other.extra})),
        )

    @property
    def tail(self) -> int:
        """How many of the last queries of a prompt are looked at one by one."""
        return max(*self.windows, *self.spreads, self.rows, int(self.last), 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    """Attention statistics of one layer (or, stacked, of all). A field that was not requested is None.

    Attributes:
      mass: f32[B, N, S], sum over queries of the attention probability.
      last: f32[B, N, S], probabilities of the most recent query.
      windows: width w -> f32[B, N, S], sum over the most recent w queries. Exact after a prefill; each later query
        multiplies it by `1 - 1/w` and adds its own, since per-head rows of the window would cost as much as the cache.
      squares, surprisals: width w -> f32[B, N, S], sums of p^2 and of -p log p (nats) over the most recent w queries,
        carried on like `windows`.
      projected: f32[B, N, S], L1 norm of the value after the query head's output projection.
      extra: name -> f32[B, N or K, S] of the prompt's tokens, put there by a policy; later tokens have `LATER`. Instead of
        K heads there may be any multiple of K, several numbers for each key/value head.
    """

    mass: Any = None
    last: Any = None
    windows: dict[int, Array] = dataclasses.field(default_factory=dict)
    squares: dict[int, Array] = dataclasses.field(default_factory=dict)
    surprisals: dict[int, Array] = dataclasses.field(default_factory=dict)
    projected: Any = None
    extra: dict[str, Array] = dataclasses.field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment:
    """Keys and values of one layer. `k`, `v`: [B or 1, K, S, H]; a leading 1 is shared by the whole batch."""

    k: Array
    v: Array


def visible(query_position: Array, key_position: Array, sliding_window: int | None) -> Array:
    """Which query sees which slot: filled, not in the future, and inside the sliding window if there is one.

    Args:
      query_position: int32[..., T]. key_position: int32[..., S], `EMPTY` where the slot holds nothing.
      sliding_window: number of most recent positions seen, the query's own included, or None.

    Returns:
      bool[..., T, S].
    """
    q, k = query_position[..., :, None], key_position[..., None, :]
    seen = (k >= 0) & (k <= q)
    if sliding_window is not None:
        seen &= k > q - sliding_window
    return seen


def _einsum(spec: str, x: Array, y: Array) -> Array:
    """A product of two tensors of one dtype, accumulated and returned in float32."""
    if x.dtype != jnp.float32 and platform() == "cpu":
        # XLA's CPU backend has no batched bfloat16 product with a float32 result.
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def _logits(q: Array, k: Array, order: str) -> Array:
    """q [B,T,K,G,H] . k [B or 1,K,S,H] -> f32[order], scaled; order names the axes b, k, t, g, s."""
    scale = 1.0 / math.sqrt(q.shape[-1])
    if k.shape[0] == 1:
        # One matrix product per key/value head for the whole batch: shared keys are read once.
        return _einsum(f"btkgh,ksh->{order}", q, k[0]) * scale
    if _merges(order):
        b, t, heads, g, h = q.shape
        rows = q.swapaxes(1, 2).reshape(b, heads, t * g, h)
        return _einsum("bkmh,bksh->bkms", rows, k).reshape(b, heads, t, g, -1) * scale
    return _einsum(f"btkgh,bksh->{order}", q, k) * scale


def _mix(probs: Array, v: Array, order: str) -> Array:
    """probs f32[order], v [B or 1,K,S,H] -> f32[B,T,K,G,H]."""
    probs = probs.astype(v.dtype)
    if v.shape[0] == 1:
        return _einsum(f"{order},ksh->btkgh", probs, v[0])
    if _merges(order):
        b, heads, t, g, s = probs.shape
        out = _einsum("bkms,bksh->bkmh", probs.reshape(b, heads, t * g, s), v)
        return out.reshape(b, heads, t, g, -1).swapaxes(1, 2)
    return _einsum(f"{order},bksh->btkgh", probs, v)


def _merges(order: str) -> bool:
    """Whether all queries of a key are to be one axis of a product.

    With two, even of size 1, XLA's CPU backend takes three times as long. Other backends keep the plain product: there no gain
    has been measured, and what libtpu makes of it is recorded (`tests/golden/compiled.json`).
    """
    return order == "bktgs" and platform() == "cpu"


def attend(
    q: Array, segments: Sequence[Segment], query_position: Array, key_position: Array, sliding_window: int | None = None,
    weight: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Attention of few queries over a cache made of one or more segments.

    Args:
      q: [B, T, N, H], rotated. Query head n belongs to key/value head n // G.
      segments: keys and values; their slots are concatenated in order, S in all.
      query_position: int32[B, T]. key_position: int32[B, K, S], `EMPTY` where nothing is visible.
      sliding_window: see `visible`.
      weight: f32[B, K, S] or None, how much of each slot is there, from 0 to 1 (see `weighted_softmax`).

    Returns:
      Output [B, T, N, H] in the dtype of q, and the probabilities f32[B, N, T, S].
    """
    first, count = segments[0], shards(_SPLIT)
    if count == 1 or first.k.shape[2] % count:
        return _attend(q, segments, query_position, key_position, sliding_window, weight, split=False)

    def local(q, first, rest, query_position, positions, weights):
        # What is not split counts on the first device only.
        once = jax.lax.axis_index(_SPLIT) == 0
        key_position = jnp.concatenate([positions[0], jnp.where(once, positions[1], EMPTY)], axis=-1)
        weight = None if weights is None else jnp.concatenate(weights, axis=-1)
        out, probs = _attend(q, [first, *rest], query_position, key_position, sliding_window, weight, split=True)
        own = first.k.shape[2]
        return out, probs[..., :own], jax.lax.psum(probs[..., own:], _SPLIT)

    def parts(x):
        return None if x is None else tuple(jnp.split(x, [first.k.shape[2]], axis=-1))

    whole, slots = PartitionSpec(), PartitionSpec(None, None, _SPLIT)
    probs_slots = PartitionSpec(None, None, None, _SPLIT)
    out, probs, rest = jax.shard_map(
        local, in_specs=(whole, slots, whole, whole, (slots, whole), None if weight is None else (slots, whole)),
        out_specs=(whole, probs_slots, whole), axis_names={_SPLIT},
    )(q, first, tuple(segments[1:]), query_position, parts(key_position), parts(weight))  # fmt: skip
    return out, jnp.concatenate([probs, rest], axis=-1) if segments[1:] else probs


def _attend(q, segments, query_position, key_position, sliding_window, weight, *, split):
    """`attend` of the slots on this device; `split`: others hold further slots, and softmax and output are merged."""
    b, t, n, h = q.shape
    kv_heads = key_position.shape[1]
    grouped = q.reshape(b, t, kv_heads, n // kv_heads, h)
    # The order in which the matrix products come out: transposing the probabilities would cost as much as they do.
    order = "kbtgs" if segments[0].k.shape[0] == 1 else "bktgs"
    logits = jnp.concatenate([_logits(grouped, s.k, order) for s in segments], axis=-1)
    seen = visible(query_position[:, None], key_position, sliding_window)  # [B, K, T, S]
    seen = jnp.einsum(f"bkts->{order.replace('g', '')}", seen)
    logits = jnp.where(seen[:, :, :, None], logits, _MASKED)
    if weight is not None:
        probs = weighted_softmax(logits, jnp.einsum(f"bks->{order[:2]}s", weight)[:, :, None, None], split=split)
    elif split:  # the log-sum-exp of all slots: the largest logit, then the sum relative to it
        probs = jnp.exp(logits - _largest(logits, split))
        probs = probs / _total(probs, split)
    else:
        probs = jax.nn.softmax(logits, axis=-1)
    out, start = jnp.zeros((b, t, kv_heads, n // kv_heads, h), jnp.float32), 0
    for segment in segments:
        stop = start + segment.k.shape[2]
        out += _mix(probs[..., start:stop], segment.v, order)
        start = stop
    if split:
        out = jax.lax.psum(out, _SPLIT)
    by_head = jnp.einsum(f"{order}->bkgts", probs)
    return out.reshape(b, t, n, h).astype(q.dtype), by_head.reshape(b, n, t, start)


def _largest(x: Array, split: bool) -> Array:
    """Maximum over the last axis, on all devices; a constant for derivatives."""
    largest = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    return jax.lax.pmax(largest, _SPLIT) if split else largest


def _total(x: Array, split: bool) -> Array:
    """Sum over the last axis, on all devices."""
    total = jnp.sum(x, axis=-1, keepdims=True)
    return jax.lax.psum(total, _SPLIT) if split else total


def weighted_softmax(logits: Array, weight: Array, *, split: bool = False) -> Array:
    """Softmax in which each entry counts by a weight in [0, 1]: w_i exp(l_i) / sum_j w_j exp(l_j), f32[..., S].

    Differentiable in the weights, also where they are zero: an entry that is left out has the derivative of its share.
    That derivative is exp(l_i) / Z with Z the sum over what is there, which has no bound if what was left out mattered
    most; its place takes exp(l_i) / (Z + exp(l_i)), the share that the entry would get if it came back.

    With `split`, other devices hold further entries (see `attend`).
    """
    there = weight > 0.0
    highest = _largest(jnp.where(there, logits, _MASKED), split)
    mass = jnp.exp(jnp.minimum(logits - highest, _LARGEST_EXPONENT))
    present = jax.lax.stop_gradient(_total(weight * mass, split))
    mass = jnp.where(there, mass, mass * jax.lax.stop_gradient(present / (present + mass)))
    return weight * mass / _total(weight * mass, split)


def attend_prompt(
    q: Array, k: Array, v: Array, position: Array, request: StatsRequest, sliding_window: int | None = None
) -> tuple[Array, Stats, Array | None]:
    """Causal attention of a whole prompt over itself, block of queries by block of queries.

    Args:
      q: [B, T, N, H]. k, v: [B, K, T, H]. Slot t holds token t.
      position: int32[B, T], 0, 1, 2, ... and `EMPTY` for padding (on the right).
      request: the statistics to compute. sliding_window: see `visible`.

    Returns:
      Output [B, T, N, H] in the dtype of q; statistics over the T slots; and, if `request.rows`, the rows of the last
      `rows` queries averaged over this layer's heads, f32[B, rows, T], query at position p in row p % rows.
    """
    b, t, n, _ = q.shape
    blocks = math.ceil(t / _QUERY_BLOCK)
    # Keys that are split over devices are not cut into prefixes: that would move them.
    per_prefix = math.ceil(blocks / _MAX_KEY_PREFIXES) if shards(_SPLIT) == 1 else blocks
    mass = jnp.zeros((b, n, t), jnp.float32)
    outputs = []
    # Few key prefixes of static length: most of the causal triangle is skipped and compile time stays bounded.
    for first in range(0, blocks, per_prefix):
        start, stop = first * _QUERY_BLOCK, min((first + per_prefix) * _QUERY_BLOCK, t)
        prefix = Segment(k[:, :, :stop], v[:, :, :stop])
        key_position = jnp.broadcast_to(position[:, None, :stop], (b, k.shape[1], stop))
        out, partial = _by_blocks(
            q[:, start:stop], [prefix], position[:, start:stop], key_position, sliding_window, mass=request.mass
        )
        outputs.append(out)
        if request.mass:
            mass = mass.at[:, :, :stop].add(partial)
    out = jnp.concatenate(outputs, axis=1)
    stats, rows = tail_statistics(q, k, v, position, request, sliding_window)
    return out, dataclasses.replace(stats, mass=mass if request.mass else None), rows


def attend_chunk(
    q: Array, segments: Sequence[Segment], query_position: Array, key_position: Array, request: StatsRequest,
    sliding_window: int | None = None,
) -> tuple[Array, Stats, Array | None]:  # fmt: skip
    """Attention of one chunk of a prompt over what earlier chunks left in the cache and over itself, block by block.

    Args:
      q: [B, T, N, H], rotated. segments: the cache's slots, then the chunk's own; S in all.
      query_position: int32[B, T], consecutive, `EMPTY` for padding (on one side). key_position: int32[B, K, S].
      request: the statistics of these queries to compute. sliding_window: see `visible`.

    Returns:
      As `attend_prompt`, over S slots.
    """
    out, mass = _by_blocks(q, segments, query_position, key_position, sliding_window, mass=request.mass)
    stats, rows = _tail_statistics(q, query_position, segments, key_position, request, sliding_window)
    return out, dataclasses.replace(stats, mass=mass if request.mass else None), rows


def _by_blocks(q, segments, query_position, key_position, sliding_window, *, mass):
    """`attend` of many queries, block by block: the output, and with `mass` the sum over queries of f32[B, N, S] (else 0)."""
    b, t, n, h = q.shape

    def one_block(summed, block):
        q_block, p_block = block
        out, probs = attend(q_block, segments, p_block, key_position, sliding_window)
        if mass:
            new = jnp.sum(jnp.where((p_block >= 0)[:, None, :, None], probs, 0.0), axis=2)
            summed = constrain(summed + new, "BNS")
        return summed, out

    width = min(_QUERY_BLOCK, t)
    inner = t // width * width
    xs = (
        q[:, :inner].reshape(b, -1, width, n, h).swapaxes(0, 1),
        query_position[:, :inner].reshape(b, -1, width).swapaxes(0, 1),
    )
    summed, out = jax.lax.scan(one_block, jnp.zeros((b, n, key_position.shape[-1]), jnp.float32), xs)
    out = out.swapaxes(0, 1).reshape(b, inner, n, h)
    if inner < t:
        summed, rest = one_block(summed, (q[:, inner:], query_position[:, inner:]))
        out = jnp.concatenate([out, rest], axis=1)
    return out, summed


def tail_statistics(
    q: Array, k: Array, v: Array, position: Array, request: StatsRequest, sliding_window: int | None
) -> tuple[Stats, Array | None]:
    """Statistics of the last queries of each prompt, arguments as of `attend_prompt`: `Stats` without `mass`, and the rows."""
    everywhere = jnp.broadcast_to(position[:, None], (q.shape[0], k.shape[1], position.shape[1]))
    return _tail_statistics(q, position, [Segment(k, v)], everywhere, request, sliding_window)


def _tail_statistics(q, q_position, segments, key_position, request, sliding_window):
    """Statistics of the last queries of each sequence: `Stats` without `mass`, and rows or None."""
    if not request.tail:
        return Stats(), None
    b, t = q_position.shape
    newest = jnp.max(q_position, axis=1)  # [B]
    column = jnp.argmax(q_position, axis=1).astype(jnp.int32)
    # Row r holds the query at position p = newest - ((newest - r) % tail): its ring place is p % tail.
    tail = min(request.tail, t)  # a window may be longer than the prompt
    back = (newest[:, None] - jnp.arange(tail, dtype=jnp.int32)[None]) % tail  # [B, tail], 0 = most recent
    at = newest[:, None] - back
    real = (at >= 0) & (column[:, None] >= back)
    query_position = jnp.where(real, at, EMPTY)
    index = jnp.maximum(at, 0)
    q_tail = jnp.take_along_axis(q, jnp.maximum(column[:, None] - back, 0)[:, :, None, None], axis=1)
    _, probs = attend(q_tail, segments, query_position, key_position, sliding_window)  # [B, N, tail, S]

    def over(count):  # which of the tail's queries are among the last `count`
        return (real & (back < count)).astype(jnp.float32)

    def summed(x, count):
        return jnp.einsum("bnts,bt->bns", x, over(count))

    stats = Stats(
        last=summed(probs, 1) if request.last else None,
        windows={w: summed(probs, w) for w in request.windows},
        squares={w: summed(probs * probs, w) for w in request.spreads},
        surprisals={w: summed(_surprisal(probs), w) for w in request.spreads},
    )
    rows = None
    if request.rows:
        averaged = jnp.mean(probs, axis=1) * over(request.rows)[..., None]  # [B, tail, S]
        rows = jax.vmap(lambda ring, r, p: ring.at[p % request.rows].add(r))(
            jnp.zeros((b, request.rows, key_position.shape[-1]), jnp.float32), averaged, index
        )
    return stats, rows


def _surprisal(probs: Array) -> Array:
    """-p log p, 0 where p is 0."""
    return -jnp.where(probs > 0, probs * jnp.log(jnp.where(probs > 0, probs, 1.0)), 0.0)


def _heads_of(filled: Array, statistic: Array) -> Array:
    """bool[B, M, S] for a statistic of M heads: the N query heads, or any multiple of the K key/value heads, in their order."""
    n, m = filled.shape[1], statistic.shape[1]
    return filled[:, [i * n // m for i in range(m)]]


def accumulate(stats: Stats, probs: Array, filled: Array) -> Stats:
    """Adds the attention of T new queries to running statistics.

    Args:
      stats: of one layer, fields [B, N, S]. probs: f32[B, N, T, S] of the new queries, oldest first.
      filled: bool[B, N, S], slots that held a token before these queries; the others start at 0.
    """

    def running(old):
        return jnp.where(filled, old, 0.0)

    t = probs.shape[2]

    def decayed(sums, new):
        out = {}
        for width, old in sums.items():
            decay = 1.0 - 1.0 / width
            weights = jnp.asarray([decay ** (t - 1 - i) for i in range(t)], jnp.float32)
            out[width] = running(old) * decay**t + jnp.einsum("bnts,t->bns", new, weights)
        return out

    return Stats(
        mass=None if stats.mass is None else running(stats.mass) + probs.sum(axis=2),
        last=None if stats.last is None else probs[:, :, -1],
        windows=decayed(stats.windows, probs),
        squares=decayed(stats.squares, probs * probs) if stats.squares else {},
        surprisals=decayed(stats.surprisals, _surprisal(probs)) if stats.surprisals else {},
        projected=stats.projected,
        extra={name: jnp.where(_heads_of(filled, old), old, LATER) for name, old in stats.extra.items()},
    )
