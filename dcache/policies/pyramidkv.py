"""PyramidKV: lower layers get more of the budget than upper ones."""

import dataclasses

import jax.numpy as jnp

from dcache.errors import ConfigError
from dcache.policies.snapkv import SnapKV


@dataclasses.dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's scores; the budgets of the layers fall linearly. Cai et al., arXiv 2406.02069.

    Beside its window a layer gets between `1 / beta` (the last) and `2 - 1 / beta` (the first) of what the window leaves of
    the budget. Rounded down, with what is left over given to the first layers that have room, the budgets never rise from
    layer to layer and sum to the number of layers times the budget exactly. They fall less if the first layer would get
    more than there is.

    The original has window 8, kernel 5, max pooling. kvpress counts the window inside the pyramid and falls back to equal
    budgets wherever the last layer's would be smaller than the window; `kvpress=True` does the same (with its window of
    64 a prompt of 512 tokens at 25% gets SnapKV's keep-sets).

    Attributes:
      window, kernel, pooling, granularity: of the scores, see `SnapKV`.
      beta: steepness. kvpress: take kvpress's layer budgets.
    """

    name = "pyramidkv"
    summary = "SnapKV's scores, budgets that fall from layer to layer"
    paper = "arXiv 2406.02069"

    beta: float = 20.0
    kvpress: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.granularity == "sequence":
            raise ConfigError(
                "pyramidkv: granularity is 'sequence'; layers need budgets of their own: 'head' or 'layer'."
            )
        if self.beta < 1.0:
            raise ConfigError(f"pyramidkv: beta is {self.beta}; give 1 (equal budgets) or more.")

    def allocate(self, params, cache, scores, filled, budget, protected):
        """Layer budgets."""
        del params, cache, protected
        held = jnp.max(jnp.sum(filled, axis=-1, dtype=jnp.int32).reshape(*filled.shape[:2], -1), axis=(0, 2))  # [B]
        layers = jnp.arange(scores.shape[0], dtype=jnp.int32)[:, None]
        steps = max(scores.shape[0] - 1, 1)
        window = jnp.minimum(self.width, budget)
        inside = jnp.zeros_like(window) if self.kvpress else window
        mean = (budget - inside).astype(jnp.float32)
        most = (held - window).astype(jnp.float32)
        last = jnp.maximum(mean / self.beta, 2.0 * mean - most)
        first = 2.0 * mean - last
        wanted = first[None] - layers.astype(jnp.float32) * ((first - last) / steps)[None]
        if self.kvpress:
            falls = (last >= self.width)[None]
            shares = jnp.where(falls, jnp.round(wanted).astype(jnp.int32), budget[None])
        else:
            floors = jnp.floor(wanted + 1e-3).astype(jnp.int32)
            over = scores.shape[0] * (budget - inside) - jnp.sum(floors, axis=0)
            full = jnp.sum(floors >= most.astype(jnp.int32)[None], axis=0)  # layers that keep all they hold
            more = (layers >= full[None]) & (layers - full[None] < over[None])
            shares = inside[None] + floors + more.astype(jnp.int32)
        shares = shares.reshape(*shares.shape, *(1,) * (scores.ndim - 3))
        return jnp.broadcast_to(shares, scores.shape[:-1])

    def most_kept(self, budget, seen, config):
        """The first layer's budget, at most twice the mean."""
        del config
        return min(seen, 2 * budget)
