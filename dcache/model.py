"""The Llama / Mistral / Qwen2 / Phi forward pass: pure functions over a parameter tree.

Parameters are a nested dict whose "layers" entry has a leading axis L on every leaf and is scanned. It may also be a tuple
of L dicts (`unstack`), which is unrolled: on CPU a scan copies each layer's weights before it multiplies by them, and a
decode step is nothing but reading the weights.

Axis legend: B batch, T query time, S cache slot, N query heads, K key/value heads, G = N/K, H head dimension, D model
width, F feed-forward width, L layer, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dcache import cache as kv
from dcache.attention import EMPTY, Segment, Stats, StatsRequest, accumulate, attend_chunk
from dcache.axes import constrain
from dcache.config import ModelConfig
from dcache.kernels.seam import attend, attend_prompt

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One weight: shape, logical axes (one letter of the legend each), and the standard deviation of its random start.

    A deviation of None stands for ones (norm scales), 0.0 for zeros (biases).
    """

    shape: tuple[int, ...]
    axes: str
    init: float | None


def param_specs(config: ModelConfig) -> Params:
    """The tree of all weights; it drives initialisation, loading, memory accounting and sharding."""
    size = {
        "L": config.num_layers, "D": config.embed_dim, "N": config.num_heads, "K": config.num_kv_heads,
        "H": config.head_dim, "F": config.ffn_dim, "V": config.vocab_size,
    }  # fmt: skip

    def spec(axes: str, init: float | None) -> TensorSpec:
        return TensorSpec(tuple(size[a] for a in axes), axes, init)

    inner, out = config.embed_dim**-0.5, (config.num_heads * config.head_dim) ** -0.5
    layers = {
        "attn_norm": spec("LD", None), "mlp_norm": spec("LD", None),
        "q": spec("LDNH", inner), "k": spec("LDKH", inner), "v": spec("LDKH", inner), "o": spec("LNHD", out),
        "gate": spec("LDF", inner), "up": spec("LDF", inner), "down": spec("LFD", config.ffn_dim**-0.5),
    }  # fmt: skip
    if config.qkv_bias:
        layers |= {"q_bias": spec("LNH", 0.0), "k_bias": spec("LKH", 0.0), "v_bias": spec("LKH", 0.0)}
    tree: Params = {"embed": spec("VD", 1.0), "layers": layers, "final_norm": spec("D", None)}
    if not config.tie_embeddings:
        tree["head"] = spec("DV", inner)
    return tree


def init_params(key: Array, config: ModelConfig) -> Params:
    """Random weights in `config.dtype`, for tests and for timing."""
    specs = param_specs(config)
    leaves, tree = jax.tree.flatten(specs, is_leaf=lambda x: isinstance(x, TensorSpec))
    keys = jax.random.split(key, len(leaves))

    def start(spec: TensorSpec, k: Array) -> Array:
        if spec.init is None:
            return jnp.ones(spec.shape, config.dtype)
        return (jax.random.normal(k, spec.shape, jnp.float32) * spec.init).astype(config.dtype)

    return jax.tree.unflatten(tree, [start(s, k) for s, k in zip(leaves, keys, strict=True)])


def unstack(params: Params) -> Params:
    """The same weights with one dict per layer and a pre-transposed output matrix, for unrolled decoding on CPU."""
    layers = params["layers"]
    count = layers["attn_norm"].shape[0]
    head = params["head"] if "head" in params else jnp.array(params["embed"].T)
    return params | {"layers": tuple(jax.tree.map(lambda x, i=i: x[i], layers) for i in range(count)), "head": head}


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """f32[H/2], radians per position. Computed in float64: bf16 frequencies would damage long positions."""
    half = config.head_dim // 2
    freq = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    scaling = config.rope_scaling
    if scaling is not None:  # Llama 3.1: long wavelengths are stretched, short ones kept, a ramp between.
        wavelength = 2 * math.pi / freq
        low = scaling.original_max_positions / scaling.low_freq_factor
        high = scaling.original_max_positions / scaling.high_freq_factor
        ramp = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        mixed = (1 - ramp) * freq / scaling.factor + ramp * freq
        freq = np.where(wavelength > low, freq / scaling.factor, np.where(wavelength < high, freq, mixed))
    return freq.astype(np.float32)


def rotate(x: Array, position: Array, config: ModelConfig) -> Array:
    """Rotary embedding (half-split, as Hugging Face stores it). x [B, T, heads, H], position int32[B, T]."""
    angle = position.astype(jnp.float32)[:, :, None, None] * jnp.asarray(rope_frequencies(config))[None, None, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """RMSNorm over the last axis, in float32."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    # bfloat16 rounds before the scale is applied, as the reference implementations do.
    return normed.astype(x.dtype) * _like(scale, x)


def _like(scale: Array, x: Array) -> Array:
    return jnp.expand_dims(scale, tuple(range(x.ndim - 1)))


def _project(x: Array, weight: Array) -> Array:
    """x [B, T, D] times weight [D, ...] as one matrix product."""
    d = weight.shape[0]
    out = x @ weight.reshape(d, -1)
    return out.reshape(*x.shape[:-1], *weight.shape[1:])


def qkv(p: Params, h: Array, position: Array, config: ModelConfig) -> tuple[Array, Array, Array, Array]:
    """q [B,T,N,H] before and after its rotation, rotated k [B,T,K,H] and v [B,T,K,H] of normalised h [B,T,D]."""
    with jax.named_scope("qkv"):
        q, k, v = _project(h, p["q"]), _project(h, p["k"]), _project(h, p["v"])
        if config.qkv_bias:
            q, k, v = (a + p[f"{n}_bias"][None, None] for a, n in ((q, "q"), (k, "k"), (v, "v")))
        return q, rotate(q, position, config), rotate(k, position, config), v


def queries(layer: Params, hidden: Array, config: ModelConfig) -> Array:
    """Rotated queries [B, T, N, H] of a prompt's tokens. layer: weights of one; hidden: [B, T, D], its `Cache.hidden`."""
    return qkv(layer, hidden, jnp.arange(hidden.shape[1], dtype=jnp.int32)[None], config)[1]


def _moments(q: Array, position: Array) -> tuple[Array, Array]:
    """Sum f32[B, N, H] and sum of outer products f32[B, N, H, H] of unrotated queries [B, T, N, H], outliers left out."""
    q = jnp.where((position >= kv.QueryMoments.SKIP)[:, :, None, None], q.astype(jnp.float32), 0.0)
    return jnp.sum(q, axis=1), jnp.einsum("btnh,btni->bnhi", q, q)


def _projected(p: Params, v: Array) -> Array:
    """L1 norms f32[B, N, T] of v [B, K, T, H] after each query head's part of the output projection."""
    heads = v.shape[1]
    weight = p["o"].reshape(heads, -1, *p["o"].shape[1:])  # [K, G, H, D]

    def one(pair):  # head by head: the projected values of all heads would be N / G times as large as the activations
        v_k, w_k = pair
        out = jnp.einsum("bth,ghd->bgtd", v_k, w_k, preferred_element_type=jnp.float32)
        return jnp.sum(jnp.abs(out), axis=-1)

    norms = jax.lax.map(one, (v.swapaxes(0, 1), weight))  # [K, B, G, T]
    return norms.swapaxes(0, 1).reshape(v.shape[0], -1, v.shape[2])


def finish(p: Params, x: Array, attended: Array, config: ModelConfig) -> Array:
    """Output projection and SwiGLU, each added to the residual stream x [B, T, D]."""
    b, t, n, h = attended.shape
    with jax.named_scope("attention_out"):
        x = x + attended.reshape(b, t, n * h) @ p["o"].reshape(n * h, -1)
    with jax.named_scope("mlp"):
        y = rms_norm(x, p["mlp_norm"], config.norm_eps)
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def run_layers(body: Callable, carry: Any, layers: Any, state: Any) -> tuple[Any, Any]:
    """Applies `carry, out_l = body(carry, params_l, state_l)` layer after layer.

    `layers` is stacked (scanned; `state` and the result are stacked too) or a tuple (unrolled; `state` and the result are
    tuples). A state of None is passed on as None.
    """
    if not isinstance(layers, tuple):
        return jax.lax.scan(lambda c, xs: body(c, *xs), carry, (layers, state))
    outs = []
    for i, p in enumerate(layers):
        carry, out = body(carry, p, None if state is None else state[i])
        outs.append(out)
    return carry, tuple(outs)


def embed(params: Params, tokens: Array) -> Array:
    """tokens int32[B, T] -> [B, T, D]."""
    return constrain(params["embed"], "VD")[tokens]  # gathered along D, so that the result is not split along it


def unembed(params: Params, x: Array, config: ModelConfig) -> Array:
    """x [..., D] -> logits f32[..., V]."""
    with jax.named_scope("unembed"):
        x = rms_norm(x, params["final_norm"], config.norm_eps)
        if "head" in params:
            return jnp.einsum("...d,dv->...v", x, params["head"], preferred_element_type=jnp.float32)
        return jnp.einsum("...d,vd->...v", x, params["embed"], preferred_element_type=jnp.float32)


def prefill(
    params: Params, config: ModelConfig, tokens: Array, length: Array, request: StatsRequest
) -> tuple[Array, kv.Cache]:
    """Reads whole prompts.

    Args:
      params: stacked weights. tokens: int32[B, T], padded on the right. length: int32[B], real tokens of each, >= 1.
      request: statistics to compute; they end up in the cache.

    Returns:
      The last layer's hidden states [B, T, D] (give the positions you want to `unembed`), and a cache of T slots.
    """
    t = tokens.shape[1]
    index = jnp.arange(t, dtype=jnp.int32)[None]
    position = jnp.where(index < length[:, None], index, EMPTY)

    def body(carry, p, _):
        x, rows = carry
        h = rms_norm(x, p["attn_norm"], config.norm_eps)
        unrotated, q, k, v = qkv(p, h, index, config)
        q = constrain(q, "BTNH")
        k, v = (constrain(x.swapaxes(1, 2), "BKSH") for x in (k, v))
        with jax.named_scope("attend"):
            attended, stats, layer_rows = attend_prompt(q, k, v, position, request, config.sliding_window)
        if rows is not None:
            rows = rows + layer_rows / config.num_layers  # type: ignore[operator]
        if request.projected:
            norms = jnp.where(position[:, None] >= 0, _projected(p, v), 0.0)
            stats = dataclasses.replace(stats, projected=norms)
        moments = _moments(unrotated, position) if request.queries else None
        x = constrain(finish(p, x, attended, config), "BSD")
        return (x, rows), (k, v, stats, moments, h if request.hidden else None)

    rows: Any = jnp.zeros((tokens.shape[0], request.rows, t), jnp.float32) if request.rows else None
    x = constrain(embed(params, tokens), "BSD")
    (x, rows), (k, v, stats, moments, hidden) = run_layers(body, (x, rows), params["layers"], None)
    queries = None if moments is None else _query_moments(moments, position, config)
    hidden = None if hidden is None else hidden.swapaxes(0, 1)
    return x, kv.from_prompt(k, v, position, stats, rows, queries, hidden)


def _query_moments(moments: tuple[Array, Array], position: Array, config: ModelConfig) -> kv.QueryMoments:
    """Of queries at positions int32[B, T], from the layers' sums f32[L, B, N, H] and f32[L, B, N, H, H]."""
    count = jnp.sum(position >= kv.QueryMoments.SKIP, axis=1).astype(jnp.float32)
    frequencies = jnp.asarray(rope_frequencies(config))
    frequencies = jnp.broadcast_to(frequencies[None], (count.shape[0], frequencies.shape[0]))
    return kv.QueryMoments(count, moments[0].swapaxes(0, 1), moments[1].swapaxes(0, 1), frequencies)


def prefill_chunk(
    params: Params, config: ModelConfig, tokens: Array, position: Array, cache: kv.Cache, request: StatsRequest
) -> tuple[Array, kv.Cache]:
    """Reads the next chunk of prompts whose earlier chunks are in a cache, perhaps evicted.

    Args:
      params: stacked weights. tokens: int32[B, T]. position: int32[B, T], consecutive and ending with the last column;
        `EMPTY` for padding, on the left.
      cache: stacked, of S slots, without a shared prompt; `Stats.extra` must be empty. request: as for `prefill`; what the
        cache carries on must be what it asks for.

    Returns:
      Hidden states [B, T, D], and a cache of S + T slots, the chunk's last. `mass`, moments and norms go on from what the
      cache held; statistics of the last queries (windows, `last`, `rows`, spreads) are those of the chunk's.
    """
    b, t = tokens.shape
    index = jnp.maximum(position, 0)
    rows: Any = None
    if request.rows:
        rows = jnp.zeros((b, request.rows, kv.positions(cache).shape[-1] + t), jnp.float32)

    def body(carry, p, layer):
        x, rows = carry
        h = rms_norm(x, p["attn_norm"], config.norm_eps)
        unrotated, q, k, v = qkv(p, h, index, config)
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        own = jnp.broadcast_to(position[:, None], (b, config.num_kv_heads, t))
        everywhere = jnp.concatenate([layer.position, own], axis=-1)
        with jax.named_scope("attend"):
            segments = [Segment(layer.k, layer.v), Segment(k, v)]
            attended, stats, layer_rows = attend_chunk(
                q, segments, position, everywhere, request, config.sliding_window
            )
        if rows is not None:
            rows = rows + layer_rows / config.num_layers  # type: ignore[operator]
        if request.mass:
            stats = dataclasses.replace(stats, mass=stats.mass + jnp.pad(layer.stats.mass, ((0, 0), (0, 0), (0, t))))
        if request.projected:
            norms = jnp.where(position[:, None] >= 0, _projected(p, v), 0.0)
            stats = dataclasses.replace(stats, projected=jnp.concatenate([layer.stats.projected, norms], axis=-1))
        key_norm, value_norm = (jnp.where(own >= 0, kv.norms(x), 0.0) for x in (k, v))
        new = kv.LayerCache(
            k=jnp.concatenate([layer.k, k], axis=2), v=jnp.concatenate([layer.v, v], axis=2), position=everywhere,
            key_norm=jnp.concatenate([layer.key_norm, key_norm], axis=-1),
            value_norm=jnp.concatenate([layer.value_norm, value_norm], axis=-1), stats=stats,
        )  # fmt: skip
        moments = _moments(unrotated, position) if request.queries else None
        return (finish(p, x, attended, config), rows), (new, moments, h if request.hidden else None)

    (x, rows), (layers, moments, hidden) = run_layers(
        body, (embed(params, tokens), rows), params["layers"], cache.layers
    )
    queries = cache.queries
    if moments is not None:
        new = _query_moments(moments, position, config)
        queries = dataclasses.replace(
            new, count=new.count + queries.count, total=new.total + queries.total, outer=new.outer + queries.outer
        )
    length = cache.length + jnp.sum(position >= 0, axis=1, dtype=jnp.int32)
    entropy = None if rows is None else kv.row_entropies(rows)
    return x, kv.Cache(layers, None, length, rows, entropy, queries, None if hidden is None else hidden.swapaxes(0, 1))


def last_logits(params: Params, config: ModelConfig, hidden: Array, length: Array) -> Array:
    """f32[B, V]: logits after the last real token of each prompt. hidden [B, T, D], length int32[B]."""
    last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)[:, 0]
    return unembed(params, last, config)


def extend(
    params: Params, config: ModelConfig, tokens: Array, cache: kv.Cache, start: Array | None = None
) -> tuple[Array, kv.Cache]:
    """Feeds T further tokens to every sequence of a cache; T = 1 is a decode step.

    Args:
      params: stacked if the cache is stacked, a tuple of layers if it is one.
      tokens: int32[B, T], no padding. They take positions length, length + 1, ...
      cache: with at least T empty slots. The statistics that it holds are carried on.
      start: int32 scalar, first of T consecutive empty slots among the slots that each sequence owns. None (for T = 1
        only): the first empty slot of each layer, sequence and head.

    Returns:
      Hidden states [B, T, D] of the last layer and the new cache.
    """
    x, cache, _ = extend_watched(params, config, tokens, cache, start, lambda probs, position: None)
    return x, cache


def extend_watched(
    params: Params, config: ModelConfig, tokens: Array, cache: kv.Cache, start: Array | None,
    watch: Callable[[Array, Array], Any], weight: Array | None = None,
) -> tuple[Array, kv.Cache, Any]:  # fmt: skip
    """`extend` that also looks at the attention: the third result is what `watch` returns, layer by layer.

    Args:
      watch: (probabilities f32[B, N, T, S], position of the slots int32[B, K, S]) of a layer -> any pytree.
      weight: f32[L, B, K, S] or None, how much of each slot is there (see `attention.attend`). The result is differentiable
        in it; each layer's activations are computed again on the way back.
    """
    b, t = tokens.shape
    position = cache.length[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
    shared = 0 if cache.prompt is None else cache.prompt.k.shape[3]
    group = config.group_size

    def body(carry, p, state):
        x, rows = carry
        layer, prompt, weight_l = state
        unrotated, q, k, v = qkv(p, rms_norm(x, p["attn_norm"], config.norm_eps), position, config)
        q, k, v = constrain(q, "BTNH"), constrain(k, "BTKH"), constrain(v, "BTKH")
        with jax.named_scope("cache_update"):
            filled = jnp.repeat(layer.position >= 0, group, axis=1)
            if start is None:
                at = kv.first_free(layer.position[..., shared:])
            else:
                at = jnp.broadcast_to(start, layer.position.shape[:2])
            layer = kv.append(layer, k, v, position, at)
        with jax.named_scope("attend"):
            segments = ([] if prompt is None else [prompt]) + [Segment(layer.k, layer.v)]
            attended, probs = attend(q, segments, position, layer.position, config.sliding_window, weight_l)
        with jax.named_scope("statistics"):
            stats = accumulate(layer.stats, probs, filled)
            if stats.projected is not None:
                slots = shared + at[..., None] + jnp.arange(t, dtype=jnp.int32)[None, None]  # [B, K, T]
                stats = dataclasses.replace(
                    stats, projected=_put(stats.projected, _projected(p, v.swapaxes(1, 2)), slots)
                )
            layer = dataclasses.replace(layer, stats=stats)
            if rows is not None:
                rows = rows + jnp.mean(probs, axis=1) / config.num_layers
            moments = None if cache.queries is None else _moments(unrotated, position)
        seen = watch(probs, layer.position)
        return (constrain(finish(p, x, attended, config), "BTD"), rows), (layer, moments, seen)

    slots = kv.positions(cache).shape[-1]
    rows: Any = None if cache.rows is None else jnp.zeros((b, t, slots), jnp.float32)
    if isinstance(cache.layers, tuple):
        prompt_layers = [None] * len(cache.layers) if cache.prompt is None else _split_prompt(cache.prompt)
        weights = [None] * len(cache.layers) if weight is None else list(weight)
        state: Any = tuple(zip(cache.layers, prompt_layers, weights, strict=True))
    else:
        state = (cache.layers, cache.prompt, weight)
    if weight is not None:
        body = jax.checkpoint(body)
    x = constrain(embed(params, tokens), "BTD")
    (x, rows), outs = run_layers(body, (x, rows), params["layers"], state)
    # Scanned, the results of all layers are stacked; unrolled, they are a tuple with one of each.
    layers, moments, seen = tuple(zip(*outs, strict=True)) if isinstance(cache.layers, tuple) else outs
    new = dataclasses.replace(cache, layers=layers, length=cache.length + t)
    if cache.queries is not None:
        new = dataclasses.replace(new, queries=_add_moments(cache.queries, moments, position))
    if rows is not None:
        new = _add_rows(new, rows, position, kv.positions(cache)[0, :, 0] >= 0)
    return x, kv.laid_out(new), seen


def _put(norms: Array, new: Array, slots: Array) -> Array:
    """Writes f32[B, N, T] into f32[B, N, S] at slots int32[B, K, T] of the head's key/value head."""
    b, n, s = norms.shape
    heads = slots.shape[1]
    grouped, new = norms.reshape(b, heads, n // heads, s), new.reshape(b, heads, n // heads, -1)
    put = jax.vmap(jax.vmap(lambda old, fresh, at: old.at[:, at].set(fresh)))
    return put(grouped, new, slots).reshape(b, n, s)


def _add_moments(queries: kv.QueryMoments, moments: Any, position: Array) -> kv.QueryMoments:
    if isinstance(moments[0], tuple):
        moments = jax.tree.map(lambda *leaves: jnp.stack(leaves), *moments)
    count = jnp.sum(position >= kv.QueryMoments.SKIP, axis=1).astype(jnp.float32)
    total, outer = (m.swapaxes(0, 1) for m in moments)
    return dataclasses.replace(
        queries, count=queries.count + count, total=queries.total + total, outer=queries.outer + outer
    )


def _split_prompt(prompt: Segment) -> list[Segment]:
    return [Segment(prompt.k[i], prompt.v[i]) for i in range(prompt.k.shape[0])]


def _add_rows(cache: kv.Cache, rows: Array, position: Array, filled: Array) -> kv.Cache:
    """Puts new attention rows f32[B, T, S] into the ring, after clearing the columns of slots that were empty."""
    window = cache.rows.shape[1]
    rows, position = rows[:, -window:], position[:, -window:]  # an older one would be overwritten at once
    entropy = kv.row_entropies(rows)
    ring = jnp.where(filled[:, None], cache.rows, 0.0)
    place = position % window
    ring = jax.vmap(lambda r, p, new: r.at[p].set(new))(ring, place, rows)
    row_entropy = jax.vmap(lambda r, p, new: r.at[p].set(new))(cache.row_entropy, place, entropy)
    return dataclasses.replace(cache, rows=ring, row_entropy=row_entropy)


def full_logits(params: Params, config: ModelConfig, tokens: Array) -> Array:
    """Logits of every position of one or more equally long prompts: tokens int32[B, T] -> f32[B, T, V]."""
    length = jnp.full((tokens.shape[0],), tokens.shape[1], jnp.int32)
    hidden, _ = prefill(params, config, tokens, length, StatsRequest())
    return unembed(params, hidden, config)


__all__ = [
    "Params", "Stats", "TensorSpec", "embed", "extend", "extend_watched", "finish", "full_logits", "init_params",
    "last_logits", "param_specs", "prefill", "prefill_chunk", "qkv", "queries", "rms_norm", "rope_frequencies", "rotate",
    "run_layers", "unembed", "unstack",
]  # fmt: skip
