"""Training, evaluation and generation on eight devices give the numbers of one, and hold nothing large twice."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from configs import smollm2 as smollm2_config
from dcache import sharding
from dcache.config import PRESETS
from dcache.data.prompts import Prompt
from dcache.evaluate import fidelity
from dcache.experiment import from_config
from dcache.generate import generate
from dcache.learn import distill
from dcache.load import LanguageModel, load
from dcache.model import init_params
from dcache.policies import make
from dcache.policies.base import Trained
from dcache.tokenizer import ByteTokenizer

SPLIT = "data=2,tensor=2,sequence=2"


def close(found, wanted, rtol=1e-5):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=1e-5), found, wanted)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    words = "the river stone of a lamp and boat under to quiet hill wind from with old tree garden by morning".split()
    for name in "abcdef":
        sentences = [" ".join(rng.choice(words, rng.integers(6, 14))).capitalize() + "." for _ in range(200)]
        (folder / f"{name}.txt").write_text("\n\n".join(" ".join(sentences[i : i + 5]) for i in range(0, 200, 5)))
    return folder


def trained_for(experiment, mesh, tmp_path, steps=2):
    """State and metrics after some updates, and the compiled update."""
    lm = load("tiny", sharding=mesh)
    with sharding.on(lm.mesh):
        learner = distill.Learner(experiment, tmp_path, lambda: lm)
        start, found = jax.jit(learner.init), []
        state = start(jax.random.key(1)) if lm.mesh is None else start(
            jax.device_put(jax.random.key(1), sharding.replicated(lm.mesh))
        )  # fmt: skip
        for work in learner.work(0, lambda: False):
            if mesh != "none" and not found:
                assert work.data[0].cache.layers.k.sharding.spec[1] in ("data", ("data", "fsdp"))
                program = learner.compiled.lower(state, lm.params, *work.data, jax.random.key(2)).compile().as_text()
                check_nothing_large_is_whole(program, lm, work.data[0].cache)
            state, values = learner.update(state, work, jax.random.key(2))
            found.append(jax.device_get(values))
            if len(found) == steps:
                break
    return jax.device_get(state), found


def check_nothing_large_is_whole(program, lm, cache):
    """No array of one device's program has the shape of the whole cache, of one prompt's, or of a weight of all layers."""
    layers, batch, heads, slots, width = cache.layers.k.shape
    whole = [(layers, batch, heads, slots, width), (layers, 1, heads, slots, width)]
    whole += [lm.params["layers"][name].shape for name in ("q", "o", "gate", "down")]

    def written(shape):
        return f"f32[{','.join(map(str, shape))}]"

    assert written(cache.layers.k.sharding.shard_shape(cache.layers.k.shape)) in program  # shapes are written like this
    assert not [shape for shape in whole if written(shape) in program]


@pytest.mark.slow  # the compiler needs most of a minute for each
@pytest.mark.parametrize(("mesh", "estimator"), [("data=2,fsdp=2,tensor=2", "relaxed"), (SPLIT, "reinforce")])
def test_training(texts, tmp_path, mesh, estimator):
    config = smollm2_config.get_config("tiny")
    config.data.source = str(texts)
    config.policy.signals, config.policy.prior = ("alpha", "last", "entropy"), ()
    if estimator == "relaxed":
        config.policy.signals, config.policy.granularity = ("alpha", "last"), "head"
        config.learn.update(estimator="relaxed")
    else:
        config.learn.evict_every = 4
    experiment = from_config(config)
    state, values = trained_for(experiment, "none", tmp_path)
    other, found = trained_for(experiment, mesh, tmp_path)
    # A gradient is what is left of samples that pull against each other: half a unit in the last place of every weight
    # of the model moves its norm by 2e-5 of itself on one device, so that 1e-5 would ask for more than float32 has.
    norms, other_norms = ([metrics.pop("grad_norm") for metrics in steps] for steps in (values, found))
    close(found, values)
    close(other_norms, norms, rtol=5e-5)
    # Not the weights: where a gradient is zero but for rounding, as that of the last bias, Adam makes a step of it.
    close(optax.tree.get(other.opt_state, "mu"), optax.tree.get(state.opt_state, "mu"), rtol=5e-5)
    assert other.step == state.step == 2


@functools.cache
def varied():
    """A tiny model with an output matrix of its own, whose continuations vary."""
    config = dataclasses.replace(PRESETS["tiny"], tie_embeddings=False)
    return LanguageModel(config, init_params(jax.random.key(3), config), ByteTokenizer(), "varied")


def on_mesh(lm, text):
    mesh = sharding.mesh_of(text)
    places = sharding.param_shardings(lm.config, sharding.parse(text), mesh)
    return dataclasses.replace(lm, params=jax.device_put(lm.params, places), mesh=mesh)


def some_prompt(number, kind, length):
    rng = np.random.default_rng(number)
    tokens, following = (rng.integers(2, 64, n).astype(np.int32) for n in (length, 20))
    return Prompt(tokens, kind, following, (), f"{kind}{number}", "text")


@pytest.mark.slow
def test_evaluation():
    prompts = [some_prompt(0, "retrieval", 48), some_prompt(1, "retrieval", 40), some_prompt(2, "text", 44)]
    methods = {name: fidelity.heuristic(name) for name in ("h2o", "snapkv(window=4)", "h2o@sequence")}
    arms = fidelity.make_arms(methods, (12,), 40)
    settings = fidelity.Settings(length=48, horizon=8, evict_every=4, new_tokens=4, batch=2)
    wanted = list(fidelity.evaluate(varied(), prompts, arms, settings))
    lm = on_mesh(varied(), SPLIT)
    with sharding.on(lm.mesh):
        found = list(fidelity.evaluate(lm, prompts, arms, settings))

    def numbers(x):
        return jax.tree.map(lambda leaf: leaf if isinstance(leaf, float | int) else 0, x)

    def texts(x):
        return jax.tree.map(lambda leaf: leaf if isinstance(leaf, str | bool) else 0, x)

    close(numbers(found), numbers(wanted))
    assert texts(found) == texts(wanted)


@pytest.mark.parametrize("chunk", [0, 32])
def test_generation(chunk):
    prompts = [some_prompt(3, "text", 40).tokens, some_prompt(4, "text", 100).tokens]
    settings = dict(max_new_tokens=8, temperature=0.0, top_p=1.0, seed=0, evict_every=3, prefill_chunk=chunk)
    one, many = (
        generate(lm, prompts, Trained(make("h2o"), ()), 25, **settings) for lm in (varied(), on_mesh(varied(), SPLIT))
    )
    assert [t.tolist() for t in many.tokens] == [t.tolist() for t in one.tokens]
    assert many.texts == one.texts
