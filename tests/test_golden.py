"""The default model against transformers (torch) and kvpress on 512 tokens: see tests/golden/README.md."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import cache as kv
from dcache.attention import StatsRequest
from dcache.policies import make
from dcache.policies.base import keep_set, spread
from tests import naive

BUDGET = 128  # 25% of 512
METHODS = {
    "streaming_llm": make("streaming_llm"),
    "keydiff": make("keydiff"),
    "tova": make("tova"),
    "snapkv_w64_k5": make("snapkv", window=64, kernel=5, pooling="avg"),
    "snapkv_w32_k7": make("snapkv", window=32, kernel=7, pooling="avg"),
}
# Rows that the method protects hold a filler of kvpress, not a score.
PROTECTED = {"streaming_llm": 0, "keydiff": 0, "tova": 1, "snapkv_w64_k5": 64, "snapkv_w32_k7": 32}


@pytest.fixture(scope="module")
def run(smollm2, golden):
    """One prefill and one chunk for all methods: the arms are the full cache and the five methods."""
    params, config = smollm2.params, smollm2.config
    tokens = jnp.asarray(golden["input_ids"], jnp.int32)[None]
    request = StatsRequest()
    for policy in METHODS.values():
        request |= policy.needs
    hidden, cache = naive.prefill(params, config, tokens, jnp.full((1,), tokens.shape[1], jnp.int32), request)
    continuation = jnp.asarray(golden["continuation_ids"], jnp.int32)
    scores, keeps = {}, [np.ones(kv.positions(cache).shape, bool)]
    for name, policy in METHODS.items():
        scores[name] = np.asarray(spread(policy.scores((), cache, jax.random.key(0)), cache, policy.granularity))[:, 0]
        keeps.append(np.asarray(keep_set(policy, (), cache, jnp.full((1,), BUDGET, jnp.int32), jax.random.key(0))))
    arms = kv.share_prompt(kv.restrict(cache, StatsRequest()), len(keeps), len(continuation))
    keep = np.concatenate(keeps, axis=1)
    arms = kv.evict(arms, jnp.asarray(np.pad(keep, ((0, 0), (0, 0), (0, 0), (0, len(continuation))))))
    fed = jnp.broadcast_to(continuation[None], (len(keeps), len(continuation)))
    out, _ = naive.extend(params, config, fed, arms, jnp.int32(0))
    logits = np.asarray(naive.logits_of(params, out, config))
    prompt_logits = np.asarray(naive.logits_of(params, hidden[:, -4:], config))[0]
    return {
        "prompt_logits": prompt_logits,
        "logits": dict(zip(["full", *METHODS], logits, strict=True)),
        "keep": dict(zip(METHODS, keep.swapaxes(0, 1)[1:], strict=True)),
        "scores": scores,
    }


def test_prompt_logits(run, golden):
    np.testing.assert_allclose(run["prompt_logits"], golden["full_last_logits"], rtol=0, atol=2e-4)


def test_continuation_logits(run, golden):
    got = run["logits"]["full"][:, : golden["full_continuation_logits"].shape[1]]
    np.testing.assert_allclose(got, golden["full_continuation_logits"], rtol=0, atol=2e-4)


@pytest.mark.parametrize("method", [m for m in METHODS if m != "streaming_llm"])  # its golden scores are 0 and 1
def test_scores(run, golden, method):
    end = 512 - PROTECTED[method]
    want, got = golden[f"{method}/scores"][..., :end], run["scores"][method][..., :end]
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("method", METHODS)
def test_kept_slots(run, golden, method):
    scores = golden[f"{method}/scores"]
    want = naive.top(scores, np.ones(scores.shape, bool), BUDGET)
    got = run["keep"][method]
    # The reference counts its cache at the end, with the 16 continuation tokens.
    np.testing.assert_array_equal(got.sum(-1).mean(-1), golden[f"{method}/kept_per_layer"] - 16)
    assert (got & want).sum() >= 0.995 * want.sum()
    threshold = np.sort(scores, -1)[..., -BUDGET, None]
    near = np.abs(scores - threshold) <= 1e-3 * np.abs(threshold) + 1e-5 * np.abs(scores).max()
    assert near[got != want].all(), "a slot is kept differently although its score is far from the threshold"


@pytest.mark.parametrize("method", METHODS)
def test_kl(run, golden, method):
    p, q = (naive.log_softmax(run["logits"][arm].astype(np.float64)) for arm in ("full", method))
    kl = np.sum(np.exp(p) * (p - q), -1)
    np.testing.assert_allclose(kl, golden[f"{method}/kl"], rtol=0.02, atol=1e-4)
    np.testing.assert_allclose(kl.mean(), golden[f"{method}/kl"].mean(), rtol=0.02)
