"""Pure policy-gradient pieces, unbatched over prompts: returns, baselines, losses."""

import jax.numpy as jnp
from jax import Array


def discounted_returns(rewards: Array, gamma: float, every: int) -> Array:
    """Return of each decision from the rewards that it can influence.

    Args:
      rewards: f32[A, T]; reward t follows token t. gamma: discount per token. every: tokens between two decisions.

    Returns:
      f32[A, D], D = T / every; G_d = sum_{t >= d * every} gamma^(t - d * every) * rewards_t.
    """
    horizon = rewards.shape[1]
    steps = jnp.arange(horizon)[None]
    starts = jnp.arange(0, horizon, every)[:, None]
    weights = jnp.where(steps >= starts, gamma ** jnp.maximum(steps - starts, 0).astype(jnp.float32), 0.0)
    return jnp.einsum("at,dt->ad", rewards, weights)


def leave_one_out(values: Array) -> Array:
    """values f32[A, ...] minus the mean of the other samples (Kool et al., 2019). A >= 2."""
    count = values.shape[0]
    return (values - jnp.mean(values, axis=0, keepdims=True)) * (count / (count - 1))


def reinforce_loss(log_probs: Array, advantages: Array) -> Array:
    """Score-function surrogate: its gradient is minus the policy gradient, averaged over samples.

    Args:
      log_probs: f32[A, D], differentiable. advantages: f32[A, D], constants.
    """
    return -jnp.mean(jnp.sum(log_probs * advantages, axis=1))
