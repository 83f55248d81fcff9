"""KVP's learning rule: rewards by definition, rankings by enumeration, planted importance, whole runs."""

import dataclasses
import functools
import itertools
import os
import signal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from configs import kvp_smollm2
from dcache import checkpoint, metrics, subset
from dcache.errors import ConfigError, LoadError
from dcache.experiment import from_config
from dcache.learn import kvp, loop, traces
from dcache.learn import policy_gradient as pg
from dcache.learn.state import start
from dcache.policies import make

reward_jit = jax.jit(kvp.ranking_reward)
cost_jit = jax.jit(pg.ranking_cost)


def by_definition(importance, order):
    """Sum over the budgets 1 .. n - 1 of minus the importance of what is ranked below."""
    return -sum(importance[order[r]] for b in range(1, len(order)) for r in range(b, len(order)))


def test_reward_over_all_budgets():
    rng = np.random.default_rng(0)
    for _ in range(5):
        importance = rng.exponential(size=17).astype(np.float32) ** 3
        order = rng.permutation(17).astype(np.int32)
        cost = cost_jit(jnp.asarray(importance), jnp.asarray(order))
        np.testing.assert_allclose(-cost, by_definition(importance, order), rtol=1e-5)
        best = by_definition(importance, np.argsort(-importance))
        want = by_definition(importance, order) / abs(best)
        np.testing.assert_allclose(reward_jit(jnp.asarray(importance), jnp.asarray(order)), want, rtol=1e-5)
        # What is no candidate comes last and changes nothing.
        padded = jnp.asarray(np.append(importance, [0, 0, 0]))
        got = reward_jit(padded, jnp.asarray(np.append(order, [19, 17, 18]).astype(np.int32)))
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_the_best_ranking_has_the_best_reward():
    importance = np.asarray([0.3, 2.0, 0.1, 0.0, 0.7], np.float32)
    orders = np.asarray(list(itertools.permutations(range(5))), np.int32)
    rewards = np.asarray(jax.vmap(reward_jit, in_axes=(None, 0))(jnp.asarray(importance), jnp.asarray(orders)))
    assert orders[rewards.argmax()].tolist() == [1, 4, 0, 2, 3]
    assert orders[rewards.argmin()].tolist() == [3, 2, 0, 4, 1]
    np.testing.assert_allclose(rewards.max(), -1.0, rtol=1e-6)
    assert (np.sort(rewards)[-2] < -1.0001).all()  # here no two rankings tie


def test_rewards_where_nothing_can_be_lost():
    order = jnp.asarray([2, 0, 1], jnp.int32)
    assert reward_jit(jnp.zeros(3), order) == 0
    one = jnp.asarray([0.0, 0.0, 5.0])
    assert (
        reward_jit(one, order) == 0 and np.isfinite(reward_jit(one, order[::-1])) and reward_jit(one, order[::-1]) < -1
    )


def test_lost_share():
    importance = jnp.asarray([1.0, 2.0, 3.0, 4.0, 0.0])
    scores, filled = jnp.asarray([4.0, 1.0, 3.0, 2.0, 9.0]), jnp.asarray([True] * 4 + [False])
    lost = [kvp.lost_share(importance, scores, filled, jnp.int32(kept)) for kept in range(5)]
    np.testing.assert_allclose(lost, [1.0, 0.9, 0.6, 0.2, 0.0], atol=1e-6)


def test_probabilities_of_all_rankings():
    scores, filled = jnp.asarray([0.5, -1.0, 2.0, 9.0, 0.1]), jnp.asarray([True, True, True, False, True])
    orders = jnp.asarray([[*p, 3] for p in itertools.permutations((0, 1, 2, 4))], jnp.int32)
    log_prob = jax.jit(jax.vmap(lambda o: subset.log_prob("plackett_luce", scores, o, filled, jnp.int32(4), 5)))
    got = np.exp(np.asarray(log_prob(orders)))
    np.testing.assert_allclose(got.sum(), 1.0, rtol=1e-5)
    weight = np.exp(np.asarray(scores, np.float64))
    for order, probability in zip(np.asarray(orders), got, strict=True):
        want = 1.0
        for r in range(4):
            want *= weight[order[r]] / weight[order[r:4]].sum()
        np.testing.assert_allclose(probability, want, rtol=1e-5)


def test_gradients_are_clipped_agent_by_agent():
    rng = np.random.default_rng(0)
    size = np.asarray([[0.1, 10.0], [1.0, 0.0]])
    grads = {
        "a": rng.normal(size=(2, 2, 3, 4)) * size[..., None, None],
        "b": rng.normal(size=(2, 2, 5)) * size[..., None],
    }
    got = jax.tree.map(np.asarray, kvp.clip_each(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), grads), 2.0))
    for l, k in np.ndindex(2, 2):
        norm = np.sqrt(sum((g[l, k] ** 2).sum() for g in grads.values()))
        for name, g in grads.items():
            np.testing.assert_allclose(got[name][l, k], g[l, k] * min(1.0, 2.0 / max(norm, 1e-9)), rtol=1e-5)


L, K, S, H = 2, 2, 24, 4
POLICY = make("kvp", heads=(L, K), width=H, hidden=16)
CONFIG = kvp.KvpConfig(steps=120, learning_rate=1e-2, warmup_steps=5, samples=6)


@functools.cache
def compiled():
    return jax.jit(functools.partial(kvp.train_step, policy=POLICY, config=CONFIG))


def planted(rng):
    """Keys, values and an importance that grows with one coordinate of the key, another one for each agent."""
    k, v = (rng.normal(size=(L, K, S, H)).astype(ml_dtypes.bfloat16) for _ in range(2))
    by = np.stack([[k[l, h, :, 2 * l + h] for h in range(K)] for l in range(L)]).astype(np.float32)
    count = int(rng.integers(12, S + 1))
    importance = np.where(np.arange(S) < count, np.exp(1.5 * by), 0.0).astype(np.float32)
    return k, v, importance, np.int32(count)


def test_planted_importance_is_learnt():
    rng, key = np.random.default_rng(0), jax.random.key(1)
    state = start(POLICY.init(jax.random.key(0)), CONFIG)
    found = []
    for _ in range(CONFIG.steps):
        state, values = compiled()(state, *planted(rng), key)
        found.append({name: float(value) for name, value in values.items()})

    def mean(name, part):
        return np.mean([values[name] for values in part])

    early, late = found[:10], found[-10:]
    assert all(values["reward"] <= -1 for values in found)
    assert mean("reward", late) > mean("reward", early) + 0.3
    # Random rankings lose three quarters; in the end nearly the least that can be lost.
    assert mean("lost", early) > mean("lost_oracle", early) + 0.1
    assert mean("lost", late) < mean("lost_oracle", late) + 0.05 < mean("lost_keydiff", late) - 0.1


def test_agents_learn_independently():
    k, v, importance, count = planted(np.random.default_rng(3))
    params = jax.tree.map(lambda x: x + 0.1, POLICY.init(jax.random.key(0)))
    other = importance.copy()
    other[0, 1] = importance[0, 1, ::-1] * (importance[0, 1] > 0)
    after = []
    for reward in (importance, other):
        state = start(params, CONFIG)
        for _ in range(2):
            state, _ = compiled()(state, k, v, reward, count, jax.random.key(1))
        after.append(jax.tree.leaves(state.params))
    for one, two in zip(*after, strict=True):
        same = (np.asarray(one) == np.asarray(two)).reshape(L, K, -1).all(-1)
        assert same.tolist() == [[True, False], [True, True]]


@pytest.fixture(scope="module")
def experiment():
    return from_config(kvp_smollm2.get_config("tiny"))


def learnt(folder, experiment):
    template = jax.eval_shape(lambda: start(experiment.policy.init(jax.random.key(0)), experiment.learn))
    return checkpoint.restore(folder / "checkpoints", template, {})[0]


def test_a_whole_run_and_a_resumed_one(tmp_path, monkeypatch, experiment, tiny):
    shared = dataclasses.replace(experiment.learn, folder=str(tmp_path / "traces"))
    experiment = dataclasses.replace(experiment, learn=shared)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert loop.train(experiment, whole, lm=tiny) == loop.Outcome(6, 6, trained=True)
    records = metrics.read(whole)
    assert len(records) == 6 and not (whole / "traces").exists()
    for record in records:
        assert record["reward"] <= -1 and record["lost_oracle"] <= min(record["lost"], record["lost_keydiff"]) + 1e-6
    passes = [sorted(record["prompt"].split(":")[0] for record in records[i : i + 3]) for i in (0, 3)]
    assert passes == [["0", "1", "2"]] * 2  # each pass reads all traces

    write = metrics.Writer.write

    def interrupted(self, at, record):
        write(self, at, record)
        if at == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.Writer, "write", interrupted)
        assert 2 <= loop.train(experiment, parts, lm=tiny).step < 6
    assert loop.train(experiment, parts, resume=True, lm=tiny).step == 6
    jax.tree.map(np.testing.assert_array_equal, learnt(whole, experiment), learnt(parts, experiment))
    assert checkpoint.load_policy(parts).policy == experiment.policy

    # Another seed has other prefixes of the same traces; another amount of text has other traces.
    ours, seeded = (kvp.Learner(dataclasses.replace(experiment, seed=seed), tmp_path, lambda: tiny) for seed in (0, 1))
    assert ours.collect(lambda: False) and seeded.collect(lambda: False)
    assert [ours.prefix(i).name for i in range(6)] != [seeded.prefix(i).name for i in range(6)]
    data = ours.prefix(1).data
    assert data[0].shape[2] >= data[3] and data[3] % 64 == 0 and not data[2][..., data[3] :].any()
    longer = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, length=512))
    with pytest.raises(LoadError, match="differs in length"):
        kvp.Learner(longer, tmp_path, lambda: tiny).collect(lambda: False)


def test_a_run_stopped_while_it_collects(tmp_path, experiment, tiny):
    ours = kvp.Learner(experiment, tmp_path, lambda: tiny)
    assert list(ours.work(0, lambda: True)) == []


def test_refusals(tmp_path, experiment, tiny, monkeypatch):
    with pytest.raises(ConfigError, match="samples is 1"):
        kvp.KvpConfig(samples=1)
    for bad in ({"traces": 0}, {"horizon": -1}, {"block": 0}):
        with pytest.raises(ConfigError, match="traces is .*horizon .*block"):
            kvp.KvpConfig(**bad)
    odd = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, length=400))
    with pytest.raises(ConfigError, match="data.length is 400.*learn.block, 64"):
        kvp.Learner(odd, tmp_path, lambda: tiny)
    ours = kvp.Learner(experiment, tmp_path, lambda: tiny)
    brief = traces.Trace(np.zeros((2, 2, 448, 8)), np.zeros(0), np.zeros(0), 64, "brief", "text")
    with monkeypatch.context() as patch:
        patch.setattr(traces, "read", lambda path: brief)
        with pytest.raises(ConfigError, match="'brief' has 64 tokens, no more than a block of 64; lower learn.block"):
            ours.prefix(0)
    wrong = dataclasses.replace(experiment, policy=make("kvp"))
    with pytest.raises(ConfigError, match="agents for 30 layers"):
        kvp.Learner(wrong, tmp_path, lambda: tiny)
