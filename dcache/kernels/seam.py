"""Which attention runs where: `attend` and `attend_prompt` of `dcache.attention` with a kernel in their place where one serves.

On a TPU the Pallas kernels of this package take prompts, and single queries over a cache (T = 1: decode steps). Several
queries at once, caches that students share, weighted slots and slots split over devices stay with the reference, whose
matrix products are large or which differentiates.

On an NVIDIA GPU cuDNN's attention, through `jax.nn.dot_product_attention`, takes bfloat16 prompts of which no attention mass is
asked: it is kept up by NVIDIA and JAX, while the Triton kernels that ship with JAX are deprecated. It gives the log-sum-exp in
bfloat16 only, too coarse for column sums (rows are off by 3%), and takes no mask of a cache with holes, so that the rest
stays with the reference. On a CPU the reference runs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from dcache import attention
from dcache.attention import Segment, Stats, StatsRequest
from dcache.axes import ShardingRules, open_sizes, platform, shards, spec
from dcache.kernels import decode, prefill

_TAIL = 128  # a tail of queries is read in multiples of it


def attend(
    q: Array, segments: Sequence[Segment], query_position: Array, key_position: Array, sliding_window: int | None = None,
    weight: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """`dcache.attention.attend`, by a kernel where one serves. Where a query sees nothing, a kernel's output is 0."""
    (b, t, n, _), (_, heads, slots) = q.shape, key_position.shape
    own = len(segments) == 1 and segments[0].k.shape[0] == b
    fits = n // heads * slots <= decode.MOST_PROBABILITIES
    if platform() == "tpu" and t == 1 and own and fits and weight is None and shards("sequence") == 1:
        return attend_on_tpu(q, segments[0], query_position, key_position, sliding_window)
    return attention.attend(q, segments, query_position, key_position, sliding_window, weight)


def attend_prompt(
    q: Array, k: Array, v: Array, position: Array, request: StatsRequest, sliding_window: int | None = None
) -> tuple[Array, Stats, Array | None]:
    """`dcache.attention.attend_prompt`, by a kernel where one serves. A kernel's output is 0 for padding."""
    if shards("sequence") == 1:
        if platform() == "tpu":
            return prompt_on_tpu(q, k, v, position, request, sliding_window)
        if platform() == "gpu" and q.dtype == jnp.bfloat16 and not request.mass and _cudnn_takes(q.shape[-1]):
            return prompt_by_library(q, k, v, position, request, sliding_window)
    return attention.attend_prompt(q, k, v, position, request, sliding_window)


def attend_on_tpu(
    q: Array, segment: Segment, query_position: Array, key_position: Array, sliding_window: int | None,
    interpret: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """`dcache.attention.attend` of one query (T = 1) over a cache in one segment; interpret: without a TPU."""
    seen = attention.visible(query_position[:, None], key_position, sliding_window)[:, :, 0]

    def local(q, k, v, seen):
        out, probs = decode.attend(q[:, 0], k, v, seen, interpret=interpret)
        return out[:, None], probs[:, :, None]

    def places(batch, heads):
        at, by_head = PartitionSpec(batch, None, heads), PartitionSpec(batch, heads)
        return (at, by_head, by_head, by_head), (at, by_head)

    return _on_each_device(local, places, key_position.shape, q, segment.k, segment.v, seen)


def prompt_on_tpu(
    q: Array, k: Array, v: Array, position: Array, request: StatsRequest, sliding_window: int | None,
    interpret: bool = False,
) -> tuple[Array, Stats, Array | None]:  # fmt: skip
    """`dcache.attention.attend_prompt`; interpret: without a TPU.

    The mass and long windows are column sums of the kernels. Statistics of single queries, and of windows that are no longer
    than the queries that are looked at one by one anyway, are the reference's.
    """
    length = jnp.sum(position >= 0, axis=1, dtype=jnp.int32)
    slots = q.shape[1]
    one_by_one = dataclasses.replace(request, mass=False, windows=()).tail
    near = tuple(w for w in request.windows if w <= one_by_one)
    far = tuple(w for w in request.windows if w > one_by_one)
    settings: Any = dict(sliding_window=sliding_window, interpret=interpret)

    def local(q, k, v, length):
        by_head = q.transpose(0, 2, 3, 1)
        out, lse, _ = prefill.attend(by_head, k, v, length, **settings)
        mass, windows = None, None
        if request.mass:
            first = jnp.zeros_like(length)
            mass = prefill.column_sums(by_head, k, lse, first, length, widths=(slots,), **settings)
        if far:
            tail = min(-(-max(far) // _TAIL) * _TAIL, slots)
            first = jnp.maximum(length - tail, 0)
            q_tail, lse_tail = _from(by_head, first, tail), _from(lse, first, tail)
            windows = prefill.column_sums(q_tail, k, lse_tail, first, length, widths=far, **settings)
        return out.transpose(0, 3, 1, 2), mass, windows

    def places(batch, heads):
        at, by_head = PartitionSpec(batch, None, heads), PartitionSpec(batch, heads)
        return (at, by_head, by_head, PartitionSpec(batch)), (at, by_head, by_head)

    out, mass, windows = _on_each_device(local, places, k.shape, q, k, v, length)
    rest = dataclasses.replace(request, mass=False, windows=near)
    stats, rows = attention.tail_statistics(q, k, v, position, rest, sliding_window)
    sums = stats.windows | {w: windows[:, :, i] for i, w in enumerate(far)}
    return out, dataclasses.replace(stats, mass=mass[:, :, 0] if request.mass else None, windows=sums), rows


def _from(x: Array, first: Array, count: int) -> Array:
    """`count` numbers of the last axis of x [B, ...] from first int32[B] on."""
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, count, axis=-1))(x, first)


def _on_each_device(local: Callable, places: Callable, shape: tuple[int, ...], *args: Array) -> Any:
    """Calls `local` with each device's own prompts and heads, since the compiler cannot split a kernel over a mesh.

    Args:
      places: (mesh axes of B, mesh axes of heads) -> specifications of the arguments and of the results.
      shape: sizes of B and K, and anything else. Query heads are split like the key/value heads that they belong to.
    """
    sizes = open_sizes()
    if all(size == 1 for size in sizes.values()):
        return local(*args)
    in_specs, out_specs = places(*spec("BK", shape[:2], ShardingRules.ACTIVATIONS, sizes))
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*args)


def prompt_by_library(
    q: Array, k: Array, v: Array, position: Array, request: StatsRequest, sliding_window: int | None,
    implementation: Any = "cudnn",
) -> tuple[Array, Stats, Array | None]:  # fmt: skip
    """`dcache.attention.attend_prompt` without mass, by `jax.nn.dot_product_attention` and an implementation of it."""
    length = jnp.sum(position >= 0, axis=1, dtype=jnp.int32)
    out = jax.nn.dot_product_attention(
        q, k.swapaxes(1, 2), v.swapaxes(1, 2), is_causal=True, query_seq_lengths=length, key_value_seq_lengths=length,
        local_window_size=None if sliding_window is None else (sliding_window - 1, 0), implementation=implementation,
    )  # fmt: skip
    return out, *attention.tail_statistics(q, k, v, position, request, sliding_window)


def _cudnn_takes(head_dim: int) -> bool:
    """Whether cuDNN's attention runs on these devices: compute capability 8.0 or higher, heads up to 128 wide."""
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    nvidia = capability.replace(".", "", 1).isdecimal()
    return nvidia and float(capability) >= 8.0 and head_dim % 8 == 0 and head_dim <= 128
