"""A dense reference of one sequence's attention in float64, and random inputs; axis letters are those of `dcache.config`."""

import math

import jax
import numpy as np


def random_qkv(key, batch, count, heads, kv_heads, width, dtype):
    """q [B, T, N, H] and k, v [B, K, T, H], with attention far from uniform."""
    q, k, v = (jax.random.normal(k, (batch, count, h, width)) for k, h in
               zip(jax.random.split(key, 3), (heads, kv_heads, kv_heads), strict=True))  # fmt: skip
    return (2 * q).astype(dtype), k.swapaxes(1, 2).astype(dtype), v.swapaxes(1, 2).astype(dtype)


def float64(x):
    return np.asarray(x.astype("float32"), np.float64)


def attention(q, k, v, seen):
    """q [T, N, H], k, v [K, S, H], seen bool[K, T, S] -> output [T, N, H], log-sum-exp [N, T], probabilities [N, T, S]."""
    q, k, v = (float64(x) for x in (q, k, v))
    group = q.shape[1] // k.shape[0]
    k, v, seen = (np.repeat(x, group, axis=0) for x in (k, v, seen))
    logits = np.where(seen, np.einsum("tnh,nsh->nts", q, k) / math.sqrt(q.shape[-1]), -np.inf)
    highest = logits.max(-1, keepdims=True)
    lse = highest + np.log(np.exp(logits - highest).sum(-1, keepdims=True))
    probs = np.exp(logits - lse)
    return np.einsum("nts,nsh->tnh", probs, v), lse[..., 0], probs


def causal(count, window):
    t, s = np.mgrid[:count, :count]
    return (s <= t) & (s > t - (window or count + 1))


def entropy(probs):
    """In nats, over the last axis."""
    return -np.where(probs > 0, probs * np.log(np.where(probs > 0, probs, 1.0)), 0.0).sum(-1)
