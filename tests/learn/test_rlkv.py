"""RLKV's learning: its gradient, rewards, the penalty, questions, and one run."""

import dataclasses
import functools
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import rlkv_smollm2
from dcache import checkpoint, metrics
from dcache.data.prompts import Prompt
from dcache.errors import ConfigError
from dcache.experiment import from_config
from dcache.learn import loop, rlkv
from dcache.learn import policy_gradient as pg
from dcache.learn.gated import answer_log_probs
from dcache.learn.rlkv import RLKVConfig
from tests import naive
from tests.naive import TINY

L, K = TINY.num_layers, TINY.num_kv_heads
P, A, T = 24, 3, 4
LOCAL = {"sinks": 2, "recent": 5}


def answers():
    return np.stack([naive.some_tokens(T, seed=s) for s in range(A)])


def test_gradient_against_finite_differences():
    gates = np.random.default_rng(1).uniform(0.2, 0.8, (L, K)).astype(np.float32)
    prompt, length, rewards = naive.some_tokens(P, seed=9), jnp.int32(P), jnp.asarray([1.0, 0.0, 0.0])
    weight = np.ones((A, T), np.float32)
    weight[1, 2:] = 0
    config = RLKVConfig(samples=A, horizon=T, clip=1e9, **LOCAL)
    log_probs_jit = jax.jit(answer_log_probs, static_argnums=1, static_argnames=("sinks", "recent"))
    old = log_probs_jit(naive.weights(), TINY, gates, prompt, length, answers(), **LOCAL)
    loss = jax.jit(jax.value_and_grad(functools.partial(rlkv.question_loss, model_config=TINY, config=config)))

    def at(gates):
        value, grads = loss(
            {"gates": jnp.asarray(gates)}, naive.weights(), prompt, length, answers(), old, weight, rewards
        )
        return float(value), np.asarray(grads["gates"])

    # By hand: the ratio is 1, so the loss is minus the mean advantage.
    advantage = np.asarray([2.0, -1.0, -1.0]) / np.sqrt(2)
    value, got = at(gates)
    np.testing.assert_allclose(value, -advantage.mean(), atol=1e-5)
    for index in np.ndindex(L, K):
        step = np.zeros((L, K), np.float32)
        step[index] = 0.02
        want = (at(gates + step)[0] - at(gates - step)[0]) / 0.04
        assert got[index] == pytest.approx(want, rel=0.03, abs=2e-4)
    assert np.abs(got).max() > 1e-3


def test_counted_tokens():
    got = rlkv.counted(np.asarray([[5, 1, 9, 9], [1, 2, 1, 3], [4, 4, 4, 4]]), (1, 2))
    np.testing.assert_array_equal(got, [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]])


def test_penalty_only_above_the_threshold():
    config = RLKVConfig()
    got = [float(rlkv.penalty_weight(jnp.float32(r), config)) for r in (0.0, 0.5, 0.51, 1.0)]
    np.testing.assert_allclose(got, [0, 0, 1e-3 * (np.exp(0.51) - 1), 1e-3 * (np.e - 1)], rtol=1e-5)


@pytest.mark.parametrize("reward,first", [(0.5, 0.6), (0.75, 0.5)])
def test_one_update_by_hand(reward, first):
    # Adam's first step is the learning rate against the gradient's sign: the penalty closes gates, the question opens one.
    config = RLKVConfig(steps=5, learning_rate=0.1, penalty=0.1)
    gates = jnp.asarray([[0.6, 0.95], [0.05, 1.0]])
    state = rlkv.start({"gates": gates}, config)
    grads = {"gates": jnp.asarray([[0.0, -1.0], [1.0, 0.0]])}
    new, values = rlkv.finish_step(state, grads, jnp.float32(0.2), jnp.float32(reward), jnp.float32(1.0), config=config)
    last = 1.0 if reward == 0.5 else 0.9
    np.testing.assert_allclose(new.params["gates"], [[first, 1.0], [0.0, last]], atol=1e-4)  # within [0, 1]
    np.testing.assert_array_equal(new.average["gates"], new.params["gates"])
    assert values["open"] == 0.75 if first > 0.55 else values["open"] <= 0.75
    assert int(new.step) == 1 and float(values["reward"]) == reward


def test_group_advantages_by_hand():
    np.testing.assert_allclose(
        pg.group_advantages(jnp.asarray([1.0, 0, 0, 0])), np.asarray([3, -1, -1, -1]) / np.sqrt(3), rtol=1e-4
    )
    np.testing.assert_array_equal(pg.group_advantages(jnp.ones(4)), 0)


def test_clipped_surrogate_by_hand():
    old = jnp.log(jnp.asarray([0.2, 0.2, 0.2, 0.2]))
    new = jnp.log(jnp.asarray([0.2, 0.3, 0.1, 0.3]))
    advantage = jnp.asarray([2.0, 1.0, -1.0, -1.0])
    # Ratios 1, 1.5, 0.5, 1.5: gains are cut at 1.2 and 0.8, a loss is not.
    np.testing.assert_allclose(pg.clipped_surrogate(new, old, advantage, 0.2), [2.0, 1.2, -0.8, -1.5], rtol=1e-5)
    grad = jax.grad(lambda x: jnp.sum(pg.clipped_surrogate(x, old, advantage, 0.2)))
    np.testing.assert_allclose(grad(new), [2.0, 0.0, 0.0, -1.5], rtol=1e-5)
    np.testing.assert_allclose(grad(old), advantage, rtol=1e-5)  # at a ratio of 1 it is REINFORCE


@pytest.fixture(scope="module")
def experiment():
    return from_config(rlkv_smollm2.get_config("tiny"))


def test_questions_and_rewards(experiment, tiny, tmp_path):
    ours = rlkv.Learner(experiment, tmp_path, lambda: tiny)
    again = rlkv.Learner(experiment, tmp_path, lambda: tiny)
    prompts = [ours.questions[i] for i in range(12)]
    assert [p.name for p in prompts] == [again.questions[i].name for i in range(12)]
    sums = [p for p in prompts if p.task == "arithmetic"]
    assert 0 < len(sums) < 12 and all(p.answers for p in prompts)
    for p in sums:
        assert int(p.answers[0]) == eval(p.name.split(":")[1])
    assert rlkv.Questions((), tiny.tokenizer, 1.0, 1)[0].name != rlkv.Questions((), tiny.tokenizer, 1.0, 0)[0].name

    question = Prompt(np.zeros(1, np.int32), "retrieval", np.zeros(0, np.int32), ("42",), "q", "arithmetic")
    texts = ["It is 42.", "43", "420", "42"]
    rows = [tiny.tokenizer.encode(text) for text in texts]
    drawn, weight = np.zeros((4, 12), np.int32), np.zeros((4, 12), np.float32)
    for i, row in enumerate(rows):
        drawn[i, : len(row)], weight[i, : len(row)] = row, 1
    weight[3, 1:] = 0  # cut before the end of the number
    np.testing.assert_array_equal(ours.reward(question, drawn, weight), [1, 0, 0, 0])


def test_the_pool_holds_what_the_model_can_answer(experiment, tiny, tmp_path, monkeypatch):
    # "Right" are here the questions of even number, all samples but one, which is more than half.
    calls = []

    def reward(self, prompt, answers, weight):
        calls.append(prompt.name)
        return np.asarray([0, 1, 1, 1], np.float32) * (int(prompt.name.split(":")[0]) % 2 == 0)

    monkeypatch.setattr(rlkv.Learner, "reward", reward)
    learn = dataclasses.replace(experiment.learn, pool=3)
    pooled = dataclasses.replace(experiment, learn=learn)
    ours = rlkv.Learner(pooled, tmp_path, lambda: tiny)
    assert json.loads((tmp_path / rlkv.QUESTIONS).read_text())["questions"] == [0, 2, 4] and len(calls) == 6
    rounds = [[ours.prompt(i).name.split(":")[0] for i in range(first, first + 3)] for first in range(0, 30, 3)]
    assert all(sorted(names) == ["0", "2", "4"] for names in rounds) and len(set(map(tuple, rounds))) > 1
    again = rlkv.Learner(pooled, tmp_path, lambda: tiny)
    assert len(calls) == 6 and again.prompt(7).name == ours.prompt(7).name
    rlkv.Learner(dataclasses.replace(pooled, seed=1), tmp_path, lambda: tiny)
    assert len(calls) > 6  # those of another seed are no use
    monkeypatch.setattr(rlkv.Learner, "reward", lambda self, prompt, answers, weight: np.zeros(4, np.float32))
    few = dataclasses.replace(experiment, learn=dataclasses.replace(learn, pool=1))
    with pytest.raises(ConfigError, match="answers only 0 of 20 questions"):
        rlkv.Learner(few, tmp_path / "other", lambda: tiny)


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"data": {"retrieval": 0.5}}, "retrieval is 0.5"),
        ({"teacher_batch": 3}, "questions is 4, no multiple of teacher_batch = 3"),
        ({"policy": {"heads": (3, 2)}}, "gates for 3 layers of 2.*model has 2 of 2"),
        ({"data": {"length": 131070}}, "exceed the 131072 positions"),
    ],
)
def test_what_cannot_be_trained(experiment, tiny, tmp_path, fields, message):
    changed = {
        name: dataclasses.replace(getattr(experiment, name), **value) if isinstance(value, dict) else value
        for name, value in fields.items()
    }
    with pytest.raises(ConfigError, match=message):
        rlkv.Learner(dataclasses.replace(experiment, **changed), tmp_path, lambda: tiny)


@pytest.mark.parametrize("bad", [{"samples": 1}, {"recent": 0}, {"arithmetic": 2.0}, {"clip": 0.0}])
def test_bad_settings(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        RLKVConfig(**bad)


def test_a_resumed_run_is_the_same_run(tmp_path, monkeypatch, experiment, tiny):
    # Smaller embeddings: otherwise the model is sure of every token, and all samples are the same.
    lm = dataclasses.replace(tiny, params=tiny.params | {"embed": 0.1 * tiny.params["embed"]})
    # A random model is never right: rewards by the parity of the first token, so that there is something to learn.
    monkeypatch.setattr(
        rlkv.Learner, "reward", lambda self, prompt, answers, weight: (answers[:, 0] % 2).astype(np.float32)
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert loop.train(experiment, whole, lm=lm) == loop.Outcome(4, 4, trained=True)
    write = metrics.Writer.write

    def interrupt(self, at, record):
        write(self, at, record)
        if at == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.Writer, "write", interrupt)
        assert loop.train(experiment, parts, lm=lm).step < 4
    assert loop.train(experiment, parts, resume=True, lm=lm) == loop.Outcome(4, 4, trained=True)
    one, other = checkpoint.load_policy(whole), checkpoint.load_policy(parts)
    assert one.policy == experiment.policy and one.params["gates"].shape == (L, K)
    np.testing.assert_array_equal(one.params["gates"], other.params["gates"])
    assert (np.asarray(one.params["gates"]) < 1).any()
    records = metrics.read(whole)
    assert all({"loss", "reward", "taught", "penalty", "gate", "open"} <= r.keys() for r in records)
    assert max(r["taught"] for r in records) > 0
