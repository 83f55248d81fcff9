"""Returns, baselines and losses by hand, by definition, and against optax's score-function estimator."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dcache.learn import policy_gradient as pg


def test_discounted_returns_by_hand():
    rewards = jnp.asarray([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 8.0]])
    got = pg.discounted_returns(rewards, 0.5, 1)
    np.testing.assert_allclose(got, [[1 + 1 + 0.75 + 0.5, 2 + 1.5 + 1, 3 + 2, 4], [1, 2, 4, 8]])
    # One decision for every two tokens: the discount still counts tokens.
    np.testing.assert_allclose(pg.discounted_returns(rewards, 0.5, 2), [[3.25, 5], [1, 4]])
    np.testing.assert_allclose(pg.discounted_returns(rewards, 0.5, 4), [[3.25], [1]])


@pytest.mark.parametrize("gamma, every", [(0.99, 1), (1.0, 3), (0.0, 2), (0.9, 6)])
def test_discounted_returns_by_definition(gamma, every):
    rewards = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    want = [[sum(gamma ** (t - d) * r[t] for t in range(d, 6)) for d in range(0, 6, every)] for r in rewards]
    got = pg.discounted_returns(jnp.asarray(rewards), gamma, every)
    assert got.shape == (3, 6 // every)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(2,), (5, 3), (8, 1)])
def test_leave_one_out_by_definition(shape):
    values = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    want = [values[i] - np.delete(values, i, axis=0).mean(0) for i in range(len(values))]
    np.testing.assert_allclose(pg.leave_one_out(jnp.asarray(values)), want, rtol=1e-4, atol=1e-6)


def test_leave_one_out_is_unbiased_and_shift_free():
    # Exactly, by enumerating all pairs of draws of a three-armed bandit.
    logits, rewards = jnp.asarray([0.3, -0.5, 1.0]), np.asarray([1.0, 4.0, -2.0])
    p = np.exp(jax.nn.log_softmax(logits))

    def estimate(shift):
        total = np.zeros(3)
        for i in range(3):
            for j in range(3):
                advantage = pg.leave_one_out(jnp.asarray([[rewards[i] + shift], [rewards[j] + shift]], jnp.float32))

                def loss(x, pair=(i, j), advantage=advantage):
                    return pg.reinforce_loss(jax.nn.log_softmax(x)[jnp.asarray(pair)][:, None], advantage)

                total -= p[i] * p[j] * np.asarray(jax.grad(loss)(logits))
        return total

    want = p * (rewards - p @ rewards)  # the gradient of the expected reward under a softmax
    np.testing.assert_allclose(estimate(0.0), want, atol=1e-5)
    np.testing.assert_allclose(estimate(100.0), want, atol=1e-4)


def test_reinforce_loss_by_hand():
    log_probs = jnp.asarray([[-1.0, -2.0], [-3.0, -0.5]])
    advantages = jnp.asarray([[1.0, 0.5], [-2.0, 4.0]])
    assert float(pg.reinforce_loss(log_probs, advantages)) == pytest.approx(-((-1 - 1) + (6 - 2)) / 2)
    # Decisions of a sample are summed, samples are averaged.
    np.testing.assert_allclose(jax.grad(pg.reinforce_loss)(log_probs, advantages), -advantages / 2)


def test_reinforce_equals_optax_score_function():
    # The same draws, a normal distribution around the parameters: the two estimators agree sample by sample.
    def reward(x):
        return jnp.sum(jnp.sin(3 * x)) + x[0] * x[1]

    samples, sigma, mean = 64, 0.5, jnp.asarray([0.4, -0.2])
    smooth = optax.perturbations.make_perturbed_fun(
        reward, num_samples=samples, sigma=sigma, noise=optax.perturbations.Normal(), use_baseline=False
    )
    key = jax.random.key(0)
    want = jax.grad(lambda m: smooth(key, m))(mean)
    noise = jax.vmap(lambda k: optax.tree.random_like(k, mean, sampler=optax.perturbations.Normal().sample))
    draws = mean[None] + sigma * noise(jax.random.split(key, samples))

    def loss(m):
        log_probs = -0.5 * jnp.sum((draws - m[None]) ** 2, axis=1) / sigma**2
        return pg.reinforce_loss(log_probs[:, None], jax.vmap(reward)(draws)[:, None])

    np.testing.assert_allclose(-jax.grad(loss)(mean), want, rtol=1e-4)


def test_group_advantages_by_hand():
    got = pg.group_advantages(jnp.asarray([1.0, 2.0, 3.0, 6.0]))
    np.testing.assert_allclose(got, np.asarray([-2.0, -1.0, 0.0, 3.0]) / np.sqrt(3.5), rtol=1e-5)
    np.testing.assert_array_equal(pg.group_advantages(jnp.full(3, -0.25)), np.zeros(3))


def test_clipped_surrogate_by_hand():
    old = jnp.log(jnp.asarray([0.5, 0.5, 0.5, 0.5, 0.5]))
    new = jnp.log(jnp.asarray([0.55, 0.75, 0.25, 0.75, 0.25]))
    gain = jnp.asarray([2.0, 2.0, 2.0, -1.0, -1.0])
    want = [2.2, 2.4, 1.0, -1.5, -0.8]
    np.testing.assert_allclose(pg.clipped_surrogate(new, old, gain, 0.2), want, rtol=1e-5)
    # No gradient where clipping holds; elsewhere ratio times advantage.
    slope = jax.grad(lambda x: pg.clipped_surrogate(x, old, gain, 0.2).sum())(new)
    np.testing.assert_allclose(slope, [2.2, 0.0, 1.0, -1.5, 0.0], rtol=1e-5)


def test_kl_penalty_by_hand():
    new, reference = jnp.log(jnp.asarray([0.5, 0.2, 0.3])), jnp.log(jnp.asarray([0.25, 0.2, 0.55]))
    got = pg.kl_penalty(new, reference)
    np.testing.assert_allclose(got[:2], [0.5 + np.log(2.0) - 1.0, 0.0], rtol=1e-5, atol=1e-7)
    # Its mean under the policy is the KL.
    np.testing.assert_allclose(jnp.exp(new) @ got, jnp.exp(new) @ (new - reference), rtol=1e-5)
