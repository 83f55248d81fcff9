"""The public functions on the tiny model, and the README's example on the default one."""

import jax
import numpy as np
import pytest

import dcache
from dcache.policies import REGISTRY, make
from dcache.policies.base import Policy

PROMPT = np.asarray(np.random.default_rng(1).integers(2, 64, 90), np.int32)
CONTINUATION = np.asarray(np.random.default_rng(2).integers(2, 64, 13), np.int32)


def test_shapes_and_types(tiny):
    c = tiny.config
    assert dcache.logits(tiny, PROMPT).shape == (90, c.vocab_size)
    for name in ("random", "streaming_llm", "h2o", "snapkv", "tova", "keydiff"):
        assert name in dcache.policies()
        scores = dcache.score(tiny, PROMPT, policy=name)
        assert scores.shape == (c.num_layers, c.num_kv_heads, 90) and scores.dtype == np.float32
        keep = dcache.keep(tiny, PROMPT, policy=name, budget=0.5)
        assert keep.dtype == bool and (keep.sum(-1) == 45).all()


def test_budget_rule(tiny):
    assert (dcache.keep(tiny, PROMPT, "h2o", 0.1).sum(-1) == 32).all()  # a ratio never asks for fewer than 32
    assert (dcache.keep(tiny, PROMPT, "h2o", 9).sum(-1) == 9).all()
    assert dcache.keep(tiny, PROMPT, "h2o", 500).all() and dcache.keep(tiny, PROMPT, "full", 0.25).all()


def test_logits_do_not_depend_on_padding(tiny):
    np.testing.assert_allclose(dcache.logits(tiny, PROMPT)[:40], dcache.logits(tiny, PROMPT[:40]), atol=2e-5)


def test_settings_reach_the_policy(tiny):
    wide = dcache.score(tiny, PROMPT, "snapkv", window=64, kernel=5, pooling="avg")
    assert not np.allclose(wide, dcache.score(tiny, PROMPT, "snapkv"))
    assert np.array_equal(dcache.score(tiny, PROMPT, "random", seed=1), dcache.score(tiny, PROMPT, "random", seed=1))
    assert not np.array_equal(
        dcache.score(tiny, PROMPT, "random", seed=1), dcache.score(tiny, PROMPT, "random", seed=2)
    )


@pytest.mark.parametrize("evict_every", [0, 4])
def test_fidelity_of_everything_kept_is_perfect(tiny, evict_every):
    result = dcache.fidelity(tiny, PROMPT, CONTINUATION, "h2o", 1.0, evict_every=evict_every)
    np.testing.assert_allclose(result.kl, 0.0, atol=1e-5)
    assert result.top1_agrees.all()
    np.testing.assert_allclose(result.nll, result.nll_full, atol=1e-5)


def test_fidelity_against_logits(tiny):
    """nll_full from the full model's logits; kl and nll from a model that never had the evicted tokens is in test_cache."""
    result = dcache.fidelity(tiny, PROMPT, CONTINUATION, "streaming_llm", 32)
    logits = dcache.logits(tiny, np.concatenate([PROMPT, CONTINUATION]))[89:-1].astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(result.nll_full, -log_p[np.arange(13), CONTINUATION], rtol=1e-4)
    assert result.nll[0] == result.nll_full[0]
    assert (result.kl > -1e-6).all() and result.kl.max() > 1e-3
    assert result.kl.shape == result.nll.shape == result.top1_agrees.shape == (13,)


def test_fidelity_feeds_only_the_given_tokens(tiny):
    """Padding the continuation to whole chunks changes nothing before it."""
    whole = dcache.fidelity(tiny, PROMPT, CONTINUATION, "tova", 40, evict_every=5)
    part = dcache.fidelity(tiny, PROMPT, CONTINUATION[:7], "tova", 40, evict_every=5)
    np.testing.assert_allclose(whole.kl[:7], part.kl, atol=1e-5)


def test_evicting_more_often_changes_the_result(tiny):
    once = dcache.fidelity(tiny, PROMPT, CONTINUATION, "h2o", 40)
    often = dcache.fidelity(tiny, PROMPT, CONTINUATION, "h2o", 40, evict_every=1)
    assert not np.allclose(once.kl, often.kl)


def test_an_object_is_a_policy(tiny):
    class Evens(Policy):
        """Prefers even positions."""

        name, summary, paper = "evens", "even positions", "-"

        def scores(self, params, cache, key):
            from dcache.policies.base import slot_positions

            return (slot_positions(cache, "sequence") % 2 == 0).astype("float32")

    keep = dcache.keep(tiny, PROMPT, Evens(), 45)
    np.testing.assert_array_equal(np.flatnonzero(keep[0, 0]), np.arange(0, 90, 2))


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda lm: dcache.score(lm, [], "h2o"), "at least one token"),
        (lambda lm: dcache.score(lm, PROMPT, "nope"), "Unknown policy 'nope'; the policies are"),
        (lambda lm: dcache.keep(lm, PROMPT, "h2o", 0.0), "ratio"),
        (lambda lm: dcache.keep(lm, PROMPT, "streaming_llm", 2), "always keeps 4"),
        (lambda lm: dcache.keep(lm, PROMPT, "distillcache", 0.5, hidden=4), "part of its training"),
        (lambda lm: dcache.fidelity(lm, PROMPT, [], "h2o", 0.5), "`continuation_tokens` has shape"),
        (lambda lm: dcache.fidelity(lm, PROMPT, [3], "h2o", 0.5, evict_every=-1), "evict_every is -1"),
        (lambda lm: dcache.logits(lm, [[1, 2]]), "one-dimensional"),
        (lambda lm: dcache.resolve(Policy(), window=3), "policy object"),
        (lambda lm: dcache.resolve(make("distillcache")), "without its weights"),
        (lambda lm: dcache.resolve(""), "policy is ''"),
        (lambda lm: dcache.resolve(7), "policy is 7"),
        (lambda lm: dcache.resolve("runs/nowhere/policy"), "no folder 'runs/nowhere/policy'"),
        (lambda lm: dcache.generate(lm, None, "h2o"), "of type NoneType"),
        (lambda lm: dcache.generate(lm, [], "h2o"), "no prompt"),
    ],
)
def test_bad_input(tiny, call, message):
    with pytest.raises(dcache.DcacheError, match=message):
        call(tiny)


def test_readme_example(smollm2):
    """The default model with the trained policy that comes with the project."""
    tokens = smollm2.tokenizer.chat("Tell me about the cat.")
    result = dcache.fidelity(smollm2, tokens, [504, 2644, 288], policy="distillcache", budget=32)
    assert np.isfinite(result.kl).all() and result.kl.shape == (3,)
    generated = dcache.generate(smollm2, ["Tell me about the cat."], "distillcache", 32, max_new_tokens=4)
    assert 1 <= len(generated.tokens[0]) <= 4 and generated.cache_bytes < generated.full_cache_bytes


def test_the_name_of_a_learned_method_stands_for_the_trained_policy(smollm2):
    learned = [name for name, policy in REGISTRY.items() if hasattr(policy, "init")]
    assert {"distillcache", "kvp", "kvzap", "foresightkv", "rlkv", "hybrid"} <= set(learned)
    for name in learned:
        trained = dcache.resolve(name)
        assert trained.policy.name == name and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trained.params))
        trained.policy.check_model(smollm2.config)
