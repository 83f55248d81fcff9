"""Prompts read in chunks: against one reading, against the dense reference, and in constant memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dcache
from dcache import ahead, chunked
from dcache.attention import EMPTY, StatsRequest
from dcache.errors import ConfigError
from dcache.policies import REGISTRY, make
from dcache.policies.base import Policy
from tests import naive

LONG, SHORT = naive.some_tokens(75), naive.some_tokens(21, seed=1)
REQUEST = naive.MORE


@dataclasses.dataclass(frozen=True)
class Everything(Policy):
    """Keeps the most attended tokens of each head, and looks at every statistic."""

    name = "everything"
    granularity = "head"
    tail: int = 16

    @property
    def needs(self):
        return StatsRequest(True, True, (self.tail,), self.tail, (self.tail,), projected=True, queries=True)

    def scores(self, params, cache, key):
        mass = cache.layers.stats.mass
        l, b, n, s = mass.shape
        k = cache.layers.position.shape[2]
        return mass.reshape(l, b, k, n // k, s).mean(axis=3)


def _read(policy, prompts, chunk, kept, config=naive.TINY, weights=()):
    plan = chunked.Plan(config, policy, kept)
    allowed = jnp.full(len(prompts), kept, jnp.int32)
    hidden, cache, _ = chunked.read(plan, naive.weights(config), weights, prompts, chunk, allowed, jax.random.key(0))
    return hidden, cache


@pytest.mark.parametrize("chunk", [16, 25, 80])
def test_without_eviction_it_is_one_reading(chunk):
    policy = Everything()
    hidden, cache = _read(policy, [LONG, SHORT], chunk, 96)
    want_hidden, want = naive.read([LONG, SHORT], policy.needs)
    for b, prompt in enumerate((LONG, SHORT)):
        n = len(prompt)
        np.testing.assert_allclose(hidden[b], want_hidden[b, n - 1], atol=2e-5)
        order = np.argsort(np.where(cache.layers.position[:, b] < 0, 10**6, cache.layers.position[:, b]), axis=-1)[
            ..., :n
        ]
        np.testing.assert_array_equal(
            np.take_along_axis(np.asarray(cache.layers.position[:, b]), order, -1),
            np.broadcast_to(np.arange(n), order.shape),
        )
        keys = np.take_along_axis(np.asarray(cache.layers.k[:, b]), order[..., None], 2)
        np.testing.assert_allclose(keys, want.layers.k[:, b, :, :n], atol=2e-5)
        values = np.take_along_axis(np.asarray(cache.layers.v[:, b]), order[..., None], 2)
        np.testing.assert_allclose(values, want.layers.v[:, b, :, :n], atol=2e-5)
        norms = np.take_along_axis(np.asarray(cache.layers.value_norm[:, b]), order, -1)
        np.testing.assert_allclose(norms, want.layers.value_norm[:, b, :, :n], atol=2e-5)
        heads = np.repeat(order, naive.TINY.group_size, axis=1)
        for got, expected in zip(jax.tree.leaves(cache.layers.stats), jax.tree.leaves(want.layers.stats), strict=True):
            picked = np.take_along_axis(np.asarray(got[:, b]), heads, -1)
            np.testing.assert_allclose(picked, expected[:, b, :, :n], atol=2e-5)
        rows = np.take_along_axis(np.asarray(cache.rows[b]), order[:1, 0], -1)
        np.testing.assert_allclose(rows, want.rows[b, :, :n], atol=2e-5)
        np.testing.assert_allclose(cache.row_entropy[b], want.row_entropy[b], atol=2e-5)
    np.testing.assert_array_equal(cache.length, want.length)
    np.testing.assert_array_equal(cache.queries.count, want.queries.count)
    np.testing.assert_allclose(cache.queries.outer, want.queries.outer, atol=2e-4)


@pytest.mark.parametrize("window", [None, 30])
def test_evicting_equals_the_dense_reference(window):
    """Every query sees what was left when its chunk began, and its chunk."""
    config = dataclasses.replace(naive.TINY, sliding_window=window)
    policy, chunk, kept = Everything(tail=8), 16, 20
    tokens, position = chunked.grid([LONG], chunk)
    plan, count = chunked.Plan(config, policy, kept), len(LONG)
    allowed = np.zeros((config.num_layers, config.num_kv_heads, count, count), bool)
    left = np.zeros((config.num_layers, config.num_kv_heads, count), bool)
    cache = chunked._nothing(plan, 1)
    for c in range(len(tokens)):
        own = position[c, 0][position[c, 0] >= 0]
        allowed[:, :, own] = left[:, :, None]
        allowed[:, :, own[:, None], own[None]] = True
        hidden, cache = chunked._FIRST(
            plan, naive.weights(config), (), cache, tokens[c], position[c], jnp.asarray([kept]), jax.random.key(c)
        )
        left[:] = False
        where = np.asarray(cache.layers.position[:, 0])
        for l, k, s in np.argwhere(where >= 0):
            left[l, k, where[l, k, s]] = True
        assert left.sum(axis=-1).max() <= kept
    dense = naive.forward(naive.weights(config), config, LONG, allowed)
    got = naive.logits_of(naive.weights(config), hidden, config)
    np.testing.assert_allclose(got[0], dense.logits[-1], atol=1e-4)
    assert left.sum(axis=-1).min() == kept
    received = np.stack(dense.probs).sum(axis=2)  # [L, N, S]
    for l, k, s in np.argwhere(where >= 0):
        mass = np.asarray(cache.layers.stats.mass[l, 0, 2 * k : 2 * k + 2, s])
        np.testing.assert_allclose(mass, received[l, 2 * k : 2 * k + 2, where[l, k, s]], atol=1e-4)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_policy_evicts_or_says_why_not(tiny, name):
    policy = _small(name)
    if policy.offline:
        with pytest.raises(ConfigError, match=f"{policy.name} cannot evict while a prompt is read in chunks: .*"):
            chunked.check(policy, 64)
        return
    policy = policy.bind(tiny.tokenizer).fit(24)
    kept = policy.most_kept(24, 75, naive.TINY)
    plan = chunked.Plan(naive.TINY, policy, 75 if name == "full" else kept)
    weights = policy.init(jax.random.key(0)) if policy.learner else ()
    _, cache, _ = chunked.read(
        plan, naive.weights(), weights, [LONG, SHORT], 64, jnp.asarray([24, 24]), jax.random.key(0)
    )
    held = np.sum(np.asarray(cache.layers.position) >= 0, axis=-1)  # [L, B, K]
    assert cache.length.tolist() == [75, 21]
    if name == "full":
        assert held.tolist() == [[[75, 75], [21, 21]]] * 2
    else:
        assert 1 <= held[:, 0].mean() <= 24 and held[:, 1].mean() == 21


def _small(name):
    """A policy of the tiny model's shape."""
    shapes = {
        "kvp": dict(heads=(2, 2), width=8), "kvzap": dict(heads=(2, 2), width=32),
        "rlkv": dict(heads=(2, 2), sinks=2, recent=8),
    }  # fmt: skip
    return make(name, **shapes.get(name, {}))


def test_memory_does_not_depend_on_the_prompt():
    """From 8K to 128K tokens, counted in bytes that live at once, with one compiled program for all."""
    policy = make("h2o")
    plan = chunked.Plan(naive.TINY, policy, 128)
    peaks = {}
    for length in (8_192, 131_072):
        prompt = naive.some_tokens(length)
        most = 0
        tokens, position = chunked.grid([prompt], 512)
        cache = chunked._nothing(plan, 1)
        for c in range(len(tokens)):
            step = chunked._NEXT if c else chunked._FIRST
            hidden, cache = step(
                plan, naive.weights(), (), cache, tokens[c], position[c], jnp.asarray([128]), jax.random.key(0)
            )
            most = max(most, sum(x.nbytes for x in jax.live_arrays()))
        peaks[length] = most
        assert np.asarray(cache.layers.position).max() == length - 1
    assert peaks[131_072] <= 1.01 * peaks[8_192]


def test_generate(tiny):
    prompts = [LONG, SHORT]
    whole = dcache.generate(tiny, prompts, "h2o", 0.999, max_new_tokens=8, evict_every=0)
    parts = dcache.generate(tiny, prompts, "h2o", 0.999, max_new_tokens=8, evict_every=0, prefill_chunk=32)
    assert whole.tokens[0][:1].tolist() == parts.tokens[0][:1].tolist()
    small = dcache.generate(tiny, prompts, "h2o", 24, max_new_tokens=8, evict_every=4, prefill_chunk=32)
    assert small.cache_bytes == 2 * (24 + 4) * tiny.config.kv_bytes_per_token()
    compiled = ahead._compiled.cache_info().misses
    again = dcache.generate(
        tiny, [naive.some_tokens(2000), SHORT], "h2o", 24, max_new_tokens=8, evict_every=4, prefill_chunk=32
    )
    assert ahead._compiled.cache_info().misses == compiled and again.prompt_tokens == 2021


@pytest.mark.parametrize(
    "arguments,message",
    [
        (dict(policy="kvzip", prefill_chunk=32), "kvzip cannot evict .* reads the whole prompt a second time"),
        (dict(policy="snapkv", budget=200, prefill_chunk=16), "last 18 queries; .* at least that many tokens, not 16"),
        (dict(policy="h2o", prefill_chunk=-1), "prefill_chunk -1"),
    ],
)
def test_refuses(tiny, arguments, message):
    with pytest.raises(ConfigError, match=message):
        dcache.generate(tiny, [LONG], **dict(budget=40, max_new_tokens=2) | arguments)


def test_grid():
    tokens, position = chunked.grid([np.arange(1, 6, dtype=np.int32), np.asarray([9], np.int32)], 3)
    assert tokens.tolist() == [[[0, 1, 2], [0, 0, 0]], [[3, 4, 5], [0, 0, 9]]]
    e = EMPTY
    assert position.tolist() == [[[e, 0, 1], [e, e, e]], [[2, 3, 4], [e, e, 0]]]
