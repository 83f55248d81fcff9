"""Attention of one query per head over a cache with empty slots, on TPU, with all probabilities.

A decode step is bound by reading keys and values. This Pallas kernel reads each once, block of slots by block of slots, with
FlashAttention's running maximum and sum (Dao et al., arXiv 2205.14135), and does not read blocks in which nothing is
visible: room for tokens to come, or what lies outside a sliding window. A head's logits stay in VMEM until their sum is known
and leave it as probabilities: for G query heads per key/value head of dimension H in bfloat16, G / H of the bytes read.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK = 2048
"""Most slots of a block, a multiple of 128. Its keys and values, twice 512 KiB for H = 128 in bfloat16, take a v5e 1.3
microseconds to read: longer than a step of the grid costs beside."""

MOST_PROBABILITIES = 2**20
"""Most probabilities of one key/value head, G times S: 4 MiB, held twice, of the 16 MiB of VMEM that a kernel gets."""

_MASKED = -1e30  # finite: a difference of two of them is 0 and not NaN


@functools.partial(jax.jit, static_argnames=("block", "interpret"))
def attend(
    q: Array, k: Array, v: Array, seen: Array, *, block: int = BLOCK, interpret: bool = False
) -> tuple[Array, Array]:
    """Attention of one query per head. Not differentiable.

    Args:
      q: [B, N, H], rotated. k, v: [B, K, S, H]. Query head n belongs to key/value head n // G.
      seen: bool[B, K, S], which slots the query sees.
      block: most slots of a block, a multiple of 128. interpret: run without a TPU (for tests).

    Returns:
      Output [B, N, H] in the dtype of q and probabilities f32[B, N, S]; both 0 where a query sees nothing.
    """
    b, n, h = q.shape
    heads, s = k.shape[1:3]
    group = n // heads
    block = min(block, pl.cdiv(s, 128) * 128)
    blocks = pl.cdiv(s, block)
    padded = jnp.pad(seen, ((0, 0), (0, 0), (0, blocks * block - s)))
    # A block in which nothing is visible has the number of the last one before it with something, or else of the first one:
    # the kernel passes it by, and nothing is copied for it.
    number = jnp.broadcast_to(jnp.arange(blocks, dtype=jnp.int32), (b, heads, blocks))
    live = jnp.any(padded.reshape(b, heads, blocks, block), axis=-1)
    first = jnp.argmax(live, axis=2, keepdims=True).astype(jnp.int32)
    fetched = jax.lax.cummax(jnp.where(live, number, first), axis=2)

    def of_head(b, k, j, fetched):
        return b, k, 0, 0

    def of_slots(b, k, j, fetched):
        return b, k, fetched[(b * heads + k) * blocks + j], 0

    def of_seen(b, k, j, fetched):
        return b, k, 0, j

    out, probs = pl.pallas_call(
        functools.partial(_kernel, slots=s),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b, heads, blocks),
            in_specs=[
                pl.BlockSpec((1, 1, group, h), of_head),
                pl.BlockSpec((1, 1, block, h), of_slots),
                pl.BlockSpec((1, 1, block, h), of_slots),
                pl.BlockSpec((1, 1, 1, block), of_seen),
            ],
            out_specs=[
                pl.BlockSpec((1, 1, group, h), of_head),
                pl.BlockSpec((1, 1, group, blocks * block), of_head),
            ],
            scratch_shapes=[pltpu.VMEM((group, width), jnp.float32) for width in (h, 1, 1)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((b, heads, group, h), q.dtype),
            jax.ShapeDtypeStruct((b, heads, group, blocks * block), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * b * n * s * h, transcendentals=2 * b * n * s, bytes_accessed=k.nbytes + v.nbytes + 4 * b * n * s
        ),
        interpret=interpret,
        name="attend_cache",
    )(fetched.reshape(-1), q.reshape(b, heads, group, h), k, v, padded.astype(jnp.int32)[:, :, None])
    return out.reshape(b, n, h), probs.reshape(b, n, -1)[:, :, :s]


def _kernel(
    fetched_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, seen_ref: Any, out_ref: Any, probs_ref: Any, acc_ref: Any,
    highest_ref: Any, total_ref: Any, *, slots,
):  # fmt: skip
    """The G queries of one key/value head and one block of slots; until the last block `probs_ref` holds logits."""
    j, blocks = pl.program_id(2), pl.num_programs(2)
    head = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)
        highest_ref[...] = jnp.full_like(highest_ref, _MASKED)
        total_ref[...] = jnp.zeros_like(total_ref)
        probs_ref[...] = jnp.full_like(probs_ref, _MASKED)

    @pl.when(fetched_ref[head * blocks + j] == j)
    def _():
        q, k, v = q_ref[0, 0], k_ref[0, 0], v_ref[0, 0]
        block, h = k.shape
        logits = jax.lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        logits = jnp.where(seen_ref[0, 0] != 0, logits * (1.0 / math.sqrt(h)), _MASKED)
        probs_ref[0, 0, :, pl.ds(pl.multiple_of(j * block, block), block)] = logits
        highest = jnp.maximum(highest_ref[...], jnp.max(logits, axis=1, keepdims=True))
        # While nothing was visible, masked slots add exp(0) each; the first visible logit multiplies that by 0.
        shares = jnp.exp(logits - highest)
        decay = jnp.exp(highest_ref[...] - highest)
        highest_ref[...] = highest
        total_ref[...] = decay * total_ref[...] + jnp.sum(shares, axis=1, keepdims=True)
        if slots % block:  # what lies behind the end of the array may be NaN, and 0 * NaN is NaN
            slot = j * block + jax.lax.broadcasted_iota(jnp.int32, v.shape, 0)
            v = jnp.where(slot < slots, v, jnp.zeros_like(v))
        acc_ref[...] = decay * acc_ref[...] + jnp.dot(shares.astype(v.dtype), v, preferred_element_type=jnp.float32)

    @pl.when(j == blocks - 1)
    def _():
        some = highest_ref[...] > _MASKED
        total = jnp.where(some, total_ref[...], 1.0)
        out_ref[0, 0] = jnp.where(some, acc_ref[...] / total, 0.0).astype(out_ref.dtype)
        probs_ref[0, 0] = jnp.where(some, jnp.exp(probs_ref[0, 0] - highest_ref[...]) / total, 0.0)
