"""Traces against `dcache.keep`, `dcache.fidelity` and the definition of an eviction, at every granularity."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dcache
from dcache import budget, model, rollout
from dcache import cache as kv
from dcache.errors import BudgetError, ConfigError, DcacheError
from dcache.evaluate import tracing
from dcache.generate import pad_prompts
from dcache.policies.base import read
from dcache.tokenizer import ByteTokenizer

PROMPT = np.random.default_rng(5).integers(2, 64, 70).astype(np.int32)
METHODS = ("snapkv", "h2o@layer", "h2o@sequence", "kvzip")  # head, layer, sequence; observing and sharing budgets
BUDGET, FED, EVERY = 0.5, 12, 4


@pytest.fixture(scope="module")
def lm(lm):
    """The varied tiny model with a tokenizer that can write KVzip's instruction."""
    return dataclasses.replace(lm, tokenizer=ByteTokenizer())


@pytest.fixture(scope="module")
def found(lm):
    return tracing.trace(
        lm, PROMPT, {name: dcache.resolve(name) for name in METHODS}, BUDGET, new_tokens=FED, evict_every=EVERY
    )


def kept_at(evicted_at, step):
    """bool[L, K, ...]: what is still there after the eviction at a step."""
    return (evicted_at == tracing.NEVER) | (evicted_at > step)


def test_shapes_and_types(lm, found):
    heads = (lm.config.num_layers, lm.config.num_kv_heads)
    assert list(found.methods) == list(METHODS) and found.model == lm.name
    assert found.signals.shape == (70, len(tracing.SIGNALS)) and np.isfinite(found.signals).all()
    for method in found.methods.values():
        assert method.evicted_at.shape == (*heads, 70 + FED) and method.evicted_at.dtype == np.int16
        assert method.score.shape == (*heads, 70) and method.score.dtype == np.float32
        assert method.kl.shape == method.agrees.shape == method.choice.shape == (FED,)
        assert set(np.unique(method.evicted_at)) <= {-1, 0, 4, 8}


def test_continuation_is_greedy(lm, found):
    logits = dcache.logits(lm, np.concatenate([PROMPT, found.continuation]))
    np.testing.assert_array_equal(found.continuation, logits[69:-1].argmax(-1))


@pytest.mark.parametrize("name", ["snapkv", "kvzip"])
def test_first_eviction_is_that_of_keep(lm, found, name):
    kept = found.methods[name].evicted_at[..., :70] != 0
    np.testing.assert_array_equal(kept, dcache.keep(lm, PROMPT, name, BUDGET))


def test_scores_are_those_of_score(lm, found):
    expected = dcache.score(lm, PROMPT, "h2o@layer")  # whose scores do not depend on the budget, as SnapKV's do
    np.testing.assert_allclose(found.methods["h2o@layer"].score, expected, rtol=1e-5, atol=1e-7)


def test_budget_holds_at_every_step(lm, found):
    for name, method in found.methods.items():
        for step in (0, 4, 8):
            allowed = budget.tokens_kept(BUDGET, 70 + step)
            counts = kept_at(method.evicted_at, step)[..., : 70 + step].sum(-1)
            assert counts.mean() == allowed and (name == "kvzip" or (counts == allowed).all())


def test_no_token_goes_before_it_comes(found):
    for method in found.methods.values():
        tail = method.evicted_at[..., 70:]
        assert ((tail == tracing.NEVER) | (tail > np.arange(FED))).all()


def test_granularity_shows(found):
    assert (found.methods["h2o@sequence"].evicted_at == found.methods["h2o@sequence"].evicted_at[:1, :1]).all()
    layered = found.methods["h2o@layer"].evicted_at
    assert (layered == layered[:, :1]).all() and (layered[0] != layered[1]).any()


def test_kl_is_that_of_a_model_that_never_had_the_evicted_tokens(lm, found):
    """Step by step from the record alone: a mask over the whole text, read off `evicted_at`, decides what each token sees."""
    method = found.methods["h2o@sequence"]
    config, params = lm.config, lm.params
    tokens, length = pad_prompts([PROMPT])
    policy = dcache.resolve("h2o").policy

    @jax.jit
    def naive(keeps):
        _, cache = read(policy, (), params, config, tokens, length)
        teacher = rollout.teacher_log_probs(params, config, cache, jnp.asarray(found.continuation))
        students = kv.share_prompt(cache, 1, FED)
        out = []
        for i in range(FED):
            students = kv.evict(students, keeps[i][:, None])
            hidden, students = model.extend(
                params, config, jnp.asarray(found.continuation[None, i : i + 1]), students, jnp.int32(i)
            )
            out.append(jax.nn.log_softmax(model.unembed(params, hidden[0, 0], config)))
        student = jnp.stack(out)
        return jnp.sum(jnp.exp(teacher) * (teacher - student), -1), jnp.argmax(student, -1), jnp.argmax(teacher, -1)

    slots = np.ones((FED, config.num_layers, config.num_kv_heads, tokens.shape[1] + FED), bool)
    for i in range(FED):
        gone = (method.evicted_at != tracing.NEVER) & (method.evicted_at <= i)
        slots[i][..., :70], slots[i][..., tokens.shape[1] :] = ~gone[..., :70], ~gone[..., 70:]
    kl, choice, best = map(np.asarray, naive(jnp.asarray(slots)))
    np.testing.assert_allclose(method.kl, kl, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(method.choice, choice)
    np.testing.assert_array_equal(method.agrees, choice == best)
    assert kl.max() > 1e-3


def test_kl_is_that_of_fidelity(lm, found):
    result = dcache.fidelity(lm, PROMPT, found.continuation, "snapkv", BUDGET, evict_every=EVERY)
    np.testing.assert_allclose(found.methods["snapkv"].kl, result.kl, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(found.methods["snapkv"].agrees, result.top1_agrees)


def test_own_text_is_that_of_generate(lm, found):
    own = dcache.generate(lm, [PROMPT], "snapkv", BUDGET, max_new_tokens=FED, evict_every=EVERY)
    np.testing.assert_array_equal(found.methods["snapkv"].tokens, own.tokens[0])
    assert found.methods["snapkv"].text == own.texts[0]


def test_nothing_counts_after_the_end_of_the_text(lm, found):
    third = int(found.continuation[2])
    stopping = dataclasses.replace(lm, tokenizer=ByteTokenizer())
    stopping.tokenizer.eos_ids = (third,)
    first = found.continuation.tolist().index(third)
    short = tracing.trace(
        stopping, PROMPT, {"snapkv": dcache.resolve("snapkv")}, BUDGET, new_tokens=FED, evict_every=EVERY
    )
    count = max(1, first)
    np.testing.assert_array_equal(short.continuation, found.continuation[:count])
    np.testing.assert_allclose(short.methods["snapkv"].kl, found.methods["snapkv"].kl[:count], atol=1e-6)
    assert short.methods["snapkv"].evicted_at.shape[-1] == 70 + count
    assert set(np.unique(short.methods["snapkv"].evicted_at)) == {-1, 0}


def test_evicted_at_by_hand():
    """Two decisions, two tokens apart, on three prompt tokens (one more slot is padding)."""
    keep = np.array([[1, 0, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0, 0, 0]], bool)[:, None, None]
    np.testing.assert_array_equal(tracing._evicted_at(keep, 3, 4, 2)[0, 0], [2, 0, -1, -1, 2, -1, -1])
    np.testing.assert_array_equal(tracing._evicted_at(keep, 3, 2, 2)[0, 0], [-1, 0, -1, -1, -1])


def test_errors(lm):
    snapkv = {"snapkv": dcache.resolve("snapkv")}
    with pytest.raises(ConfigError, match="no method"):
        tracing.trace(lm, PROMPT, {}, BUDGET)
    with pytest.raises(ConfigError, match="not a multiple of evict_every"):
        tracing.trace(lm, PROMPT, snapkv, BUDGET, new_tokens=10, evict_every=4)
    with pytest.raises(BudgetError, match="1.5"):
        tracing.trace(lm, PROMPT, snapkv, 1.5)
    with pytest.raises(ConfigError, match="at least one token"):
        tracing.trace(lm, [], snapkv, BUDGET)
    with pytest.raises(BudgetError, match="streaming_llm always keeps 4"):
        tracing.trace(lm, PROMPT, {"s": dcache.resolve("streaming_llm")}, 2)
    with pytest.raises(DcacheError, match="'snapkv' is not finite"):
        broken = jax.tree.map(lambda x: x * jnp.nan, lm.params)
        tracing.trace(dataclasses.replace(lm, params=broken), PROMPT, snapkv, BUDGET, new_tokens=FED, evict_every=EVERY)
