"""The default model against transformers (torch) and kvpress on 512 tokens: see tests/golden/README.md."""

import dataclasses

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
    "knorm": make("knorm"),
    "observed_attention": make("observed_attention"),
    "lagkv": make("lagkv"),
    "pyramidkv": make("pyramidkv", window=64, kernel=5, pooling="avg", kvpress=True),
    "adakv_snapkv_w64_k5": make("adakv", base=make("snapkv", window=64, kernel=5, pooling="avg")),
    "expected_attention": make("expected_attention"),
    "kvzip": make("kvzip"),
    "criticalkv": make("criticalkv", base=make("snapkv", window=64, kernel=5, pooling="avg")),
}
# All heads of a layer, or of the model, share one budget.
SHARED = {"adakv_snapkv_w64_k5": (30, 1), "kvzip": (1, 1)}
SINKS = {"expected_attention": 4, "kvzip": 4}
# Rows that the method protects hold a filler of kvpress, not a score.
PROTECTED = {"tova": 1, "snapkv_w64_k5": 64, "snapkv_w32_k7": 32, "pyramidkv": 64, "adakv_snapkv_w64_k5": 64}


observe = jax.jit(
    lambda p, config, cache, tokens, policy: policy.observe((), p, config, cache, tokens, None), static_argnums=(1, 4)
)


@pytest.fixture(scope="module")
def run(smollm2, golden):
    """One prefill and one chunk for all methods: the arms are the full cache and all methods."""
    params, config = smollm2.params, smollm2.config
    tokens = jnp.asarray(golden["input_ids"], jnp.int32)[None]
    request = StatsRequest()
    methods = {name: policy.bind(smollm2.tokenizer) for name, policy in METHODS.items()}
    for policy in methods.values():
        request |= policy.needs
    prefill = dataclasses.replace(request, extra=())
    hidden, cache = naive.prefill(params, config, tokens, jnp.full((1,), tokens.shape[1], jnp.int32), prefill)
    cache = observe(params, config, cache, tokens, methods["kvzip"])
    continuation = jnp.asarray(golden["continuation_ids"], jnp.int32)
    scores, keeps = {}, [np.ones(kv.positions(cache).shape, bool)]
    for name, policy in methods.items():
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


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("streaming_llm", "lagkv", "criticalkv")])
def test_scores(run, golden, method):
    scored = slice(SINKS.get(method, 0), 512 - PROTECTED.get(method, 0))
    want, got = golden[f"{method}/scores"][..., scored], run["scores"][method][..., scored]
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5 * np.abs(want).max())


def test_criticalkv_scores(run, golden):
    """Those of the second stage; what the first chose holds a filler."""
    want, got = golden["criticalkv/scores"], run["scores"]["criticalkv"]
    scored = np.isfinite(want) & (want < 1e30)
    assert (scored.sum(-1) == 512 - 64).all()
    np.testing.assert_allclose(got[scored], want[scored], rtol=1e-3, atol=1e-5 * want[scored].max())


def test_lagkv_scores(run, golden):
    """Ranks within a block: two tokens whose spreads agree to float32 may swap places."""
    want, got = golden["lagkv/scores"], run["scores"]["lagkv"]
    np.testing.assert_allclose(got, want, rtol=0, atol=1.001 / 128)
    assert (np.abs(got - want) > 1e-6).mean() < 1e-3
    np.testing.assert_allclose(np.sort(got, -1), np.sort(want, -1), rtol=1e-6)


# LagKV is left out: its golden keep-set depends on how ties at the cut are broken.
@pytest.mark.parametrize("method", [m for m in METHODS if m != "lagkv"])
def test_kept_slots(run, golden, method):
    scores = golden[f"{method}/scores"]
    if method == "criticalkv":
        scores = np.where(np.isfinite(scores) & (scores < 1e30), scores, 1e9)
    got = run["keep"][method]
    layers, heads = SHARED.get(method, (30, 3))
    flat = scores.reshape(layers, heads, -1)
    budget = BUDGET * 90 // (layers * heads)
    want = naive.top(flat, np.ones(flat.shape, bool), budget).reshape(scores.shape)
    threshold = np.broadcast_to(np.sort(flat, -1)[..., -budget, None], flat.shape).reshape(scores.shape)
    if f"{method}/kept_per_layer" in golden and method not in SHARED:
        # The reference counts its cache at the end, with the 16 continuation tokens. Where it masks instead of evicting,
        # it counts all tokens.
        np.testing.assert_array_equal(got.sum(-1).mean(-1), golden[f"{method}/kept_per_layer"] - 16)
    assert got.sum() == want.sum() and (got & want).sum() >= 0.995 * want.sum()
    near = np.abs(scores - threshold) <= 1e-3 * np.abs(threshold) + 1e-5 * np.abs(scores).max()
    assert near[got != want].all(), "a slot is kept differently although its score is far from the threshold"


@pytest.mark.parametrize("method", [m for m in METHODS if m != "lagkv"])
def test_kl(run, golden, method):
    p, q = (naive.log_softmax(run["logits"][arm].astype(np.float64)) for arm in ("full", method))
    kl = np.sum(np.exp(p) * (p - q), -1)
    np.testing.assert_allclose(kl, golden[f"{method}/kl"], rtol=0.02, atol=1e-4)
    np.testing.assert_allclose(kl.mean(), golden[f"{method}/kl"].mean(), rtol=0.02)
