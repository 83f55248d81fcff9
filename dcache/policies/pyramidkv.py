"""PyramidKV: lower layers get more of the budget than upper ones."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from dcache.errors import ConfigError
from dcache.policies.base import most_marked
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
        del params, cache
        return falling(scores, filled, budget, protected, window=self.width, beta=self.beta, kvpress=self.kvpress)

    def most_kept(self, budget, seen, config):
        """The first layer's budget, at most twice the mean."""
        del config
        return min(seen, 2 * budget)


def falling(
    scores: Array, filled: Array, budget: Array, protected: Array | None, *, window: int, beta: float,
    kvpress: bool = False,
) -> Array:  # fmt: skip
    """Budgets that fall linearly from layer to layer, see `PyramidKV`: int32[L, B] or [L, B, K].

    Args:
      scores, filled, budget, protected: see `Policy.allocate`.
      window: tokens that every layer keeps in any case; more, if more are protected.
      beta, kvpress: see `PyramidKV`.
    """
    held = most_marked(filled)
    layers = jnp.arange(scores.shape[0], dtype=jnp.int32)[:, None]
    steps = max(scores.shape[0] - 1, 1)
    stays = jnp.full_like(budget, window)
    if protected is not None:
        stays = jnp.maximum(stays, most_marked(protected & filled))
    inside = jnp.minimum(stays, budget)
    most = (held - inside).astype(jnp.float32)
    counted = jnp.zeros_like(inside) if kvpress else inside
    mean = (budget - counted).astype(jnp.float32)
    last = jnp.maximum(mean / beta, 2.0 * mean - most)
    first = 2.0 * mean - last
    wanted = first[None] - layers.astype(jnp.float32) * ((first - last) / steps)[None]
    if kvpress:
        falls = (last >= stays.astype(jnp.float32))[None]
        shares = jnp.where(falls, jnp.round(wanted).astype(jnp.int32), budget[None])
    else:
        floors = jnp.floor(wanted + 1e-3).astype(jnp.int32)
        over = scores.shape[0] * (budget - inside) - jnp.sum(floors, axis=0)
        full = jnp.sum(floors >= most.astype(jnp.int32)[None], axis=0)  # layers that keep all they hold
        more = (layers >= full[None]) & (layers - full[None] < over[None])
        shares = inside[None] + floors + more.astype(jnp.int32)
    shares = shares.reshape(*shares.shape, *(1,) * (scores.ndim - 3))
    return jnp.broadcast_to(shares, scores.shape[:-1])
