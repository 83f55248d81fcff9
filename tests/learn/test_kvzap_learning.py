import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import kvzap_smollm2
from dcache import cache as kv
from dcache import checkpoint, metrics
from dcache.attention import StatsRequest
from dcache.errors import ConfigError
from dcache.experiment import from_config
from dcache.learn import kvzap, loop
from dcache.learn.state import start
from dcache.policies import make
from dcache.policies.kvzap import predict
from dcache.rollout import Trajectories
from tests import naive
from tests.naive import TINY

L, K, D = TINY.num_layers, TINY.num_kv_heads, TINY.embed_dim
step_jit = jax.jit(kvzap.train_step, static_argnames=("model_config", "policy", "config"))


def test_a_planted_score_is_learnt_and_the_metrics_are_what_they_say():
    policy = make("kvzap", heads=(L, K), width=D, hidden=0)
    config = kvzap.KVzapConfig(steps=150, learning_rate=0.03, warmup_steps=5)
    texts = [naive.some_tokens(40, seed=1), naive.some_tokens(29, seed=2)]
    _, cache = naive.read(texts, StatsRequest(hidden=True), pad=40)
    truth = jax.random.normal(jax.random.key(3), (L, D, K)) * 0.3
    log_score = predict({"out": truth, "bias": jnp.zeros((L, K))}, cache.hidden)
    group = jnp.exp(jnp.minimum(log_score, -0.01))
    # Query heads of one key/value head: the score is their maximum.
    by_query = jnp.stack([group, 0.5 * group], axis=3).reshape(L, 2, K * 2, 40)
    cache = kv.with_extra(cache, "reread", by_query)
    text = Trajectories(cache, jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1)))
    state = start(policy.init(jax.random.key(0)), config)
    static = {"model_config": TINY, "policy": policy, "config": config}
    state, first = step_jit(state, None, text, jnp.int32(1), jax.random.key(0), **static)
    filled = np.asarray(kv.positions(cache))[:, 1] >= 0
    target = np.log(np.maximum(np.asarray(group)[:, 1], 1e-6))
    assert np.isclose(first["loss"], ((target + 6) ** 2)[filled].mean(), rtol=1e-4)
    within = np.mean([target[l, k, :29].var() for l in range(L) for k in range(K)])
    assert np.isclose(first["explained"], 1 - float(first["loss"]) / within, rtol=1e-3)
    for i in range(149):
        state, last = step_jit(state, None, text, jnp.int32(i % 2), jax.random.key(0), **static)
    assert float(last["loss"]) < 0.1 * float(first["loss"]) and float(last["overlap"]) > 0.8 > float(first["overlap"])


def test_a_run(tmp_path):
    experiment = from_config(kvzap_smollm2.get_config("tiny"))
    assert loop.train(experiment, tmp_path / "whole").step == 6
    learner = kvzap.Learner(experiment, tmp_path, lambda: loop.load("tiny"))
    assert learner.observers()[0].name == "kvzip" and learner.horizon == 1
    trained = checkpoint.load_policy(tmp_path / "whole")
    assert trained.policy == experiment.policy and float(jnp.abs(trained.params["out"]).max()) > 0
    wrong = dataclasses.replace(experiment, policy=dataclasses.replace(experiment.policy, width=576))
    with pytest.raises(ConfigError, match="width 576; the model has 2 of 2 and width 32"):
        loop.train(wrong, tmp_path / "wrong")
    assert {"loss", "explained", "overlap"} <= metrics.read(tmp_path / "whole")[0].keys()
