"""ForesightKV's two stages: labels, ranking loss, sampled replays and rewards by definition; each stage trains."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import foresightkv_smollm2
from dcache import checkpoint, metrics, rollout
from dcache.errors import ConfigError
from dcache.experiment import from_config
from dcache.learn import foresight, loop
from dcache.learn.foresight import ForesightConfig
from dcache.policies import make
from tests import naive
from tests.naive import TINY

L, K, G, N, H = TINY.num_layers, TINY.num_kv_heads, TINY.group_size, TINY.num_heads, TINY.head_dim
KEY = jax.random.key(0)
BLOCK, PAD, T = 12, 50, 6
POLICY = make("foresightkv", block=BLOCK, shape=(L, K, G, H))
TEXTS = [naive.some_tokens(50, seed=1), naive.some_tokens(31, seed=2)]
NEXT = [naive.some_tokens(T, seed=3), naive.some_tokens(T, seed=4)]
REAL = (6, 4)  # continuation tokens that count
ROUNDS = 5
CONFIG = ForesightConfig(steps=60, warmup_steps=0, horizon=T, minimum=8, ratios=(0.25,), samples=3)
step_jit = jax.jit(foresight.train_step, static_argnames=("model_config", "policy", "config", "most"))


@functools.cache
def taught():
    """Both prompts as the learner sees them."""
    trace = foresight.Trace(BLOCK)
    _, cache = naive.read(TEXTS, trace.needs, pad=PAD)
    continuation = np.stack(NEXT)
    weight = (np.arange(T)[None] < np.asarray(REAL)[:, None]).astype(np.float32)
    future = jnp.asarray(np.where(weight > 0, continuation, -1).astype(np.int32))
    see = jax.jit(lambda params, cache, future: trace.observe((), params, TINY, cache, None, future))
    return rollout.Trajectories(see(naive.weights(), cache, future), jnp.asarray(continuation), jnp.asarray(weight))


@functools.cache
def inputs():
    """Statistics, golden scores and the position of the slots."""
    cache = taught().cache
    found = foresight.received(cache, BLOCK)
    future = cache.layers.stats.extra["foresight/future"]
    return found, foresight.golden_scores(found, future, cache.length, BLOCK), cache.layers.position


@functools.cache
def blocks_to_come(which):
    """[R, L, K, T]: what each token receives, at most, from one of the blocks after the r-th, the continuation among them."""
    text, real = TEXTS[which], REAL[which]
    probs = naive.forward(naive.weights(), TINY, np.concatenate([text, NEXT[which][:real]])).probs
    count = len(text)
    means = []
    for r in range(ROUNDS):
        rows = probs[:, :, min(r * BLOCK, count) : min((r + 1) * BLOCK, count), :count]
        means.append(rows.mean(2) if rows.shape[2] else np.zeros((L, N, count)))
    means.append(probs[:, :, count:, :count].mean(2))
    means = np.stack(means).reshape(ROUNDS + 1, L, K, G, count).mean(3)
    return np.stack([means[r + 1 :].max(0) for r in range(ROUNDS)])


def test_golden_scores():
    got = np.asarray(inputs()[1])
    assert got.shape == (ROUNDS, L, 2, K, PAD)
    for b, text in enumerate(TEXTS):
        np.testing.assert_allclose(got[:, :, b, :, : len(text)], blocks_to_come(b), rtol=2e-3, atol=2e-6)


def rounds_of(golden, count, budget):
    """Candidates and evicted tokens of each round of one head's golden replay. golden: [R, T]."""
    alive, newest, start, out = np.zeros(count, bool), min(BLOCK, budget // 4), 0, []
    for r in range(ROUNDS):
        end = min((r + 1) * BLOCK, count)
        alive[start:end] = True
        older = [i for i in np.flatnonzero(alive) if i < end - newest]
        gone = sorted(older, key=lambda i: (golden[r, i], -i))[: max(0, alive.sum() - budget)]
        alive[gone] = False
        out.append((older, gone))
        start = end
    return out, alive


@pytest.mark.parametrize("budget", [(12, 8), (20, 31)])
def test_ranking_loss(budget):
    _, golden, position = inputs()
    scores = np.random.default_rng(0).normal(0, 0.02, golden.shape).astype(np.float32)
    got = jax.jit(functools.partial(foresight.ranking_loss, block=BLOCK, margin=0.01, most=20))(
        jnp.asarray(scores), golden, position, jnp.asarray(budget, jnp.int32)
    )
    golden, losses, agreements = np.asarray(golden), [], []
    for b, text in enumerate(TEXTS):
        for l in range(L):
            for h in range(K):
                s, g = scores[:, l, b, h], golden[:, l, b, h]
                for r, (older, gone) in enumerate(rounds_of(g, len(text), budget[b])[0]):
                    if not gone:
                        continue
                    pairs = [max(0.0, 0.01 - (s[r, i] - s[r, j])) for i in older for j in older if g[r, i] > g[r, j]]
                    losses.append(np.mean(pairs))
                    mine = sorted(older, key=lambda i: s[r, i])[: len(gone)]
                    agreements.append(len({*mine} & {*gone}) / len(gone))
    np.testing.assert_allclose(got, [np.mean(losses), np.mean(agreements)], rtol=1e-4)


def test_pairwise_hinge_by_hand():
    scores = jnp.asarray([[0.5, 0.495, 0.0, 9.0], [1.0, 2.0, 3.0, 4.0]])
    golden = jnp.asarray([[3.0, 2.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    there = jnp.asarray([[True, True, True, False]] * 2)
    # (0, 1) lacks 0.005 of the margin, (0, 2) nothing; 1 and 2 are equal, 3 takes no part.
    np.testing.assert_allclose(foresight.pairwise_hinge(scores, golden, there, 0.01), [0.0025, 0.0], rtol=1e-4)


def test_sampled_replays():
    _, golden, position = inputs()
    budget = jnp.asarray([12, 8], jnp.int32)
    scores = -jnp.log(golden + 1e-3)
    keep, (order, size, drawn) = jax.jit(foresight.sample_replay, static_argnums=4)(
        KEY, scores, position, budget, BLOCK
    )
    keep, order, size, drawn, values = (np.asarray(x) for x in (keep, order, size, drawn, scores))
    log_probs = np.asarray(foresight.draw_log_probs(scores, jnp.asarray(order), jnp.asarray(size)))
    assert np.isfinite(log_probs).all()
    differ = 0
    for b, text in enumerate(TEXTS):
        for l in range(L):
            for h in range(K):
                alive, start = np.zeros(PAD, bool), 0
                for r in range(ROUNDS):
                    end = min((r + 1) * BLOCK, len(text))
                    alive[start:end] = True
                    start = end
                    older = [i for i in np.flatnonzero(alive) if i < end - budget[b] // 4]
                    n = max(0, int(alive.sum() - budget[b]))
                    pool = sorted(older, key=lambda i: values[r, l, b, h, i])[: 2 * n]
                    assert drawn[r, l, b, h] == n and size[r, l, b, h] == len(pool)
                    draws = order[r, l, b, h, : len(pool)].tolist()
                    assert sorted(draws) == sorted(pool)
                    differ += draws[:n] != pool[:n]
                    alive[draws[:n]] = False
                    for d in range(n):
                        rest = -values[r, l, b, h, draws[d:]]
                        want = rest[0] - np.log(np.exp(rest - rest.max()).sum()) - rest.max()
                        np.testing.assert_allclose(log_probs[r, l, b, h, d], want, rtol=1e-3, atol=1e-4)
                np.testing.assert_array_equal(keep[l, b, h], alive)
    assert differ > 0


def test_draws_follow_the_scores():
    scores = jnp.asarray([0.0, 1.0, 2.0, 5.0, 5.0, 5.0, 5.0, 5.0])
    shape = (1, 1, 1, 1, 8)
    position = jnp.arange(8, dtype=jnp.int32).reshape(shape[1:])
    # One of eight must go: the pool are the first two, which go with 1 : exp(-1).
    draw = jax.jit(
        jax.vmap(
            lambda key: foresight.sample_replay(key, scores.reshape(shape), position, jnp.asarray([7], jnp.int32), 8)[0]
        )
    )
    keep = np.asarray(draw(jax.random.split(KEY, 4000)))[:, 0, 0, 0]
    assert (keep.sum(-1) == 7).all() and keep[:, 2:].all()
    assert abs((~keep[:, 0]).mean() - 1 / (1 + np.exp(-1))) < 0.03


def test_rewards_by_definition():
    rng = np.random.default_rng(0)
    teacher, students = (naive.log_softmax(3 * rng.normal(size=s)) for s in ((8, 5), (4, 8, 5)))
    continuation, weight = rng.integers(0, 5, 8), np.asarray([1, 1, 1, 1, 1, 1, 1, 0.0])
    entropy = -(np.exp(teacher) * teacher).sum(-1)
    counted = sorted(range(6), key=lambda t: entropy[t])[:5]  # 80% of 6, one is left out
    want = []
    for s in students:
        rises = [teacher[t, continuation[t + 1]] - s[t, continuation[t + 1]] for t in counted]
        want.append(-np.mean([x**2 if x > 1.5 else 0.0 for x in rises]))
    assert len({*want}) == 4
    got = foresight.rewards_of(
        *(jnp.asarray(x, jnp.float32) for x in (teacher, students)), jnp.asarray(continuation, jnp.int32),
        jnp.asarray(weight, jnp.float32), rise=1.5, confident=0.8,
    )  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-4)


def run(config, steps, state, reference=(), text=None):
    out = []
    for i in range(steps):
        state, values = step_jit(
            state, naive.weights(), taught() if text is None else text, jnp.int32(i % 2), KEY, reference,
            model_config=TINY, policy=POLICY, config=config, most=12,
        )  # fmt: skip
        out.append({name: float(value) for name, value in values.items()})
    return state, out


def test_ranking_learns():
    state, out = run(CONFIG, 60, foresight.start(POLICY.init(KEY), CONFIG))
    assert out[-1]["loss"] + out[-2]["loss"] < 0.5 * (out[0]["loss"] + out[1]["loss"])
    assert out[-1]["agreement"] + out[-2]["agreement"] > 0.1 + out[0]["agreement"] + out[1]["agreement"]
    assert all(np.isfinite(x["grad_norm"]) for x in out)


def test_grpo_follows_rewards_and_stays_near_the_first_stage():
    # Every rise counts, so that the untrained model's rewards differ.
    config = dataclasses.replace(CONFIG, stage="grpo", rise=0.0, learning_rate=1e-3, kl_steps=1, kl_weight=1.0)
    weights = POLICY.init(KEY)
    _, out = run(config, 2, foresight.start(weights, config), weights)
    assert out[0]["reward"] < 0 < out[0]["reward_deviation"] and out[0]["grad_norm"] > 0
    assert abs(out[0]["leaving"]) < 1e-6 < out[1]["leaving"]
    # Without rewards and far from the first stage, only the penalty acts, and only for its steps.
    silent = dataclasses.replace(taught(), weight=jnp.zeros_like(taught().weight))
    far = jax.tree.map(lambda x: x + 0.05, weights)
    _, out = run(config, 2, foresight.start(far, config), weights, silent)
    assert out[0]["grad_norm"] > 0 and out[1]["grad_norm"] == 0 == out[0]["reward"]


def test_grpo_raises_the_chance_of_what_was_rewarded():
    # Of eight tokens one goes, the first or the second; the second's draws are rewarded.
    shape = (1, 1, 1, 1, 8)
    position = jnp.arange(8, dtype=jnp.int32).reshape(shape[1:])
    scores = jnp.asarray([0.0, 0.0, *[5.0] * 6]).reshape(shape)
    one = functools.partial(
        foresight.sample_replay, scores=scores, position=position, budget=jnp.asarray([7], jnp.int32), block=8
    )
    keep, (order, size, _) = jax.jit(jax.vmap(one))(jax.random.split(KEY, 16))
    advantages = foresight.pg.group_advantages(keep[:, 0, 0, 0, 0].astype(jnp.float32))

    def gain(scores):
        first = jax.vmap(lambda o, n: foresight.draw_log_probs(scores, o, n))(order, size)[..., 0]
        old = jax.lax.stop_gradient(first)
        return jnp.mean(foresight.pg.clipped_surrogate(first, old, advantages.reshape(-1, 1, 1, 1, 1), 0.2))

    slope = np.asarray(jax.jit(jax.grad(gain))(scores)).ravel()
    assert slope[0] > 0 > slope[1] and (slope[2:] == 0).all()


def test_bad_settings():
    for bad, message in (
        ({"stage": "sft"}, "stage is 'sft'"), ({"horizon": 1}, "horizon is 1"), ({"samples": 1}, "samples is 1"),
        ({"ratios": ()}, "ratios are"), ({"confident": 0.0}, "confident is 0.0"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            ForesightConfig(**bad)


def test_both_stages_in_the_loop(tmp_path, tiny):
    config = foresightkv_smollm2.get_config("tiny")
    assert loop.train(from_config(config), tmp_path / "one", lm=tiny).step == 6
    assert [x["step"] for x in metrics.read(tmp_path / "one")] == list(range(1, 7))
    config.learn.update(stage="grpo", steps=3, samples=2)
    with pytest.raises(ConfigError, match=r"learn.start is empty"):
        foresight.Learner(from_config(config), tmp_path, lambda: tiny)
    config.learn.start = str(tmp_path / "one")
    config.policy.block = 32
    with pytest.raises(ConfigError, match="must agree"):
        foresight.Learner(from_config(config), tmp_path, lambda: tiny)
    config.policy.block = 64
    assert loop.train(from_config(config), tmp_path / "two", lm=tiny).step == 3
    first, second = (checkpoint.load_policy(tmp_path / name) for name in ("one", "two"))
    assert first.policy == second.policy
    config.policy.shape = (3, 2, 2, 8)
    with pytest.raises(ConfigError, match="Train one for it"):
        foresight.Learner(from_config(config), tmp_path, lambda: tiny)
