"""Causal attention of whole prompts on TPU: output, log-sum-exp and entropy of every query, column sums of every key.

Two Pallas kernels. The first is the forward pass of FlashAttention (Dao et al., arXiv 2205.14135; Dao, arXiv 2307.08691):
it walks over blocks of keys with a running maximum and sum. A column sum needs the finished log-sum-exp of each query, so
the second kernel walks over the keys once more (and reads no values): sum over queries of exp(logit - log-sum-exp).

Inside the kernels keys lie on sublanes and queries on lanes. The numbers of a query (position, maximum, sum) are then rows
that broadcast over a block of logits as they are, and all matrix products are plain ones. Blocks are 512 by 512: at 512
queries a block of keys and values is used 512 times for each time it is read, twice what a v5e needs to be bound by
arithmetic (197 TFLOP/s over 819 GB/s), and a block of float32 logits takes 1 MiB of the 16 MiB of VMEM that a kernel gets.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK = 512
"""Most queries, and most keys, of a block: a multiple of the 128 lanes of a TPU register."""

_LANES = 128
_MASKED = -1e30  # finite: a difference of two of them is 0 and not NaN


@functools.partial(jax.jit, static_argnames=("sliding_window", "entropy", "block", "interpret"))
def attend(
    q: Array, k: Array, v: Array, length: Array, *, sliding_window: int | None = None, entropy: bool = False,
    block: int = BLOCK, interpret: bool = False,
) -> tuple[Array, Array, Array | None]:  # fmt: skip
    """Causal attention of prompts over themselves; slot t holds token t. Not differentiable.

    Args:
      q: [B, N, H, T], rotated. k, v: [B, K, T, H]. Query head n belongs to key/value head n // G.
      length: int32[B], real tokens of each prompt, from 0 to T; padding is on the right.
      sliding_window: number of most recent positions that a query sees, its own included, or None.
      entropy: whether to compute the entropies.
      block: most queries and keys of a block, a multiple of 128. interpret: run without a TPU (for tests).

    Returns:
      Output [B, N, H, T] in the dtype of q; log-sum-exp f32[B, N, T] of each query's logits; and entropy f32[B, N, T] in
      nats of each query's attention, or None. All are 0 for padding.
    """
    b, n, h, t = q.shape
    group = n // k.shape[1]
    block = _block(t, block)
    blocks = pl.cdiv(t, block)

    def of_query(b, n, i, j, length):
        return b, n, 0, i

    def of_key(b, n, i, j, length):
        first, last = _keys_of(i, block, length[b], sliding_window)
        # A block that nobody sees has the index of one that somebody sees, so that nothing is copied for it.
        return b, n // group, jnp.clip(j, first, last)

    row = pl.BlockSpec((1, 1, 1, block), of_query)
    rows = 2 if entropy else 1
    # An accumulator and running maximum, sum and (for the entropy) sum of exp(logit) * logit.
    scratch = [pltpu.VMEM((h, block), jnp.float32)] + [pltpu.VMEM((1, block), jnp.float32)] * (1 + rows)
    pairs = b * n * t * t // 2
    results = pl.pallas_call(
        functools.partial(_attend_kernel, slots=t, block=block, sliding_window=sliding_window),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b, n, blocks, blocks),
            in_specs=[
                pl.BlockSpec((1, 1, h, block), of_query),
                pl.BlockSpec((1, 1, block, h), lambda *at: (*of_key(*at), 0)),
                pl.BlockSpec((1, 1, block, h), lambda *at: (*of_key(*at), 0)),
            ],
            out_specs=[pl.BlockSpec((1, 1, h, block), of_query)] + [row] * rows,
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype)] + [jax.ShapeDtypeStruct((b, n, 1, t), jnp.float32)] * rows,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * h * pairs, transcendentals=pairs, bytes_accessed=2 * q.nbytes + k.nbytes + v.nbytes
        ),
        interpret=interpret,
        name="attend_prompt",
    )(length, q, k, v)
    return results[0], results[1][:, :, 0], results[2][:, :, 0] if entropy else None


def _attend_kernel(length_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any, slots, block, sliding_window):
    """One block of queries [H, block] and one of keys and values [block, H]; the block of keys runs fastest."""
    results = 2 if len(refs) == 7 else 1  # with and without the entropy
    out_ref, *row_refs = refs[: 1 + results]
    acc_ref, highest_ref, total_ref, *surprise_ref = refs[1 + results :]
    i, j = pl.program_id(2), pl.program_id(3)
    length = length_ref[pl.program_id(0)]
    query = i * block + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)
        highest_ref[...] = jnp.full_like(highest_ref, _MASKED)
        total_ref[...] = jnp.zeros_like(total_ref)
        for ref in surprise_ref:
            ref[...] = jnp.zeros_like(ref)

    first, last = _keys_of(i, block, length, sliding_window)

    @pl.when((j >= first) & (j <= last) & (i * block < length))
    def _():
        k, v = k_ref[0, 0], v_ref[0, 0]
        logits, _ = _logits(k, q_ref[0, 0], j * block, query, length, sliding_window)
        highest = jnp.maximum(highest_ref[...], jnp.max(logits, axis=0, keepdims=True))
        # A query that has seen nothing yet adds exp(0) for each masked key here; its first real logit multiplies that by 0.
        shares = jnp.exp(logits - highest)
        decay = jnp.exp(highest_ref[...] - highest)
        highest_ref[...] = highest
        total_ref[...] = decay * total_ref[...] + jnp.sum(shares, axis=0, keepdims=True)
        for ref in surprise_ref:
            ref[...] = decay * ref[...] + jnp.sum(shares * logits, axis=0, keepdims=True)
        if slots % block:  # what lies behind the end of the array may be NaN, and 0 * NaN is NaN
            key = j * block + jax.lax.broadcasted_iota(jnp.int32, v.shape, 0)
            v = jnp.where(key < slots, v, jnp.zeros_like(v))
        mixed = jax.lax.dot_general(
            v, shares.astype(v.dtype), (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        acc_ref[...] = decay * acc_ref[...] + mixed

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        real = query < length  # a real query sees itself: its sum is not zero
        total = jnp.where(real, total_ref[...], 1.0)
        out_ref[0, 0] = jnp.where(real, acc_ref[...] / total, 0.0).astype(out_ref.dtype)
        lse = highest_ref[...] + jnp.log(total)
        row_refs[0][0, 0] = jnp.where(real, lse, 0.0)
        for ref, result in zip(surprise_ref, row_refs[1:], strict=True):  # entropy = lse - mean of the logits
            result[0, 0] = jnp.where(real, lse - ref[...] / total, 0.0)


@functools.partial(jax.jit, static_argnames=("widths", "sliding_window", "block", "interpret"))
def column_sums(
    q: Array, k: Array, lse: Array, first: Array, length: Array, *, widths: tuple[int, ...],
    sliding_window: int | None = None, block: int = BLOCK, interpret: bool = False,
) -> Array:  # fmt: skip
    """The attention that each key receives from the last w queries of its prompt, for each width w. Not differentiable.

    Args:
      q: [B, N, H, T], consecutive queries of each prompt, rotated. k: [B, K, S, H]; slot s holds token s.
      lse: f32[B, N, T], log-sum-exp of their logits (see `attend`).
      first: int32[B], position of the first of the queries. length: int32[B], real tokens of each prompt.
      widths: numbers of queries, counted from the prompt's end. sliding_window, block, interpret: see `attend`.

    Returns:
      f32[B, N, len(widths), S].
    """
    b, n, h, t = q.shape
    s = k.shape[2]
    group = n // k.shape[1]
    block_t, block_s = _block(t, block), _block(s, block)
    most = max(widths)

    def of_query(b, n, j, i, first, length):
        low, high = _queries_of(j, block_s, block_t, t, first[b], length[b], most, sliding_window)
        return b, n, 0, jnp.clip(i, low, high)

    def of_key(b, n, j, i, first, length):
        return b, n // group, j, 0

    return pl.pallas_call(
        functools.partial(_column_kernel, widths=widths, slots=t, block_t=block_t, sliding_window=sliding_window),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b, n, pl.cdiv(s, block_s), pl.cdiv(t, block_t)),
            in_specs=[
                pl.BlockSpec((1, 1, h, block_t), of_query),
                pl.BlockSpec((1, 1, block_s, h), of_key),
                pl.BlockSpec((1, 1, 1, block_t), of_query),
            ],
            out_specs=pl.BlockSpec((1, 1, len(widths), block_s), lambda b, n, j, i, *_: (b, n, 0, j)),
            scratch_shapes=[pltpu.VMEM((len(widths), block_s, _LANES), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((b, n, len(widths), s), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=b * n * t * s * h, transcendentals=b * n * t * s // 2, bytes_accessed=q.nbytes + k.nbytes + lse.nbytes
        ),
        interpret=interpret,
        name="column_sums",
    )(first, length, q, k, lse[:, :, None])


def _column_kernel(
    first_ref: Any, length_ref: Any, q_ref: Any, k_ref: Any, lse_ref: Any, sums_ref: Any, acc_ref: Any, *, widths, slots,
    block_t, sliding_window,
):  # fmt: skip
    """One block of keys [block_s, H] and one of queries [H, block_t]; the block of queries runs fastest."""
    j, i = pl.program_id(2), pl.program_id(3)
    first, length = first_ref[pl.program_id(0)], length_ref[pl.program_id(0)]

    @pl.when(i == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    k = k_ref[0, 0]
    low, high = _queries_of(j, k.shape[0], block_t, slots, first, length, max(widths), sliding_window)

    @pl.when((i >= low) & (i <= high))
    def _():
        slot = i * block_t + jax.lax.broadcasted_iota(jnp.int32, (1, block_t), 1)
        query = jnp.where(slot < slots, first + slot, length)  # behind the end of the array there is no query
        logits, seen = _logits(k, q_ref[0, 0], j * k.shape[0], query, length, sliding_window)
        probs = jnp.where(seen, jnp.exp(logits - lse_ref[0, 0]), 0.0)
        for row, width in enumerate(widths):
            counted = jnp.where(query >= length - width, probs, 0.0)
            # Register by register; the sum over lanes, which is dear, comes once at the end.
            acc_ref[row] += sum(counted[:, at : at + _LANES] for at in range(0, block_t, _LANES))

    @pl.when(i == pl.num_programs(3) - 1)
    def _():
        for row in range(len(widths)):
            sums_ref[0, 0, row : row + 1] = jnp.sum(acc_ref[row].T, axis=0, keepdims=True)


def _logits(
    k: Array, q: Array, start: Any, query: Array, length: Any, sliding_window: int | None
) -> tuple[Array, Array]:
    """Scaled logits f32[S, T] of keys [S, H] at positions start, ... and queries [H, T] at int32[1, T], and who sees whom."""
    logits = jnp.dot(k, q, preferred_element_type=jnp.float32) * (1.0 / math.sqrt(k.shape[1]))
    key = start + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    seen = (key <= query) & (query < length)
    if sliding_window is not None:
        seen &= key > query - sliding_window
    return jnp.where(seen, logits, _MASKED), seen


def _block(count: int, block: int) -> int:
    """Size of a block of `count` queries or keys: whole registers of 128 lanes."""
    return min(block, pl.cdiv(count, _LANES) * _LANES)


def _keys_of(i: Any, block: int, length: Any, sliding_window: int | None) -> tuple[Any, Any]:
    """The first and the last block of keys that the queries of block i see."""
    last = jnp.minimum(i, jnp.maximum(length - 1, 0) // block)
    if sliding_window is None:
        return 0, last
    return jnp.minimum(jnp.maximum(i * block - sliding_window + 1, 0) // block, last), last


def _queries_of(
    j: Any, block_s: int, block_t: int, slots: int, first: Any, length: Any, width: int, sliding_window: int | None
) -> tuple[Any, Any]:
    """The first and the last block of queries that count and may see a key of block j."""
    low = jnp.maximum(j * block_s, length - width) - first
    high = length - 1 - first
    if sliding_window is not None:
        high = jnp.minimum(high, (j + 1) * block_s - 2 + sliding_window - first)
    top = pl.cdiv(slots, block_t) - 1
    return jnp.clip(low // block_t, 0, top), jnp.clip(high // block_t, 0, top)
