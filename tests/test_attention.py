"""Visibility, attention over segments, and the statistics of prompts and of later queries, against dense references."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache.attention import Segment, Stats, StatsRequest, accumulate, attend, attend_prompt, visible

REQUEST = StatsRequest(mass=True, last=True, windows=(3, 32), rows=64)
attend_prompt_jit = jax.jit(attend_prompt, static_argnums=(4, 5))


def test_visible_causal():
    position = jnp.arange(4, dtype=jnp.int32)
    want = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    np.testing.assert_array_equal(visible(position, position, None), np.asarray(want, bool))


def test_visible_sliding_window():
    position = jnp.arange(5, dtype=jnp.int32)
    want = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    np.testing.assert_array_equal(visible(position, position, 2), np.asarray(want, bool))
    np.testing.assert_array_equal(visible(position, position, 1), np.eye(5, dtype=bool))


def test_visible_holes_and_any_order():
    query, key = jnp.asarray([3, 4, 9], jnp.int32), jnp.asarray([4, -1, 0, 3, -1, 7], jnp.int32)
    want = [[0, 0, 1, 1, 0, 0], [1, 0, 1, 1, 0, 0], [1, 0, 1, 1, 0, 1]]
    np.testing.assert_array_equal(visible(query, key, None), np.asarray(want, bool))
    # A window counts positions, not slots: from 9 with a window of 6 the positions 4 to 9 are seen.
    want = [[0, 0, 1, 1, 0, 0], [1, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 1]]
    np.testing.assert_array_equal(visible(query, key, 6), np.asarray(want, bool))


def test_visible_padding_sees_nothing():
    position = jnp.asarray([0, 1, -1], jnp.int32)
    want = [[1, 0, 0], [1, 1, 0], [0, 0, 0]]
    np.testing.assert_array_equal(visible(position, position, None), np.asarray(want, bool))
    np.testing.assert_array_equal(visible(position, position, 4), np.asarray(want, bool))


def test_visible_batch_axes():
    query = jnp.zeros((2, 1, 3), jnp.int32)
    assert visible(query, jnp.zeros((2, 4, 5), jnp.int32), None).shape == (2, 4, 3, 5)


def random_qkv(key, batch, count, heads=4, kv_heads=2, width=8):
    q, k, v = (jax.random.normal(k, (batch, count, h, width)) for k, h in
               zip(jax.random.split(key, 3), (heads, kv_heads, kv_heads), strict=True))  # fmt: skip
    return q * 2, k.swapaxes(1, 2), v.swapaxes(1, 2)  # attention far from uniform


def dense_attention(q, k, v, seen):
    """One sequence: q [T, N, H], k, v [K, S, H], seen bool[K, T, S] -> output [T, N, H], probabilities [N, T, S]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[0]
    k, v, seen = (np.repeat(x, group, axis=0) for x in (k, v, seen))
    logits = np.einsum("tnh,nsh->nts", q, k) / math.sqrt(q.shape[-1])
    logits[~seen] = -np.inf
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    return np.einsum("nts,nsh->tnh", probs, v), probs


def causal(count, window=None):
    t, s = np.mgrid[:count, :count]
    return (s <= t) & (s > t - (window or count + 1))


def position_of(lengths, width):
    index = np.arange(width)[None]
    return jnp.asarray(np.where(index < np.asarray(lengths)[:, None], index, -1), jnp.int32)


# Below, at and above one block of 128 queries; above 8 key prefixes of one block, so that a prefix has two blocks.
@pytest.mark.parametrize(
    "lengths, window",
    [((1, 1), None), ((128, 1), None), ((129, 127), None), ((129, 40), 20), ((300, 257), None), ((1100, 1025), None),
     ((1100, 700), 150)],
)  # fmt: skip
def test_prompt_statistics(getkey, lengths, window):
    width = max(lengths)
    q, k, v = random_qkv(getkey(), len(lengths), width)
    position = position_of(lengths, width)
    out, stats, rows = attend_prompt_jit(q, k, v, position, REQUEST, window)
    assert set(stats.windows) == {3, 32} and rows.shape == (len(lengths), 64, width)
    for b, n in enumerate(lengths):
        seen = np.broadcast_to(causal(n, window), (2, n, n))
        want, probs = dense_attention(q[b, :n], k[b, :, :n], v[b, :, :n], seen)
        np.testing.assert_allclose(out[b, :n], want, rtol=1e-4, atol=1e-5)
        close = dict(rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(stats.mass[b, :, :n], probs.sum(1), **close)
        np.testing.assert_allclose(stats.last[b, :, :n], probs[:, -1], **close)
        for w in (3, 32):
            np.testing.assert_allclose(stats.windows[w][b, :, :n], probs[:, -w:].sum(1), **close)
        ring = np.zeros((64, n))
        for p in range(max(0, n - 64), n):
            ring[p % 64] = probs[:, p].mean(0)
        np.testing.assert_allclose(rows[b, :, :n], ring, **close)
        for padded in (stats.mass, stats.last, *stats.windows.values(), rows):
            assert (np.asarray(padded[b, ..., n:]) == 0).all()
    assert np.isfinite(out).all()


def test_nothing_unasked_is_computed(getkey):
    q, k, v = random_qkv(getkey(), 1, 6)
    _, stats, rows = attend_prompt_jit(q, k, v, position_of([6], 6), StatsRequest(), None)
    assert (stats.mass, stats.last, stats.windows, rows) == (None, None, {}, None)
    _, stats, rows = attend_prompt_jit(q, k, v, position_of([6], 6), StatsRequest(windows=(2,)), None)
    assert stats.mass is None and stats.last is None and set(stats.windows) == {2} and rows is None


def test_windows_may_be_longer_than_the_prompt(getkey):
    q, k, v = random_qkv(getkey(), 2, 10)
    request = StatsRequest(windows=(1_000_000,), rows=64, last=True)
    _, stats, rows = attend_prompt_jit(q, k, v, position_of([10, 6], 10), request, None)
    for b, n in enumerate((10, 6)):
        _, probs = dense_attention(q[b, :n], k[b, :, :n], v[b, :, :n], np.broadcast_to(causal(n), (2, n, n)))
        np.testing.assert_allclose(stats.windows[1_000_000][b, :, :n], probs.sum(1), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(stats.last[b, :, :n], probs[:, -1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(rows[b, :n, :n], probs.mean(0), rtol=1e-4, atol=1e-5)
        assert rows.shape == (2, 64, 10)


def test_request_union_and_tail():
    a, b = StatsRequest(mass=True, windows=(8, 32)), StatsRequest(last=True, windows=(4, 8), rows=16)
    assert a | b == b | a == StatsRequest(mass=True, last=True, windows=(4, 8, 32), rows=16)
    assert StatsRequest().tail == 0 and StatsRequest(last=True).tail == 1 and (a | b).tail == 32
    assert StatsRequest(rows=64, windows=(8,)).tail == 64


def test_prefill_memory_is_linear():
    # Quadratic memory would be 4 times as much, and one T x T matrix of one head alone 64 MiB at 4,096.
    def temporary(count):
        q = jax.ShapeDtypeStruct((1, count, 4, 8), jnp.float32)
        kv = jax.ShapeDtypeStruct((1, 2, count, 8), jnp.float32)
        position = jax.ShapeDtypeStruct((1, count), jnp.int32)
        compiled = attend_prompt_jit.lower(q, kv, kv, position, REQUEST, None).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporary(2048), temporary(4096)
    assert large < 2.5 * small
    assert large < 4096 * 4096 * 4


def test_no_square_array_in_the_program():
    count = 1500
    q, kv = jnp.zeros((1, count, 4, 8)), jnp.zeros((1, 2, count, 8))

    traced = jax.make_jaxpr(attend_prompt, static_argnums=(4, 5))(q, kv, kv, position_of([count], count), REQUEST, None)
    shapes = [[int(d) for d in dims.split(",")] for dims in re.findall(r"\[([0-9,]+)\]", str(traced))]
    assert [1, 4, count] in shapes  # the attention mass
    assert not [s for s in shapes if sum(d >= 1024 for d in s) >= 2]


def test_attend_segments_equal_one(getkey):
    # Two segments are the same as their concatenation; a leading axis of 1 is shared by the batch.
    q, k, v = random_qkv(getkey(), 3, 7)
    shared = Segment(k[:1, :, :4], v[:1, :, :4])
    own = Segment(k[:, :, 4:], v[:, :, 4:])
    position = jax.random.permutation(getkey(), jnp.asarray([-1, 0, 1, 2, 3, 4, 5], jnp.int32))
    position = jnp.stack([jax.random.permutation(k_, position) for k_ in jax.random.split(getkey(), 6)]).reshape(
        3, 2, 7
    )
    query = jnp.asarray([[3, 4], [5, 9], [6, 7]], jnp.int32)
    out, probs = attend(q[:, :2], [shared, own], query, position)
    repeat = [jnp.concatenate([jnp.repeat(x[:1, :, :4], 3, 0), x[:, :, 4:]], axis=2) for x in (k, v)]
    for b in range(3):
        seen = np.asarray(visible(query[b][None], position[b], None))
        want, p = dense_attention(q[b, :2], repeat[0][b], repeat[1][b], seen)
        np.testing.assert_allclose(out[b], want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(probs[b], p, rtol=1e-5, atol=1e-6)


def test_attend_gives_exactly_nothing_to_hidden_slots(getkey):
    # Also when a hidden key would have had an overwhelming logit, or holds an infinity left by padding.
    q, k, v = random_qkv(getkey(), 1, 6)
    k, v = k.at[:, :, 2].mul(1e4), v.at[:, :, 2].set(1e30)
    position = jnp.asarray([0, 1, -1, 3, 4, 9], jnp.int32)
    out, probs = attend(q[:, :1], [Segment(k, v)], jnp.asarray([[4]], jnp.int32), jnp.broadcast_to(position, (1, 2, 6)))
    assert (np.asarray(probs)[..., [2, 5]] == 0).all()
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-6)
    assert np.abs(out).max() < 100


def test_probabilities_are_float32_for_bfloat16(getkey):
    q, k, v = (x.astype(jnp.bfloat16) for x in random_qkv(getkey(), 1, 100))
    position = jnp.arange(100, dtype=jnp.int32)
    out, probs = attend(q, [Segment(k, v)], position[None], jnp.broadcast_to(position, (1, 2, 100)))
    assert out.dtype == jnp.bfloat16 and probs.dtype == jnp.float32
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-5)
    want, p = dense_attention(
        *(x[0].astype(jnp.float32) for x in (q, k, v)), np.broadcast_to(causal(100), (2, 100, 100))
    )
    np.testing.assert_allclose(probs[0], p, rtol=1e-3, atol=1e-5)  # the inputs are rounded, the arithmetic is not
    np.testing.assert_allclose(out[0].astype(jnp.float32), want, atol=0.03)


def test_accumulate_by_hand():
    old = jnp.asarray([[[4.0, 2.0, 9.0]]])
    stats = Stats(mass=old, last=old, windows={4: old})
    probs = jnp.asarray([[[[0.5, 0.2, 0.3], [0.1, 0.0, 0.9]]]])
    new = accumulate(stats, probs, jnp.asarray([[[True, True, False]]]))  # the third slot was empty: it starts at 0
    np.testing.assert_allclose(new.mass, [[[4.6, 2.2, 1.2]]], rtol=1e-6)
    np.testing.assert_allclose(new.last, [[[0.1, 0.0, 0.9]]], rtol=1e-6)
    decayed = [(4.0 * 0.75 + 0.5) * 0.75 + 0.1, (2.0 * 0.75 + 0.2) * 0.75, 0.3 * 0.75 + 0.9]
    np.testing.assert_allclose(new.windows[4], [[decayed]], rtol=1e-6)


def test_accumulate_chunk_equals_single_queries(getkey):
    probs = jax.random.uniform(getkey(), (2, 4, 5, 9))
    stats = Stats(*jax.random.uniform(getkey(), (2, 2, 4, 9)), windows={3: jax.random.uniform(getkey(), (2, 4, 9))})
    filled = jax.random.bernoulli(getkey(), 0.5, (2, 4, 9))
    jitted = jax.jit(accumulate)
    whole, single = jitted(stats, probs, filled), stats
    for t in range(5):
        single = jitted(single, probs[:, :, t : t + 1], filled if t == 0 else jnp.ones_like(filled))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(single), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_accumulate_passes_on_what_is_absent(getkey):
    new = accumulate(Stats(), jax.random.uniform(getkey(), (1, 2, 1, 3)), jnp.ones((1, 2, 3), bool))
    assert (new.mass, new.last, new.windows) == (None, None, {})


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("shared", [False, True])
def test_products_of_all_backends_agree(monkeypatch, count, shared):
    """CPUs multiply in a form of their own: the others' gives the same output and probabilities."""
    q, k, v = random_qkv(jax.random.key(3), 3, 40)
    segments = [Segment(k[:1], v[:1]), Segment(k[:, :, :7], v[:, :, :7])] if shared else [Segment(k, v)]
    slots = sum(segment.k.shape[2] for segment in segments)
    at = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (3, 2, slots)).at[1, 0, 5:9].set(-1)
    last = jnp.broadcast_to(jnp.arange(slots - count, slots, dtype=jnp.int32), (3, count))
    found = {}
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr("dcache.attention.platform", lambda backend=backend: backend)
        found[backend] = attend(q[:, :count], segments, last, at)
    for own, others in zip(found["cpu"], found["gpu"], strict=True):
        np.testing.assert_allclose(own, others, rtol=1e-5, atol=1e-6)
