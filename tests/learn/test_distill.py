"""The learning rule: log-probabilities of decisions, advantages, one update, and that it learns."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import smollm2
from dcache import cache as kv
from dcache import checkpoint, rollout, subset
from dcache.errors import ConfigError
from dcache.experiment import from_config
from dcache.learn import distill
from dcache.learn.distill import DistillConfig
from dcache.load import load
from dcache.policies import make
from tests import naive
from tests.naive import TINY

POLICY = make("distillcache", signals=("pos", "last", "vnorm"), hidden=8)
P, T, S = 32, 8, 40
CONFIG = DistillConfig(
    steps=50, horizon=T, evict_every=4, samples=3, ratios=(0.25, 0.5), minimum=4, learning_rate=0.01, warmup_steps=0
)
MOST = 20
train_jit = jax.jit(distill.train_step, donate_argnums=0, static_argnames=("model_config", "policy", "config", "most"))


@functools.cache
def trajectories():
    """Two prompts of different length with given continuations, the second of which ends after 5 tokens."""
    prompts = [naive.some_tokens(P, seed=1), naive.some_tokens(24, seed=2)]
    _, cache = naive.read(prompts, POLICY.needs, pad=P)
    continuation = jnp.asarray(np.stack([naive.some_tokens(T, seed=s) for s in (3, 4)]))
    weight = np.ones((2, T), np.float32)
    weight[1, 5:] = 0
    return rollout.Trajectories(cache, continuation, jnp.asarray(weight))


def step(state, index=0, config=CONFIG, key=5, text=None):
    return train_jit(
        state, naive.weights(), trajectories() if text is None else text, jnp.int32(index), jax.random.key(key),
        model_config=TINY, policy=POLICY, config=config, most=MOST,
    )  # fmt: skip


def fresh(config=CONFIG):
    return distill.init_state(jax.random.key(0), POLICY, config)


def values(tree):
    """Copies on the host: the state is donated."""
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def decisions(kl, budget=((2, 2), (4, 4)), features=3):
    """A `Decisions` of 2 samples and 2 decisions over 6 slots, of which the last is empty at first."""
    rng = np.random.default_rng(0)
    order = np.stack([[rng.permutation(5) for _ in range(2)] for _ in range(2)])
    order = np.concatenate([order, np.full((2, 2, 1), 5)], axis=-1)
    filled = np.ones((2, 2, 6), bool)
    filled[0, :, 5] = False
    return rollout.Decisions(
        jnp.asarray(rng.normal(size=(2, 2, 6, features)), jnp.float32), jnp.asarray(order, jnp.int32),
        jnp.asarray(filled), jnp.asarray(budget, jnp.int32), jnp.asarray(kl, jnp.float32),
    )  # fmt: skip


KL = [[1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 1.0, 6.0]]
PLAIN = DistillConfig(horizon=4, evict_every=2, samples=2, gamma=0.5, entropy_bonus=0.0)


def test_advantages_by_hand():
    ones, zeros = jnp.ones(4), jnp.zeros((2, 2))
    value, returns = distill.advantages(decisions(KL), ones, zeros, jnp.float32(99.0), PLAIN)
    want = np.asarray([[-(1 + 1 + 0.75 + 0.5), -(3 + 2)], [-(0.5 + 0.25 + 0.75), -(1 + 3)]])
    np.testing.assert_allclose(returns, want)
    np.testing.assert_allclose(value, want - want[::-1], rtol=1e-6)  # minus the mean of the others, here one
    # Tokens after the end of the text have weight 0, whatever their KL.
    wild = np.asarray(KL)
    wild[:, 2:] = 1e6
    _, returns = distill.advantages(decisions(wild), jnp.asarray([1.0, 1, 0, 0]), zeros, jnp.float32(0.0), PLAIN)
    np.testing.assert_allclose(returns, [[-2, 0], [-0.5, 0]])


def test_advantages_with_the_entropy_bonus():
    config = DistillConfig(horizon=4, evict_every=2, samples=2, gamma=0.5, entropy_bonus=0.1)
    log_probs = jnp.asarray([[-8.0, -4.0], [-2.0, -12.0]])
    base, _ = distill.advantages(decisions(KL), jnp.ones(4), log_probs, jnp.float32(0.0), PLAIN)
    value, returns = distill.advantages(decisions(KL), jnp.ones(4), log_probs, jnp.float32(0.0), config)
    surprise = np.asarray([[8 / 2, 4 / 4], [2 / 2, 12 / 4]])  # per kept token: budgets 2 and then 4
    np.testing.assert_allclose(value - base, 0.1 * (surprise - surprise[::-1]), rtol=1e-5)
    np.testing.assert_allclose(returns[0, 1], -5)  # the reported return has no bonus
    direct = DistillConfig(horizon=4, evict_every=2, samples=2, gamma=0.5, entropy_bonus=0.1, entropy_form="direct")
    value, _ = distill.advantages(decisions(KL), jnp.ones(4), log_probs, jnp.float32(0.0), direct)
    np.testing.assert_allclose(value, base)
    # The bonus is a constant: nothing is differentiated through it.
    grad = jax.grad(lambda lp: distill.advantages(decisions(KL), jnp.ones(4), lp, jnp.float32(0.0), config)[0][0, 0])
    np.testing.assert_array_equal(grad(log_probs), 0)


def test_one_sample_uses_the_moving_average():
    config = DistillConfig(horizon=4, evict_every=2, samples=1, gamma=0.5, entropy_bonus=0.0)
    one = jax.tree.map(lambda x: x, decisions(KL))
    one = rollout.Decisions(one.features[:, :1], one.order[:, :1], one.filled[:, :1], one.budget[:, :1], one.kl[:1])
    value, _ = distill.advantages(one, jnp.ones(4), jnp.zeros((1, 2)), jnp.float32(-2.0), config)
    np.testing.assert_allclose(value, [[-3.25 + 2, -5 + 2]])


def test_standardised_advantages():
    config = DistillConfig(horizon=4, evict_every=2, samples=2, gamma=0.5, entropy_bonus=0.0, standardise=True)
    value, _ = distill.advantages(decisions(KL), jnp.ones(4), jnp.zeros((2, 2)), jnp.float32(0.0), config)
    np.testing.assert_allclose(value, [[-1, -1], [1, 1]], rtol=1e-5)
    same, _ = distill.advantages(decisions([KL[0], KL[0]]), jnp.ones(4), jnp.zeros((2, 2)), jnp.float32(0.0), config)
    np.testing.assert_array_equal(same, 0)  # equal rewards teach nothing, and do not divide by zero


@pytest.mark.parametrize("law", subset.LAWS)
def test_decision_log_probs(law):
    params = jax.tree.map(lambda x: x + 0.3, POLICY.init(jax.random.key(0)))
    rolled = decisions(KL)
    got = distill.decision_log_probs(POLICY, params, rolled, law, 4)
    assert got.shape == (2, 2)
    scores = np.asarray(POLICY.scores_of(params, rolled.features), np.float64)
    for a in range(2):
        for d in range(2):
            left = [i for i in np.asarray(rolled.order[d, a]) if rolled.filled[d, a, i]]
            budget, s = int(rolled.budget[d, a]), scores[d, a]
            if law == "plackett_luce":
                want = sum(s[left[i]] - np.log(np.exp(s[left[i:]]).sum()) for i in range(budget))
            else:
                z = sum(np.exp(sum(s[i] for i in c)) for c in itertools.combinations(left, budget))
                want = s[left[:budget]].sum() - np.log(z)
            assert float(got[a, d]) == pytest.approx(want, abs=1e-4)


def test_update_is_deterministic_and_moves_every_weight():
    before = values(fresh().params)
    runs = []
    for _ in range(2):
        state = fresh()
        for index in (0, 1):
            state, metrics = step(state, index)
        runs.append((values(state), {k: float(v) for k, v in metrics.items()}))
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        np.testing.assert_array_equal(a, b)
    assert runs[0][1] == runs[1][1]
    assert all(np.abs(a - b).max() > 0 for a, b in zip(values(state.params), before, strict=True))
    other, _ = step(fresh(), key=6)
    once, _ = step(fresh(), key=5)
    assert any(not np.array_equal(a, b) for a, b in zip(values(other.params), values(once.params), strict=True))


@pytest.mark.parametrize("decay", [0.0, 0.6])
def test_what_is_saved_is_the_mean_of_the_weights_and_then_their_moving_average(decay):
    config = dataclasses.replace(CONFIG, average=decay)
    state, want = fresh(config), None
    for i in range(4):
        state, _ = step(state, i % 2, config)
        kept = min(decay, i / (i + 1))
        new = values(state.params)
        want = new if want is None else [kept * old + (1 - kept) * n for old, n in zip(want, new, strict=True)]
        for a, b in zip(values(state.average), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_metrics():
    state, history = fresh(), []
    for _ in range(12):
        state, metrics = step(state)
        assert all(np.isfinite(v) and v.dtype == jnp.float32 and v.shape == () for v in metrics.values())
        history.append({k: float(v) for k, v in metrics.items()})
    assert int(state.step) == 12
    assert {h["ratio"] for h in history} == {0.25, 0.5}  # a budget is drawn for each step
    assert all(h["kl"] > 0 and h["kl_deviation"] >= 0 and h["reward"] < 0 and h["surprise"] > 0 for h in history)
    assert history[0]["grad_norm"] > 0
    average = history[0]["reward"]
    for h in history:  # the first return starts the moving average
        average = average if h is history[0] else 0.95 * average + 0.05 * h["reward"]
        assert h["baseline"] == pytest.approx(average, rel=1e-4)


EXACT = dataclasses.replace(CONFIG, ratios=(0.5,), entropy_bonus=0.0, clip_norm=1e9, gamma=0.9)


def test_first_step_by_definition():
    # The gradient of one step, from the students themselves: leave-one-out advantages times score functions.
    config = EXACT
    state = fresh(config)
    params = jax.tree.map(jnp.copy, state.params)
    _, metrics = step(state, 1, config)
    _, key = jax.random.split(jax.random.fold_in(jax.random.key(5), 0))
    text = trajectories()
    cache, continuation = kv.select(text.cache, jnp.int32(1)), text.continuation[1]
    teacher = jax.jit(rollout.teacher_log_probs, static_argnums=1)(naive.weights(), TINY, cache, continuation)
    rolled = jax.jit(rollout.sample_students, static_argnums=(1, 2),
                     static_argnames=("samples", "evict_every", "law", "minimum", "most"))(
        naive.weights(), TINY, POLICY, params, cache, continuation, teacher, jnp.float32(0.5), key,
        samples=3, evict_every=4, law="plackett_luce", minimum=4, most=MOST,
    )  # fmt: skip
    kl = np.asarray(rolled.kl)
    counted = kl[:, :5]
    reward = [[-sum(0.9 ** (t - d) * k[t] for t in range(d, 5)) for d in (0, 4)] for k in kl]
    assert float(metrics["kl"]) == pytest.approx(counted.mean(), rel=1e-4)
    assert float(metrics["kl_deviation"]) == pytest.approx(counted.mean(1).std(), rel=1e-3)
    assert float(metrics["reward"]) == pytest.approx(np.mean(reward, 0)[0], rel=1e-4)
    advantage = np.asarray([[reward[a][d] - np.mean([reward[b][d] for b in range(3) if b != a]) for d in (0, 1)]
                            for a in range(3)])  # fmt: skip

    def objective(p):
        return jnp.mean(jnp.sum(distill.decision_log_probs(POLICY, p, rolled, "plackett_luce", MOST)
                                * jnp.asarray(advantage, jnp.float32), axis=1))  # fmt: skip

    want = optax.tree.norm(jax.jit(jax.grad(objective))(params))
    assert float(metrics["grad_norm"]) == pytest.approx(float(want), rel=1e-3)


def test_nothing_counts_after_the_end_of_the_text():
    text, config = trajectories(), EXACT
    over = rollout.Trajectories(text.cache, text.continuation, jnp.zeros_like(text.weight))
    _, metrics = step(fresh(config), 0, config, text=over)
    assert float(metrics["grad_norm"]) == 0 and float(metrics["kl"]) == 0 and float(metrics["reward"]) == 0
    # And the tokens after the end cannot matter.
    other = text.continuation.at[1, 6:].set(1)
    a, b = (step(fresh(config), 1, config, text=rollout.Trajectories(text.cache, c, text.weight))[1]
            for c in (text.continuation, other))  # fmt: skip
    assert float(a["grad_norm"]) == pytest.approx(float(b["grad_norm"]), rel=1e-5) and float(a["grad_norm"]) > 0


def test_state_is_donated():
    # Warnings are errors here: a buffer that could not be reused would fail the test.
    state = fresh()
    leaves = jax.tree.leaves(state)
    step(state)
    assert all(leaf.is_deleted() for leaf in leaves)
    # Neither the model nor the prompts are.
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((naive.weights(), trajectories())))


@pytest.mark.parametrize("law, form, samples", [("subset", "score", 2), ("paper", "direct", 1)])
def test_other_laws_forms_and_one_sample(law, form, samples):
    config = dataclasses.replace(CONFIG, evict_every=0, samples=samples, law=law, entropy_form=form)
    state, metrics = step(fresh(config), config=config)
    assert all(np.isfinite(float(v)) for v in metrics.values())
    assert float(metrics["grad_norm"]) > 0 and all(np.isfinite(v).all() for v in values(state))
    assert float(metrics["baseline"]) == pytest.approx(float(metrics["reward"]))


def test_learns_a_strong_signal():
    # New tokens see the last 8 positions only, and 8 of 32 tokens may stay: keeping the most recent costs nothing.
    windowed = dataclasses.replace(TINY, sliding_window=8)
    policy = make("distillcache", signals=("pos", "vnorm"), hidden=8)
    config = DistillConfig(steps=60, horizon=4, evict_every=0, samples=8, ratios=(0.25,), minimum=4, learning_rate=0.02,
                           warmup_steps=0)  # fmt: skip
    _, cache = naive.read([naive.some_tokens(P, seed=1)], policy.needs, windowed)
    text = rollout.Trajectories(cache, jnp.asarray(naive.some_tokens(4, seed=3))[None], jnp.ones((1, 4)))
    for seed in range(3):
        state, kl = distill.init_state(jax.random.key(seed), policy, config), []
        for _ in range(60):
            state, metrics = train_jit(
                state, naive.weights(windowed), text, jnp.int32(0), jax.random.key(seed), model_config=windowed,
                policy=policy, config=config, most=8,
            )  # fmt: skip
            kl.append(float(metrics["kl"]))
        assert np.mean(kl[-10:]) < 0.2 * np.mean(kl[:10]), seed


@pytest.mark.parametrize(
    "bad, says",
    [
        ({"law": "gumbel"}, "gumbel"), ({"horizon": 10, "evict_every": 3}, "multiple"), ({"samples": 0}, "samples"),
        ({"ratios": ()}, "ratios"), ({"ratios": (0.5, 1.5)}, "ratios"), ({"ratios": (0.0,)}, "ratios"),
        ({"entropy_form": "both"}, "entropy_form"), ({"steps": 10, "warmup_steps": 10}, "warmup_steps"),
        ({"warmup_steps": -1}, "warmup_steps"), ({"steps": 0}, "steps is 0"), ({"estimator": "soft"}, "estimator"),
        ({"estimator": "relaxed", "evict_every": 2, "horizon": 8}, "evicts once"),
        ({"temperature": 0.1}, "final_temperature"), ({"final_temperature": 0.0}, "final_temperature"),
        ({"average": 1.0}, "average"),
        ({"question": "asked", "evict_every": 0}, "'seen', 'hidden' or 'both'"),
        ({"question": "hidden", "evict_every": 8, "horizon": 8}, "with one eviction"),
    ],
)  # fmt: skip
def test_config_refusals(bad, says):
    with pytest.raises(ConfigError, match=says):
        DistillConfig(**bad)


RELAXED = DistillConfig(
    estimator="relaxed", steps=40, horizon=T, evict_every=0, ratios=(0.25,), minimum=4, learning_rate=0.02, warmup_steps=0,
    temperature=2.0, final_temperature=0.5,
)  # fmt: skip


def relaxed_step(policy, state, index, config):
    return train_jit(
        state, naive.weights(), relaxed_text(policy), jnp.int32(index), jax.random.key(5),
        model_config=TINY, policy=policy, config=config, most=MOST,
    )  # fmt: skip


@functools.cache
def relaxed_text(policy):
    prompts = [naive.some_tokens(P, seed=1), naive.some_tokens(24, seed=2)]
    _, cache = naive.read(prompts, policy.needs, pad=P)
    cache = policy.observe((), naive.weights(), TINY, cache, None, None)
    return dataclasses.replace(trajectories(), cache=cache)


@pytest.mark.parametrize("granularity, scope", [("sequence", "head"), ("layer", "head"), ("head", "model")])
def test_the_relaxed_estimator_learns(granularity, scope):
    heads = (TINY.num_layers, TINY.num_kv_heads) if granularity == "head" else ()
    policy = make("distillcache", signals=("pos", "last", "vnorm"), hidden=8, granularity=granularity, scope=scope,
                  heads=heads)  # fmt: skip
    state, history = distill.init_state(jax.random.key(0), policy, RELAXED), []
    for _ in range(40):
        state, metrics = relaxed_step(policy, state, 0, RELAXED)
        assert set(metrics) == {"reward", "kl", "temperature", "ratio", "grad_norm", "baseline"}
        history.append({k: float(v) for k, v in metrics.items()})
    assert min(h["kl"] for h in history[-10:]) < 0.8 * history[0]["kl"]
    assert history[0]["temperature"] == 2.0 and history[20]["temperature"] == pytest.approx(1.0)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_what_reads_hidden_states_learns_at_its_own_rate(rate):
    policy = make("distillcache", signals=("pos", "last"), hidden=8, granularity="head", scope="model",
                  heads=(TINY.num_layers, TINY.num_kv_heads), reads=(TINY.embed_dim, 5), prior=(0.0, 0.0, 1.0))  # fmt: skip
    config = dataclasses.replace(RELAXED, reader_rate=rate, weight_decay=0.0)
    state = before = distill.init_state(jax.random.key(0), policy, config)
    before = jax.tree.map(np.asarray, before.params["reader"])
    history = []
    for _ in range(40):
        state, metrics = relaxed_step(policy, state, 0, config)
        history.append(float(metrics["kl"]))
    moved = max(
        np.abs(x - y).max() for x, y in zip(*map(jax.tree.leaves, (before, state.params["reader"])), strict=True)
    )
    assert moved == 0 if rate == 0 else 0.001 < moved < 0.2
    assert min(history[-10:]) < 0.8 * history[0]


def test_starting_from_a_kvzap(tmp_path):
    lm = load("tiny")
    shape, width = (lm.config.num_layers, lm.config.num_kv_heads), lm.config.embed_dim
    base = from_config(smollm2.get_config("tiny"))
    zap = make("kvzap", heads=shape, width=width, hidden=5)
    weights = jax.tree.map(lambda x: x + 0.5, zap.init(jax.random.key(3)))
    checkpoint.save_policy(tmp_path / "zap", zap, weights, {})

    def learner(reads):
        policy = make("distillcache", signals=("pos",), granularity="head", heads=shape, reads=reads)
        config = DistillConfig(estimator="relaxed", evict_every=0, start=str(tmp_path / "zap"))
        return distill.Learner(dataclasses.replace(base, policy=policy, learn=config), tmp_path, lambda: lm)

    made = learner((width, 5))
    jax.tree.map(np.testing.assert_array_equal, made.init(jax.random.key(0)).params["reader"], weights)
    assert made.identity["start"] == checkpoint.weights_digest(weights)
    with pytest.raises(ConfigError, match="learn.start holds KVzap"):
        learner((width, 6))
    with pytest.raises(ConfigError, match="policy.reads is \\(\\)"):
        learner(())


def test_the_relaxed_loss_counts_the_tokens_of_the_text_only():
    policy = make("distillcache", signals=("pos",), hidden=8)
    state = distill.init_state(jax.random.key(0), policy, RELAXED)
    text = relaxed_text(policy)
    cache = kv.select(text.cache, jnp.int32(1))
    teacher = jax.jit(rollout.teacher_log_probs, static_argnums=1)(naive.weights(), TINY, cache, text.continuation[1])
    kl = jax.jit(rollout.relaxed_student, static_argnums=(1, 2), static_argnames=("straight_through", "minimum"))(
        naive.weights(), TINY, policy, state.params, cache, text.continuation[1], teacher, jnp.float32(0.25),
        jnp.float32(2.0), straight_through=True, minimum=4,
    )  # fmt: skip
    _, metrics = relaxed_step(policy, state, 1, RELAXED)
    counted = np.asarray(kl)[:5]
    assert float(metrics["kl"]) == pytest.approx(counted.mean(), rel=1e-4)
    assert float(metrics["reward"]) == pytest.approx(-sum(0.99**t * k for t, k in enumerate(counted)), rel=1e-4)


def test_config_defaults_are_the_papers():
    config = DistillConfig()
    assert (config.steps, config.gamma, config.entropy_bonus, config.minimum) == (10_000, 0.99, 0.01, 32)
    assert (config.learning_rate, config.warmup_steps, config.clip_norm) == (3e-4, 500, 1.0)
    assert config.ratios == (0.5, 0.25, 0.125) and config.evict_every == 1
    assert hash(config) == hash(DistillConfig())


# ---------------------------------------------------------------------------------------------------------------------
# Learning from the attention of the text to come


def test_rewards_of_a_ranking_by_enumeration():
    share = np.asarray([0.4, 0.1, 0.3, 0.2, 0.0], np.float32)  # the last is padding
    orders = np.asarray([[*p, 4] for p in itertools.permutations(range(4))], np.int32)
    rank = np.argsort(orders, axis=1)
    for budget in range(1, 5):
        got = distill.kept_share(jnp.asarray(rank), jnp.asarray(share), jnp.int32(budget))
        np.testing.assert_allclose(got, [share[o[:budget]].sum() for o in orders], rtol=1e-6)
    got = np.asarray(distill.ranking_reward(jnp.asarray(orders), jnp.asarray(share), jnp.int32(4)))
    want = [np.mean([share[o[:b]].sum() for b in range(1, 5)]) for o in orders]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert orders[got.argmax()].tolist()[:4] == [0, 2, 3, 1]


def test_pairwise_loss():
    scores = np.asarray([1.0, -0.5, 2.0, 0.3], np.float32)
    better, worse = np.asarray([1, 0, 1, 0], bool), np.asarray([0, 1, 0, 0], bool)
    want = np.mean([np.log1p(np.exp(scores[1] - scores[i])) for i in (0, 2)])
    assert np.isclose(distill.pairwise_loss(*map(jnp.asarray, (scores, better, worse))), want)
    assert distill.pairwise_loss(jnp.asarray(scores), jnp.asarray(better), jnp.zeros(4, bool)) == 0


@pytest.mark.parametrize("settings", [{"estimator": "ranker"}, {"reward": "contribution"}, {"reward": "ranking"}])
def test_foreseen_attention_is_learnt(settings):
    """The text to come looks at tokens of large values, which one of the signals tells."""
    policy = make("distillcache", signals=("vnorm", "pos"), hidden=8)
    config = DistillConfig(
        steps=80, horizon=T, evict_every=0, samples=8, ratios=(0.5,), minimum=4, learning_rate=0.02, warmup_steps=0,
        entropy_bonus=0.0, **settings,
    )  # fmt: skip
    text = trajectories()
    large = text.cache.layers.value_norm > jnp.median(text.cache.layers.value_norm)
    future = large.astype(jnp.float32).mean(axis=(0, 2)) ** 4
    spread = jnp.broadcast_to(future[None, :, None], (TINY.num_layers, 2, TINY.num_heads, P))
    text = dataclasses.replace(text, cache=kv.with_extra(text.cache, "future", spread))
    state, rewards = distill.init_state(jax.random.key(0), policy, config), []
    for _ in range(80):
        state, metrics = train_jit(
            state, naive.weights(), text, jnp.int32(0), jax.random.key(5), model_config=TINY, policy=policy, config=config,
            most=MOST,
        )  # fmt: skip
        rewards.append(float(metrics["reward"]))
    assert "kl" not in metrics and ("loss" in metrics) == (config.estimator == "ranker")
    assert np.mean(rewards[-10:]) > np.mean(rewards[:5]) + 0.08 and np.mean(rewards[-10:]) <= 1.0


@pytest.mark.parametrize(
    "bad, says",
    [
        ({"reward": "accuracy"}, "reward is 'accuracy'"), ({"reward": "ranking", "estimator": "relaxed"}, "only 'reinforce'"),
        ({"reward": "ranking", "evict_every": 8}, "evicts once"), ({"estimator": "ranker", "evict_every": 8}, "evicts once"),
        ({"reward": "contribution", "samples": 1}, "each other's baseline"),
    ],
)  # fmt: skip
def test_foresight_refusals(bad, says):
    with pytest.raises(ConfigError, match=says):
        DistillConfig(**{"evict_every": 0, **bad})
