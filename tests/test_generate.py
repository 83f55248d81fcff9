"""Generation on the tiny model: against token-by-token references, ragged batches, sampling, bytes, bad input."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dcache
from dcache import cache as kv
from dcache import model
from dcache.attention import StatsRequest
from dcache.budget import tokens_kept
from dcache.generate import bucket, sample_token
from dcache.policies import make
from dcache.policies.base import keep_set, read

LONG = np.asarray(np.random.default_rng(0).integers(2, 64, 100), np.int32)
SHORT = LONG[:41]


def naive_greedy(lm, prompt, policy, budget, evict_every, new):
    """One sequence in a cache that never shrinks: evict by mask, feed one token at a time."""
    length = jnp.asarray([len(prompt)], jnp.int32)
    hidden, cache = read(policy, (), lm.params, lm.config, jnp.asarray(prompt)[None], length)
    cache = kv.grow(cache, new)
    token = int(jnp.argmax(model.last_logits(lm.params, lm.config, hidden, length)[0]))
    out = [token]
    for step in range(new - 1):
        if step == 0 or (evict_every and step % evict_every == 0):
            allowed = jnp.asarray([tokens_kept(budget, len(prompt) + step)], jnp.int32)
            cache = kv.evict(cache, keep_set(policy, (), cache, allowed, jax.random.key(0)))
        hidden, cache = model.extend(
            lm.params, lm.config, jnp.asarray([[token]], jnp.int32), cache, jnp.int32(len(prompt) + step)
        )
        token = int(jnp.argmax(model.unembed(lm.params, hidden[0, 0], lm.config)))
        out.append(token)
    return out


def until_end(tokens, stop):
    cut = [i for i, t in enumerate(tokens) if t in stop]
    return tokens[: cut[0] + 1] if cut else tokens


@pytest.mark.parametrize(
    "name,evict_every",
    [
        ("h2o", 4), ("snapkv", 0), ("tova", 4), ("streaming_llm", 3), ("adakv", 4), ("pyramidkv", 0), ("criticalkv", 4),
        ("expected_attention", 4), ("kvzip", 4), ("rkv", 4), ("cake", 4),
    ],
)  # fmt: skip
def test_equals_token_by_token_reference(tiny, name, evict_every):
    policy = make(name).bind(tiny.tokenizer).fit(40)
    got = dcache.generate(tiny, [LONG], policy, 40, max_new_tokens=14, evict_every=evict_every)
    want = until_end(naive_greedy(tiny, LONG, policy, 40, evict_every, 14), tiny.tokenizer.eos_ids)
    assert got.tokens[0].tolist() == want


def test_full_cache_equals_growing_prompt(tiny):
    got = dcache.generate(tiny, [SHORT], "full", 1.0, max_new_tokens=6).tokens[0].tolist()
    sequence = SHORT.tolist()
    for token in got:
        assert int(np.argmax(dcache.logits(tiny, sequence)[-1])) == token
        sequence.append(token)


@pytest.mark.parametrize("name", ["full", "h2o", "snapkv", "keydiff", "adakv", "expected_attention", "kvzip"])
def test_batch_equals_each_alone(tiny, name):
    both = dcache.generate(tiny, [LONG, SHORT], name, 40, max_new_tokens=9, evict_every=4)
    for prompt, tokens in zip([LONG, SHORT], both.tokens, strict=True):
        alone = dcache.generate(tiny, [prompt], name, 40, max_new_tokens=9, evict_every=4)
        np.testing.assert_array_equal(alone.tokens[0], tokens)


def test_bytes_are_those_of_a_real_cache(tiny):
    result = dcache.generate(tiny, [LONG], "h2o", 40, max_new_tokens=20, evict_every=4)
    slots = 40 + 4
    assert result.cache_bytes == slots * tiny.config.kv_bytes_per_token()
    assert result.full_cache_bytes == (bucket(100) + 20) * tiny.config.kv_bytes_per_token()
    full = dcache.generate(tiny, [LONG], "full", 1.0, max_new_tokens=20)
    assert full.cache_bytes == full.full_cache_bytes == result.full_cache_bytes


def test_stops_at_end_of_text(tiny):
    plain = dcache.generate(tiny, [SHORT], "full", 1.0, max_new_tokens=8)
    stop = int(plain.tokens[0][0])

    class Stopping:
        eos_ids = (stop,)
        decode = staticmethod(tiny.tokenizer.decode)

    stopped = dcache.generate(dataclasses.replace(tiny, tokenizer=Stopping()), [SHORT], "full", 1.0, max_new_tokens=8)
    assert stopped.tokens[0].tolist() == [stop]
    assert stopped.texts == ("",)


def test_on_tokens_sees_every_token_once(tiny):
    seen: list[list[int]] = [[], []]

    def on_tokens(new):
        for row, tokens in zip(seen, new.tolist(), strict=True):
            row.extend(t for t in tokens if t >= 0)

    result = dcache.generate(tiny, [LONG, SHORT], "tova", 40, max_new_tokens=11, evict_every=4, on_tokens=on_tokens)
    assert seen == [t.tolist() for t in result.tokens]
    assert all(len(t) <= 11 for t in seen)


def test_sampling_follows_seed_temperature_and_top_p(tiny):
    def sampled(**settings):
        return dcache.generate(tiny, [LONG], "full", 1.0, max_new_tokens=12, **settings).tokens[0].tolist()

    # The tiny model's random weights make it very sure of itself; a high temperature spreads its choice.
    assert sampled(temperature=20.0, seed=3) == sampled(temperature=20.0, seed=3)
    assert sampled(temperature=20.0, seed=3) != sampled(temperature=20.0, seed=4)
    assert sampled(temperature=20.0, top_p=1e-6, seed=3) == sampled()


def test_top_p_keeps_the_smallest_set(getkey):
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]]))
    keys = jax.random.split(getkey(), 400)[:, None]
    draw = jax.jit(jax.vmap(lambda k: sample_token(logits, jnp.float32(1.0), jnp.float32(0.7), k, greedy=False)[0]))
    counts = np.bincount(np.asarray(draw(keys)), minlength=4)
    assert counts[2] == counts[3] == 0
    assert abs(counts[0] / 400 - 0.625) < 5 * np.sqrt(0.625 * 0.375 / 400)


def test_cache_is_donated_between_chunks(tiny):
    from dcache.generate import PROGRAMS, make_plan

    policy = make("h2o")
    plan = make_plan(tiny, policy, 40, 128, 20, 4, True)
    tokens, length = jnp.zeros((1, 128), jnp.int32), jnp.asarray([100], jnp.int32)
    sampling = (jnp.float32(1.0), jnp.float32(1.0), jax.random.key(0))
    token, cache = PROGRAMS["start"](plan, tiny.params, (), tokens, length, jnp.float32(-40.0), sampling)
    compiled = (
        PROGRAMS["decode"]
        .lower(plan, tiny.decode_params, (), cache, token, jnp.int32(0), jnp.float32(-40.0), sampling)
        .compile()
    )
    assert compiled.memory_analysis().alias_size_in_bytes >= kv.nbytes(cache)


def test_bucket():
    assert [bucket(n) for n in (1, 128, 129, 1024, 1025, 7900)] == [128, 128, 256, 1024, 1152, 8192]
    assert all(n <= bucket(n) <= max(128, 1.13 * n + 128) for n in range(1, 9000))


@pytest.mark.parametrize(
    "arguments,message",
    [
        (dict(prompts=[]), "no prompt"),
        (dict(prompts=[np.zeros(0, np.int32)]), "at least one token"),
        (dict(prompts=["  "]), "empty text"),
        (dict(prompts=[[1, 99]]), "vocabulary"),
        (dict(prompts=[[1.5, 2.0]]), "integer"),
        (dict(budget=0), "at least 1"),
        (dict(budget=1.5), "ratio"),
        (dict(budget=-0.1), "ratio"),
        (dict(budget=True), "budget is True"),
        (dict(budget="half"), "budget is 'half'"),
        (dict(policy="h20"), "Unknown policy 'h20'"),
        (dict(policy="streaming_llm", budget=3), "always keeps 4"),
        (dict(policy="snapkv", budget=16, window=64), "window of 64"),
        (dict(policy="snapkv", windows=64), "no setting windows"),
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(temperature=-1.0), "temperature"),
        (dict(top_p=0.0), "top_p"),
        (dict(max_new_tokens=200_000), "the context holds"),
    ],
)
def test_bad_input(tiny, arguments, message):
    call = dict(prompts=[SHORT], policy="h2o", budget=0.5) | arguments
    with pytest.raises(dcache.DcacheError, match=message):
        dcache.generate(tiny, **call)


def test_statistics_are_dropped_when_nothing_more_is_evicted(tiny):
    policy = make("h2o")
    length = jnp.asarray([100], jnp.int32)
    _, cache = model.prefill(tiny.params, tiny.config, jnp.asarray(LONG)[None], length, policy.needs)
    assert kv.nbytes(kv.restrict(cache, StatsRequest()), statistics=True) < kv.nbytes(cache, statistics=True)
