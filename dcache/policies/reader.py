"""Reads hidden states: a small network per layer, one number for each token and key/value head (KVzap, arXiv 2601.07891)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

EPSILON = 1e-6


def init(key: Array, heads: tuple[int, ...], width: int, hidden: int) -> Any:
    """Fresh weights, float32: the first output is 0 for every token.

    Args:
      heads: (L, K) of the model. width: D of the model. hidden: units of each network's hidden layer, 0 for a linear one.
    """
    layers, per_layer = heads
    weights = {"out": jnp.zeros((layers, hidden or width, per_layer)), "bias": jnp.zeros((layers, per_layer))}
    if hidden:
        weights["in"] = jax.random.normal(key, (layers, width, hidden)) * width**-0.5
        weights["in_bias"] = jnp.zeros((layers, hidden))
    return weights


def read(weights: Any, hidden: Array) -> Array:
    """The networks' outputs f32[L, B, K, S] of hidden states [B, L, S, D], which get a LayerNorm first."""

    def layer(xs):
        w, x = xs
        x = x.astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON)
        if "in" in w:
            x = jax.nn.gelu(x @ w["in"] + w["in_bias"][None, None])
        return jnp.einsum("bsf,fk->bks", x, w["out"]) + w["bias"][None, :, None]

    return jax.lax.map(layer, (weights, hidden.swapaxes(0, 1)))
