import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache.errors import ConfigError
from dcache.learn.state import LearnConfig, advance, optimiser, start

# optax raises Python floats to int32 powers
OPTAX = jax.numpy_dtype_promotion("standard")


def test_optimiser():
    config = LearnConfig(steps=100, warmup_steps=10, learning_rate=0.1, weight_decay=0.0, clip_norm=1.0, final_rate=0.1)
    rule = optimiser(config)
    params = {"w": jnp.zeros(3)}
    state, sizes = rule.init(params), []
    update_jit = jax.jit(rule.update)
    for _ in range(101):
        with OPTAX:
            update, state = update_jit({"w": jnp.asarray([300.0, -300.0, 0.0])}, state, params)
        sizes.append(float(jnp.abs(update["w"][0])))
    # Adam moves by the learning rate when the gradient is constant: 0, warm-up, the peak, down to a tenth of it.
    assert sizes[0] == 0
    np.testing.assert_allclose(sizes[1:11], np.arange(1, 11) * 0.01, rtol=1e-3)
    assert max(sizes) == pytest.approx(0.1, rel=1e-3) and sizes[100] == pytest.approx(0.01, rel=1e-2)
    assert all(a >= b - 1e-6 for a, b in zip(sizes[10:], sizes[11:], strict=False))


def test_clipping_and_decay():
    # After clipping to norm 1 the second gradient, a thousand times larger, weighs as much as the first.
    config = LearnConfig(steps=10, warmup_steps=0, learning_rate=0.1, weight_decay=0.0)
    rule, params = optimiser(config), {"w": jnp.zeros(2)}
    state = rule.init(params)
    for gradient in ([1.0, 0.0], [0.0, 1000.0]):
        with OPTAX:
            _, state = rule.update({"w": jnp.asarray(gradient)}, state, params)
    second = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (2,)]
    assert all(np.abs(leaf).max() <= 1 for leaf in second)
    decayed = optimiser(LearnConfig(steps=10, warmup_steps=0, learning_rate=0.1, weight_decay=0.5))
    params = {"w": jnp.ones(2)}
    with OPTAX:
        update, _ = decayed.update({"w": jnp.zeros(2)}, decayed.init(params), params)
    np.testing.assert_allclose(update["w"], -0.1 * 0.5, rtol=1e-5)


def test_parts_of_the_weights_may_learn_more_slowly():
    config = LearnConfig(steps=10, warmup_steps=0, learning_rate=0.1, weight_decay=0.0)
    weights = {"net": jnp.zeros(2), "reader": {"w": jnp.zeros(2)}}
    grads = {"net": jnp.ones(2), "reader": {"w": jnp.ones(2)}}
    rate_jit = jax.jit(lambda state, rates: advance(state, grads, config, rates).params)
    slow = rate_jit(start(weights, config), {"reader": jnp.float32(0.25)})
    same = rate_jit(start(weights, config), None)
    np.testing.assert_allclose(slow["net"], same["net"])
    np.testing.assert_allclose(slow["reader"]["w"], 0.25 * same["reader"]["w"])
    np.testing.assert_allclose(same["net"], -0.1, rtol=1e-4)


@pytest.mark.parametrize(
    "bad, says",
    [
        ({"steps": 10, "warmup_steps": 10}, "warmup_steps"), ({"warmup_steps": -1}, "warmup_steps"),
        ({"steps": 0}, "steps is 0"), ({"average": 1.0}, "average"),
    ],
)  # fmt: skip
def test_refusals(bad, says):
    with pytest.raises(ConfigError, match=says):
        LearnConfig(**bad)
