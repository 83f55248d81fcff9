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


def group_advantages(rewards: Array) -> Array:
    """rewards f32[A] of one prompt's samples, centred and divided by their deviation (GRPO: Shao et al., arXiv 2402.03300).

    Equal rewards give 0: such a group teaches nothing.
    """
    centred = rewards - jnp.mean(rewards)
    return centred / (jnp.std(rewards) + 1e-6)


def clipped_surrogate(log_probs: Array, old_log_probs: Array, advantages: Array, clip: float) -> Array:
    """Objective of each action, to be raised: f32[...], min(r A, clip(r, 1 - clip, 1 + clip) A), r the ratio of probabilities.

    Args:
      log_probs: f32[...], differentiable. old_log_probs: f32[...], of the policy that drew the actions, constants.
      advantages: f32, of a shape that broadcasts to theirs, constants.
    """
    ratio = jnp.exp(log_probs - old_log_probs)
    return jnp.minimum(ratio * advantages, jnp.clip(ratio, 1.0 - clip, 1.0 + clip) * advantages)


def kl_penalty(log_probs: Array, reference: Array) -> Array:
    """Estimate of KL(policy || reference) from each action that the policy drew, never negative: f32[...].

    Args:
      log_probs: f32[...], differentiable. reference: f32[...], of the reference policy, constants.
    """
    log_ratio = reference - log_probs
    return jnp.exp(log_ratio) - log_ratio - 1.0


def ranking_cost(importance: Array, order: Array) -> Array:
    """Importance that a ranking loses, summed over all budgets: importance f32[S], order int32[S] (best first) -> f32 scalar.

    A budget of b loses what is ranked below b, so the token of rank r is lost by r budgets (Moschella et al., arXiv
    2602.10238). What is no candidate has importance 0 and comes last.
    """
    return jnp.sum(jnp.arange(importance.shape[0], dtype=jnp.float32) * importance[order])
