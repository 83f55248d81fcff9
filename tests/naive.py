"""Naive dense references in plain numpy (float64), and the compiled functions that the tests compare with them.

The reference model keeps every token for ever and drops keys by a visibility table, one query and one head at a time:
no cache, no slots, no blocks. Axis letters are those of `dcache.config`.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from dcache import cache as kv
from dcache import model
from dcache.attention import StatsRequest
from dcache.config import PRESETS
from dcache.signals import ENTROPY_QUERIES, NEAR, WINDOW

TINY = PRESETS["tiny"]
EVERYTHING = StatsRequest(mass=True, last=True, windows=(WINDOW,), rows=ENTROPY_QUERIES)
MORE = EVERYTHING | StatsRequest(projected=True, queries=True, spreads=(32,))

prefill = jax.jit(model.prefill, static_argnums=(1, 4))
extend = jax.jit(model.extend, static_argnums=1)
logits_of = jax.jit(model.unembed, static_argnums=2)
evict = jax.jit(kv.evict)
compact = jax.jit(kv.compact, static_argnums=(2, 3))
share = jax.jit(kv.share_prompt, static_argnums=(1, 2))
grow = jax.jit(kv.grow, static_argnums=1)


@functools.cache
def weights(config=TINY, seed=0):
    """Random weights, made without JAX; no scale is one and no bias zero, so a forgotten one would show."""
    rng = np.random.default_rng(seed)

    def start(spec):
        mean, deviation = (1.0, 0.3) if spec.init is None else (0.0, spec.init or 0.3)
        return jnp.asarray(rng.normal(mean, deviation, spec.shape), config.dtype)

    return jax.tree.map(start, model.param_specs(config), is_leaf=lambda x: isinstance(x, model.TensorSpec))


def some_tokens(count, seed=0, config=TINY):
    """int32[count] random token ids."""
    return np.random.default_rng([seed, count]).integers(0, config.vocab_size, count).astype(np.int32)


def read(tokens, request=EVERYTHING, config=TINY, params=None, pad=None):
    """Prefill of a list of prompts (int32 arrays), padded to `pad` tokens with a token that is not zero.

    Returns hidden states [B, T, D] and the cache.
    """
    params = weights(config) if params is None else params
    width = max(len(t) for t in tokens) if pad is None else pad
    padded = np.full((len(tokens), width), 7, np.int32)
    for row, t in zip(padded, tokens, strict=True):
        row[: len(t)] = t
    length = np.asarray([len(t) for t in tokens], np.int32)
    return prefill(params, config, jnp.asarray(padded), jnp.asarray(length), request)


@dataclasses.dataclass(frozen=True)
class Dense:
    """What the reference knows of a text.

    logits [T, V], attention [L, N, T, T], rotated keys and values [L, K, T, H], queries before their rotation
    [L, N, T, H], and the L1 norm of each value after its query head's output projection [L, N, T].
    """

    logits: np.ndarray
    probs: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    queries: np.ndarray
    projected: np.ndarray

    def log_probs(self):
        """[T, V]."""
        return log_softmax(self.logits)


def log_softmax(x):
    """Over the last axis."""
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def frequencies(config):
    """Radians per position, pair by pair."""
    result = []
    for pair in range(config.head_dim // 2):
        freq = 1.0 / config.rope_theta ** (2 * pair / config.head_dim)
        scaling = config.rope_scaling
        if scaling is not None:
            turns = scaling.original_max_positions * freq / (2 * math.pi)  # within the original context
            if turns < scaling.low_freq_factor:
                freq /= scaling.factor
            elif turns <= scaling.high_freq_factor:
                share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
                freq = (1 - share) * freq / scaling.factor + share * freq
        result.append(freq)
    return np.asarray(result)


def rotate(x, config, start=0):
    """x [T, heads, H], token t at position start + t: pair i is (x[i], x[i + H/2])."""
    half = config.head_dim // 2
    out = np.empty_like(x)
    for t in range(x.shape[0]):
        for i, freq in enumerate(frequencies(config)):
            c, s = math.cos((start + t) * freq), math.sin((start + t) * freq)
            a, b = x[t, :, i], x[t, :, i + half]
            out[t, :, i], out[t, :, i + half] = c * a - s * b, s * a + c * b
    return out


def _norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def forward(params, config, tokens, allowed=None):
    """The whole text at once.

    Args:
      params: stacked. tokens: int[T]. allowed: bool[L, K, T, T], query t may see key s; None for all. A key that is not
        allowed is left out of the softmax as if it did not exist.
    """
    p = jax.tree.map(lambda x: np.asarray(x.astype(jnp.float32), np.float64), params)
    count, group = len(tokens), config.num_heads // config.num_kv_heads
    if allowed is None:
        allowed = np.ones((config.num_layers, config.num_kv_heads, count, count), bool)
    x = p["embed"][np.asarray(tokens)]
    all_probs, keys, values, queries, projected = [], [], [], [], []
    for l in range(config.num_layers):
        w = {name: value[l] for name, value in p["layers"].items()}
        h = _norm(x, w["attn_norm"], config.norm_eps)
        q, k, v = (np.einsum("td,dnh->tnh", h, w[name]) for name in "qkv")
        if config.qkv_bias:
            q, k, v = q + w["q_bias"], k + w["k_bias"], v + w["v_bias"]
        queries.append(q.swapaxes(0, 1))
        q, k = rotate(q, config), rotate(k, config)
        projected.append([np.abs(v[:, n // group] @ w["o"][n]).sum(-1) for n in range(config.num_heads)])
        probs = np.zeros((config.num_heads, count, count))
        mixed = np.zeros((count, config.num_heads, config.head_dim))
        for n in range(config.num_heads):
            head = n // group
            for t in range(count):
                first = 0 if config.sliding_window is None else max(0, t - config.sliding_window + 1)
                seen = [s for s in range(first, t + 1) if allowed[l, head, t, s]]
                score = k[seen, head] @ q[t, n] / math.sqrt(config.head_dim)
                weight = np.exp(score - score.max())
                probs[n, t, seen] = weight / weight.sum()
                mixed[t, n] = probs[n, t, seen] @ v[seen, head]
        x = x + np.einsum("tnh,nhd->td", mixed, w["o"])
        h = _norm(x, w["mlp_norm"], config.norm_eps)
        gate = h @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
        all_probs.append(probs)
        keys.append(k.swapaxes(0, 1))
        values.append(v.swapaxes(0, 1))
    head = p["embed"].T if config.tie_embeddings else p["head"]
    logits = _norm(x, p["final_norm"], config.norm_eps) @ head
    return Dense(
        logits, np.stack(all_probs), np.stack(keys), np.stack(values), np.stack(queries), np.asarray(projected)
    )  # fmt: skip


PROMPT, STEPS = 70, 6  # longer than both windows (32 and 64)


@functools.cache
def decoded(kind, request=MORE):
    """A cache of two sequences (70 and 41 tokens) after 6 decode steps, and what the reference knows of each.

    Args:
      kind: "prefill" (no steps); "plain"; "sequence" or "head": before every other step a random third of the tokens
        that are left is dropped, the same in all layers and heads or not, and later tokens take their slots; "unrolled"
        is "sequence" in the other layout.

    Returns:
      The cache; for each sequence its `Dense` of the whole text and bool[L, K, T], what is still there; the lengths of
      the prompts.
    """
    rng, config = np.random.default_rng(3), TINY
    layers, heads = config.num_layers, config.num_kv_heads
    steps = 0 if kind == "prefill" else STEPS
    lengths = (PROMPT, 41)
    texts = [some_tokens(n + steps, seed=n) for n in lengths]
    params = weights()
    _, cache = read([t[:n] for t, n in zip(texts, lengths, strict=True)], request, pad=PROMPT + STEPS)
    fed_params = params
    if kind == "unrolled":
        cache, fed_params = kv.unstack(cache), model.unstack(params)
    slots = PROMPT + STEPS
    allowed = [np.ones((layers, heads, n + steps, n + steps), bool) for n in lengths]
    for step in range(steps):
        if kind in ("sequence", "head", "unrolled"):
            shape = (layers, 2, heads, slots) if kind == "head" else (1, 2, 1, slots)
            keep = np.broadcast_to(rng.random(shape) > (0.33 if step % 2 == 0 else 0), (layers, 2, heads, slots))
            position = np.asarray(kv.positions(cache))
            for l, b, k, s in zip(*np.nonzero(~keep & (position >= 0)), strict=True):
                allowed[b][l, k, lengths[b] + step :, position[l, b, k, s]] = False
            cache = evict(cache, jnp.asarray(keep))
        fed = jnp.asarray([[t[n + step]] for t, n in zip(texts, lengths, strict=True)], jnp.int32)
        _, cache = extend(fed_params, config, fed, cache)
    dense = [forward(params, config, t, a) for t, a in zip(texts, allowed, strict=True)]
    alive = [a[:, :, -1] for a in allowed]
    return cache, dense, alive, lengths


def window_sum(probs, prompt, width):
    """[L, N, T, T] -> [L, N, T]: sum over the prompt's last `width` queries; a later one multiplies by 1 - 1/width."""
    total = probs[:, :, max(0, prompt - width) : prompt].sum(2)
    for t in range(prompt, probs.shape[2]):
        total = total * (1 - 1 / width) + probs[:, :, t]
    return total


def signal(name, dense, alive, prompt, granularity="sequence", layer_reduce="mean"):
    """A raw signal of every token after all T tokens: [T], [L, T] or [L, K, T].

    Args:
      dense: of the whole text. alive: bool[L, K, T], tokens that are still cached. prompt: tokens the prefill read.
    """
    layers, heads, count, _ = dense.probs.shape
    kv_heads = dense.keys.shape[1]
    could_see = count - np.arange(count)

    def grouped(x):  # [L, N, T] -> [L, K, G, T]
        return x.reshape(layers, kv_heads, heads // kv_heads, count)

    def reduce(x, how):  # [L, N, T] by a function over heads
        if granularity == "head":
            return how(grouped(x), 2)
        return how(x, 1)

    def over_layers(x, how):
        return how(x, 0) if granularity == "sequence" else x

    reduced = np.max if layer_reduce == "max" else np.mean
    rate = dense.probs.sum(2) / could_see
    window = window_sum(dense.probs, prompt, WINDOW) / WINDOW
    if name == "alpha":
        return over_layers(reduce(rate, np.mean), np.mean)
    if name == "sigma":
        return over_layers(reduce(rate, np.var), reduced)
    if name in ("last", "alpha_last"):
        return over_layers(reduce(dense.probs[:, :, -1], np.mean), np.mean)
    if name == "last_max":
        return over_layers(reduce(dense.probs[:, :, -1], np.max), np.max)
    if name == "window_mean":
        return over_layers(reduce(window, np.mean), np.mean)
    if name == "window_max":
        return over_layers(reduce(window, np.max), np.max)
    if name == "vnorm":
        norm = np.sqrt((dense.values**2).sum(-1))
        return norm if granularity == "head" else over_layers(norm.mean(1), reduced)
    if name == "key_distinct":
        unit = dense.keys / np.sqrt((dense.keys**2).sum(-1, keepdims=True))
        mean = (unit * alive[..., None]).sum(2) / alive.sum(2)[..., None]
        cosine = np.einsum("lkth,lkh->lkt", unit, mean) / np.sqrt((mean**2).sum(-1))[..., None]
        return -cosine if granularity == "head" else over_layers(-cosine.mean(1), np.mean)
    if name.endswith("_near"):
        value = signal(name.removesuffix("_near"), dense, alive, prompt, granularity, layer_reduce)
        held = {"sequence": alive[0, 0], "layer": alive[:, 0], "head": alive}[granularity]
        near = np.full(value.shape, np.nan)
        for index in np.ndindex(value.shape[:-1]):
            tokens = np.flatnonzero(held[index])
            for i, t in enumerate(tokens):
                near[(*index, t)] = value[index][tokens[max(0, i - NEAR // 2) : i + NEAR // 2 + 1]].max()
        return near
    if name.endswith("_all"):
        value = signal(name.removesuffix("_all"), dense, alive, prompt)
    elif name.endswith("_upper"):
        half = dataclasses.replace(dense, probs=dense.probs[layers // 2 :], keys=dense.keys[layers // 2 :])
        value = signal(name.removesuffix("_upper"), half, alive[layers // 2 :], prompt)
    elif name == "pos":
        value = np.arange(count) / count
    elif name == "entropy":
        rows = dense.probs.mean((0, 1))  # [T, T]
        surprise = -np.sum(np.where(rows > 0, rows * np.log(np.where(rows > 0, rows, 1)), 0), 1)
        last = slice(max(0, count - ENTROPY_QUERIES), count)
        value = rows[last].T @ surprise[last] / np.maximum(rows[last].sum(0), 1e-20)
    else:
        raise AssertionError(name)
    shape = {"sequence": (), "layer": (layers,), "head": (layers, kv_heads)}[granularity]
    return np.broadcast_to(value, (*shape, count))


def by_position(values, position, count):
    """Values [..., S] of slots, sorted by the token that each slot holds: [..., count], NaN for tokens that are gone.

    Raises an AssertionError if two slots hold the same token.
    """
    values, position = np.asarray(values), np.asarray(position)
    out = np.full((*values.shape[:-1], count), np.nan)
    for index in np.ndindex(values.shape[:-1]):
        held = position[index] >= 0
        assert len(set(position[index][held].tolist())) == held.sum(), "two slots hold the same token"
        out[index][position[index][held]] = values[index][held]
    return out


def alive_tokens(cache, count, sequence=0):
    """bool[L, K, count]: which tokens of one sequence every layer and head still holds."""
    position = np.asarray(kv.positions(cache))[:, sequence]
    return ~np.isnan(by_position(np.ones(position.shape), position, count))


def top(scores, alive, budget, protected=None):
    """The `budget` alive entries of highest score on the last axis, protected ones first; ties to the lower index."""
    keep = np.zeros(scores.shape, bool)
    for index in np.ndindex(scores.shape[:-1]):
        guard = np.zeros(scores.shape[-1], bool) if protected is None else protected[index]
        ranked = sorted(np.flatnonzero(alive[index]), key=lambda i: (not guard[i], -scores[index][i], i))
        keep[index][ranked[:budget]] = True
    return keep
