"""Policies that look at the prompt themselves: KVzip and the oracle, against the dense reference on the whole text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dcache
from dcache import cache as kv
from dcache.attention import EMPTY, LATER, StatsRequest
from dcache.errors import ConfigError
from dcache.policies import make
from dcache.policies.base import keep_set, later
from tests import naive
from tests.naive import TINY

L, K, G, N = TINY.num_layers, TINY.num_kv_heads, TINY.group_size, TINY.num_heads
KEY = jax.random.key(0)
TEXTS = [naive.some_tokens(50, seed=1), naive.some_tokens(23, seed=2)]


def observed(policy, continuation=None):
    """The cache of TEXTS in one padded batch, as the policy sees it."""
    _, cache = naive.read(TEXTS, StatsRequest(), pad=56)
    tokens = np.full((2, 56), 7, np.int32)
    for row, text in zip(tokens, TEXTS, strict=True):
        row[: len(text)] = text
    see = jax.jit(lambda params, cache, tokens, future: policy.observe((), params, TINY, cache, tokens, future))
    return see(naive.weights(), cache, jnp.asarray(tokens), None if continuation is None else jnp.asarray(continuation))


def bound(**settings):
    """KVzip with made-up instructions of 5, 3 and 2 tokens."""
    return make("kvzip", instructions=((5, 9, 11, 2, 3), (21, 22, 23), (40, 41)), **settings)


def repeated(policy, text):
    """[L, K, T]: for every part, read prompt + request + part with the dense reference and look at those queries."""
    first, following, opening = policy.instructions
    out = np.zeros((L, K, len(text)))
    for start in range(0, len(text), policy.part):
        part = text[start : start + policy.part].tolist()
        ask = list(first) if start == 0 else [*following, *text[start - 8 : start].tolist()]
        whole = [*text.tolist(), *ask, *opening, *part]
        probs = naive.forward(naive.weights(), TINY, np.asarray(whole)).probs  # [L, N, T, T]
        place = np.arange(len(whole))
        counted = (place < policy.sinks) | (place >= start) & (place < start + len(part)) | (place >= len(text))
        rows = np.where(counted, probs, 0)[:, :, len(text) :]
        share = rows / rows.sum(-1, keepdims=True)
        best = share.max(2).reshape(L, K, G, -1).max(2)
        out[..., start : start + len(part)] = best[..., start : start + len(part)]
    return out


@pytest.mark.parametrize("part", [2048, 20, 16])
def test_kvzip_scores(part):
    policy = bound(part=part)
    cache = observed(policy)
    got = np.asarray(policy.scores((), cache, KEY))
    for b, text in enumerate(TEXTS):
        np.testing.assert_allclose(got[:, b, :, : len(text)], repeated(policy, text), rtol=1e-3, atol=1e-6)


def test_kvzip_reads_a_request_longer_than_a_block():
    policy = make("kvzip", instructions=(tuple(range(2, 60)) * 3, (21,), (40, 41)))
    got = np.asarray(policy.scores((), observed(policy), KEY))
    for b, text in enumerate(TEXTS):
        np.testing.assert_allclose(got[:, b, :, : len(text)], repeated(policy, text), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("scope", ["model", "layer", "head"])
def test_kvzip_shares_its_budget(scope):
    policy = bound(scope=scope)
    cache = observed(policy)
    keep = np.asarray(keep_set(policy, (), cache, jnp.asarray([12, 6], jnp.int32), KEY))
    for b, (text, budget) in enumerate(zip(TEXTS, (12, 6), strict=True)):
        scores = repeated(policy, text)
        scores[..., :4] = 9.0
        heads = {"model": (1, 1), "layer": (L, 1), "head": (L, K)}[scope]
        flat = scores.reshape(*heads, -1)
        want = naive.top(flat, np.ones(flat.shape, bool), budget * L * K // (heads[0] * heads[1])).reshape(scores.shape)
        np.testing.assert_array_equal(keep[:, b, :, : len(text)], want)
        assert not keep[:, b, :, len(text) :].any()
        assert keep[:, b].sum(-1).max() <= policy.most_kept(budget, len(text), TINY)


def test_kvzip_binds_to_a_tokenizer(tiny, smollm2):
    first, following, opening = make("kvzip").bind(smollm2.tokenizer).instructions
    assert smollm2.tokenizer.decode(first) == "\n\nRepeat the previous context exactly."
    assert smollm2.tokenizer.decode(following).endswith("exactly, starting with")
    whole = smollm2.tokenizer.chat("Hello there").tolist()
    assert len(opening) >= 4 and tuple(whole[-len(opening) :]) == opening
    assert smollm2.tokenizer.decode(opening) == "\nassistant\n"
    assert make("kvzip").bind(tiny.tokenizer).instructions[2] == tuple(tiny.tokenizer.encode("\n").tolist())
    with pytest.raises(ConfigError, match="bind"):
        observed(make("kvzip"))


@pytest.mark.parametrize("bad", [{"scope": "all"}, {"sinks": -1}, {"part": 7}])
def test_kvzip_settings(bad):
    with pytest.raises(ConfigError, match=f"kvzip:.*{next(iter(bad))} (is|7)"):
        make("kvzip", **bad)


@pytest.mark.parametrize("granularity", ["sequence", "layer", "head"])
def test_oracle(granularity):
    # The second text's continuation ends after 5 of 8 tokens.
    following = [naive.some_tokens(8, seed=3), naive.some_tokens(5, seed=4)]
    continuation = np.full((2, 8), EMPTY, np.int32)
    for row, text in zip(continuation, following, strict=True):
        row[: len(text)] = text
    policy = make("oracle", granularity=granularity)
    got = np.asarray(policy.scores((), observed(policy, continuation), KEY))
    for b, text in enumerate(TEXTS):
        probs = naive.forward(naive.weights(), TINY, np.concatenate([text, following[b]])).probs
        received = probs[:, :, len(text) :, : len(text)].sum(2).reshape(L, K, G, -1).mean(2)
        want = {"sequence": received.mean((0, 1)), "layer": received.mean(1), "head": received}[granularity]
        have = got[b] if granularity == "sequence" else got[:, b]
        np.testing.assert_allclose(have[..., : len(text)], want, rtol=1e-3, atol=1e-6)


def test_oracle_needs_the_text_that_follows(tiny):
    for call in (dcache.score, lambda lm, tokens, policy: dcache.generate(lm, [tokens], policy, 32)):
        with pytest.raises(ConfigError, match="needs the text that follows"):
            call(tiny, TEXTS[0], "oracle")


def test_oracle_is_a_ceiling(smollm2, golden):
    """On a trained model; a random one spreads its attention and its KL says nothing."""
    prompt, continuation = golden["input_ids"][-256:], golden["continuation_ids"]
    kl = {name: dcache.fidelity(smollm2, prompt, continuation, name, 0.25).kl.mean() for name in ("oracle", "snapkv")}
    assert kl["oracle"] < 0.5 * kl["snapkv"]


def test_what_came_later_is_protected():
    policy = bound()
    cache = kv.grow(observed(policy), 3)
    _, cache = naive.extend(naive.weights(), TINY, jnp.asarray([[4, 5], [6, 7]], jnp.int32), cache, jnp.int32(56))
    extra = np.asarray(cache.layers.stats.extra["reread"])
    assert (extra[..., 56:58] == LATER).all()
    for b, text in enumerate(TEXTS):
        assert np.isfinite(extra[:, b, :, : len(text)]).all()
    marked = np.asarray(later(cache, "reread", "head"))
    assert marked[..., 56:58].all() and marked.sum() == L * 2 * K * 2
    for granularity, want in (("sequence", 4), ("layer", 4 * L)):
        assert np.asarray(later(cache, "reread", granularity)).sum() == want
    assert np.isfinite(np.asarray(policy.scores((), cache, KEY))).all()
    keep = np.asarray(keep_set(policy, (), cache, jnp.asarray([8, 8], jnp.int32), KEY))
    assert keep[..., 56:58].all() and keep[..., :4].all()


def test_wrappers_pass_the_look_on():
    inside = bound(scope="head")
    around = make("criticalkv", base=inside)
    assert make("adakv", base=make("kvzip")).bind(dcache.load("tiny").tokenizer).base.instructions
    _, cache = naive.read(TEXTS, StatsRequest(projected=True), pad=56)
    tokens = jnp.asarray(np.stack([np.resize(t, 56) for t in TEXTS]))
    seen = [
        p.observe((), naive.weights(), TINY, cache, tokens, None).layers.stats.extra["reread"] for p in (inside, around)
    ]
    np.testing.assert_array_equal(*seen)
    assert around.needs == StatsRequest(projected=True, extra=("reread",))
    assert dataclasses.replace(around, base=make("h2o")).needs.extra == ()
    assert N == K * G
