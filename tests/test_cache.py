"""The cache against a dense model that drops keys: decoding, eviction by mask and by compaction, sharing, bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import cache as kv
from dcache import model
from dcache.attention import Segment, Stats, StatsRequest
from dcache.errors import BudgetError
from tests import naive
from tests.naive import TINY, compact, evict, grow, share

L, K, P, T = TINY.num_layers, TINY.num_kv_heads, 14, 20
CLOSE = dict(rtol=1e-4, atol=2e-4)
WINDOWED = dataclasses.replace(TINY, sliding_window=6)


def keep_of(kind, rng, slots=P, batch=1):
    """Random keep-sets bool[L, B, K, S] that agree across all, per layer, per head, or keep nothing."""
    shape = {"sequence": (1, batch, 1), "layer": (L, batch, 1), "head": (L, batch, K)}.get(kind, (1, batch, 1))
    keep = rng.random((*shape, slots)) < (0.0 if kind == "nothing" else 0.4)
    return np.broadcast_to(keep, (L, batch, K, slots)).copy()


def allowed_after(keep, count=T, prompt=P):
    """bool[L, K, count, count] of the dense model: queries from `prompt` on see only `keep` (bool[L, K, P]) of it."""
    allowed = np.ones((L, K, count, count), bool)
    allowed[:, :, prompt:, :prompt] = keep[:, :, None]
    return allowed


def feed(cache, tokens, start=None, config=TINY, params=None):
    """tokens int[B, T] in one call -> logits [B, T, V], cache."""
    params = naive.weights(config) if params is None else params
    start = None if start is None else jnp.int32(start)
    hidden, cache = naive.extend(params, config, jnp.asarray(tokens, jnp.int32), cache, start)
    return np.asarray(naive.logits_of(params, hidden, config)), cache


@pytest.mark.parametrize("chunks, explicit", [([1] * 6, False), ([1] * 6, True), ([6], True), ([1, 3, 2], True)])
@pytest.mark.parametrize("config", [TINY, WINDOWED], ids=["full", "window"])
def test_decode_equals_prefill(chunks, explicit, config):
    tokens = naive.some_tokens(T)
    want = naive.forward(naive.weights(config), config, tokens).logits
    _, cache = naive.read([tokens[:P]], config=config, pad=T)
    at = P
    for chunk in chunks:
        logits, cache = feed(cache, tokens[None, at : at + chunk], at if explicit else None, config)
        np.testing.assert_allclose(logits[0], want[at : at + chunk], **CLOSE)
        at += chunk
    # And the cache that is left is the one of a prefill, statistics of the last query included.
    _, whole = naive.read([tokens], config=config)
    for name in ("k", "v", "position", "key_norm", "value_norm"):
        np.testing.assert_allclose(getattr(cache.layers, name), getattr(whole.layers, name), **CLOSE)
    np.testing.assert_allclose(cache.layers.stats.mass, whole.layers.stats.mass, **CLOSE)
    np.testing.assert_allclose(cache.layers.stats.last, whole.layers.stats.last, **CLOSE)
    np.testing.assert_allclose(cache.rows, whole.rows, **CLOSE)
    np.testing.assert_allclose(cache.row_entropy, whole.row_entropy, **CLOSE)
    np.testing.assert_array_equal(cache.length, whole.length)


@pytest.mark.parametrize("kind", ["sequence", "layer", "head", "nothing"])
@pytest.mark.parametrize("config", [TINY, WINDOWED], ids=["full", "window"])
def test_masked_equals_compacted_equals_absent(kind, config):
    tokens, rng = naive.some_tokens(T), np.random.default_rng(3)
    _, cache = naive.read([tokens[:P]], naive.EVERYTHING if kind == "sequence" else StatsRequest(mass=True), config)
    for _ in range(2):
        keep = keep_of(kind, rng)
        want = naive.forward(naive.weights(config), config, tokens, allowed_after(keep[:, 0]))
        masked = evict(grow(cache, T - P), jnp.asarray(np.pad(keep, ((0, 0),) * 3 + ((0, T - P),))))
        compacted = compact(cache, jnp.asarray(keep), P - 1, T - P)
        for t in range(P, T):
            a, masked = feed(masked, tokens[None, t : t + 1], config=config)
            b, compacted = feed(compacted, tokens[None, t : t + 1], config=config)
            np.testing.assert_allclose(a[0, 0], want.logits[t], **CLOSE)
            np.testing.assert_allclose(b[0, 0], want.logits[t], **CLOSE)
        # Whatever the cache says of a token (key, statistics) is the same, wherever its slot lies.
        for read in (
            lambda c: c.layers.key_norm,
            lambda c: c.layers.value_norm,
            lambda c: c.layers.k[..., 0],
            lambda c: c.layers.stats.mass[:, :, ::2],
        ):
            x, y = (naive.by_position(read(c), c.layers.position, T) for c in (masked, compacted))
            np.testing.assert_allclose(x, y, **CLOSE)
        if kind == "sequence":
            x, y = (naive.by_position(c.rows[0], np.broadcast_to(c.layers.position[0, 0, 0], c.rows[0].shape), T)
                    for c in (masked, compacted))  # fmt: skip
            np.testing.assert_allclose(x, y, **CLOSE)
            np.testing.assert_allclose(masked.row_entropy, compacted.row_entropy, **CLOSE)


def test_ragged_batch_equals_each_alone():
    # Three prompts of different lengths with their own evictions, padded together, against the dense model of each.
    lengths, rng, steps = (14, 1, 9), np.random.default_rng(5), 4
    texts = [naive.some_tokens(n + steps, seed=n) for n in lengths]
    _, cache = naive.read([t[:n] for t, n in zip(texts, lengths, strict=True)], pad=14)
    keep = keep_of("head", rng, 14, batch=3)
    cache = evict(grow(cache, steps), jnp.asarray(np.pad(keep, ((0, 0),) * 3 + ((0, steps),))))
    wants = [
        naive.forward(naive.weights(), TINY, t, allowed_after(keep[:, b, :, :n], n + steps, n))
        for b, (t, n) in enumerate(zip(texts, lengths, strict=True))
    ]
    for step in range(steps):
        fed = [[t[n + step]] for t, n in zip(texts, lengths, strict=True)]
        logits, cache = feed(cache, fed)
        for b, n in enumerate(lengths):
            np.testing.assert_allclose(logits[b, 0], wants[b].logits[n + step], **CLOSE)
    np.testing.assert_array_equal(cache.length, [n + steps for n in lengths])
    for b, n in enumerate(lengths):  # padding slots were reused, nothing was lost
        alive = naive.alive_tokens(cache, n + steps, b)
        np.testing.assert_array_equal(alive[:, :, :n], keep[:, b, :, :n])
        assert alive[:, :, n:].all()


@pytest.mark.parametrize("seed", range(12))
def test_no_row_is_ever_fully_masked(seed):
    # Random keep-sets per layer and head from everything to nothing: the newest token sees itself, every output is
    # finite, and the attention rows of real queries sum to one over visible slots only.
    rng = np.random.default_rng(seed)
    tokens, config = naive.some_tokens(T), (TINY, WINDOWED)[seed % 2]
    _, cache = naive.read([tokens[:P]], config=config, pad=T)
    share_kept = rng.choice([0.0, 0.1, 1.0], (L, 1, K, 1))
    for t in range(P, P + 3):
        cache = evict(cache, jnp.asarray(rng.random((L, 1, K, T)) < share_kept))
        before = np.asarray(cache.layers.position)
        logits, cache = feed(cache, tokens[None, t : t + 1], config=config)
        assert np.isfinite(logits).all()
        after, last = np.asarray(cache.layers.position), np.asarray(cache.layers.stats.last)
        assert ((after == t).sum(-1) == 1).all()  # it took one empty slot in every layer and head,
        assert ((after != before).sum(-1) == 1).all() and (before[after == t] == -1).all()  # and nothing else moved
        np.testing.assert_allclose(last.sum(-1), 1, rtol=1e-5)
        assert (last[np.repeat(after, 2, axis=2) < 0] == 0).all()
        assert (last[np.repeat(after == t, 2, axis=2)] > 0).all()


@pytest.mark.parametrize("layout", ["stacked", "unrolled"])
def test_reused_slots_over_many_steps(layout):
    # A cache of 10 slots, full from the start, in which 30 tokens follow: before each, every head drops a token of its
    # own choice. The reference keeps for each layer and head the list of tokens it still has.
    slots, steps, rng = 10, 30, np.random.default_rng(11)
    tokens = naive.some_tokens(slots + steps)
    params = naive.weights()
    fed = model.unstack(params) if layout == "unrolled" else params
    _, cache = naive.read([tokens[:slots]])
    cache = kv.unstack(cache) if layout == "unrolled" else cache
    allowed = np.ones((L, K, slots + steps, slots + steps), bool)
    logits = []
    for t in range(slots, slots + steps):
        position = np.asarray(kv.positions(cache))[:, 0]
        keep = np.ones((L, 1, K, slots), bool)
        for l in range(L):
            for k in range(K):
                dropped = rng.integers(slots)
                keep[l, 0, k, dropped] = False
                allowed[l, k, t:, position[l, k, dropped]] = False
        out, cache = feed(evict(cache, jnp.asarray(keep)), tokens[None, t : t + 1], params=fed)
        logits.append(out[0, 0])
    want = naive.forward(params, TINY, tokens, allowed)
    np.testing.assert_allclose(np.stack(logits), want.logits[slots:], **CLOSE)
    alive = naive.alive_tokens(cache, slots + steps)
    np.testing.assert_array_equal(alive, allowed[:, :, -1])
    # The running statistics belong to the tokens that are there now, not to former owners of their slots.
    layers = kv.stacked(cache)
    mass = naive.by_position(layers.stats.mass[:, 0], np.repeat(layers.position[:, 0], 2, axis=1), slots + steps)
    held = np.repeat(alive, 2, axis=1)
    np.testing.assert_allclose(mass[held], want.probs.sum(2)[held], rtol=1e-3, atol=1e-4)
    norm = naive.by_position(layers.value_norm[:, 0], layers.position[:, 0], slots + steps)
    np.testing.assert_allclose(norm[alive], np.linalg.norm(want.values, axis=-1)[alive], rtol=1e-4)


def test_shared_prompt_equals_separate_caches():
    students, rng = 3, np.random.default_rng(7)
    text = np.stack([np.concatenate([naive.some_tokens(P), naive.some_tokens(6, seed=a)]) for a in range(students)])
    _, cache = naive.read([text[0, :P]])
    keep = keep_of("sequence", rng, batch=students)
    keep[:, 0] = True  # one student keeps everything, one nothing
    keep[:, 1] = False
    wide = np.pad(keep, ((0, 0),) * 3 + ((0, T - P),))
    shared = evict(share(cache, students, T - P), jnp.asarray(wide))
    np.testing.assert_array_equal(shared.prompt.k, cache.layers.k)
    outputs = []
    for at, chunk in ((0, 4), (4, 1), (5, 1)):
        out, shared = feed(shared, text[:, P + at : P + at + chunk], at)
        outputs.append(out)
    outputs = np.concatenate(outputs, axis=1)
    for a in range(students):
        want = naive.forward(naive.weights(), TINY, text[a], allowed_after(keep[:, a]))
        np.testing.assert_allclose(outputs[a], want.logits[P:], **CLOSE)
        alone = evict(grow(cache, T - P), jnp.asarray(wide[:, a : a + 1]))
        _, alone = feed(alone, text[a : a + 1, P:], P)
        mine = kv.select(dataclasses.replace(shared, prompt=None), jnp.int32(a))
        for name in ("position", "key_norm", "value_norm", "stats"):
            for x, y in zip(*(jax.tree.leaves(getattr(c.layers, name)) for c in (mine, alone)), strict=True):
                filled = np.repeat(np.asarray(alone.layers.position) >= 0, x.shape[2] // K, axis=2)
                # (the decayed windows of a chunk and of single tokens agree as well)
                np.testing.assert_allclose(np.asarray(x)[filled], np.asarray(y)[filled], **CLOSE)
        filled = np.asarray(alone.layers.position)[0, :, 0] >= 0
        np.testing.assert_allclose(*(np.where(filled, c.rows[0], 0) for c in (mine, alone)), **CLOSE)
        np.testing.assert_allclose(mine.row_entropy, alone.row_entropy, **CLOSE)


def test_shared_prompt_first_free_slot():
    # Without a start the students fill holes of their own tails, never a hole in the shared prompt.
    tokens = naive.some_tokens(T)
    _, cache = naive.read([tokens[:P]])
    keep = np.ones((L, 2, K, P + 3), bool)
    keep[:, 0, :, :5] = False
    shared = evict(share(cache, 2, 3), jnp.asarray(keep))
    for t in range(P, P + 3):
        _, shared = feed(shared, np.broadcast_to(tokens[t], (2, 1)))
    position = np.asarray(shared.layers.position)
    assert (position[:, 0, :, :5] == -1).all()
    assert (position[:, :, :, P:] == np.arange(P, P + 3)).all()
    np.testing.assert_array_equal(shared.prompt.k, cache.layers.k)


def test_share_prompt_refuses_a_batch():
    _, two = naive.read([naive.some_tokens(5), naive.some_tokens(3)])
    with pytest.raises(BudgetError, match="2 sequences"):
        kv.share_prompt(two, 4, 3)
    _, one = naive.read([naive.some_tokens(5)])
    shared = kv.share_prompt(one, 1, 3)
    with pytest.raises(BudgetError):
        kv.share_prompt(shared, 4, 3)
    with pytest.raises(BudgetError, match="shared prompt"):
        kv.compact(shared, jnp.ones((L, 1, K, 8), bool), 4, 0)


def test_compact_refuses_more_than_there_is():
    _, cache = naive.read([naive.some_tokens(5)])
    with pytest.raises(BudgetError, match="6 of 5"):
        kv.compact(cache, jnp.ones((L, 1, K, 5), bool), 6, 0)


def test_compact_layout():
    # Survivors in their former order, then empty slots; fewer survivors than `kept` leave empty slots too.
    tokens = naive.some_tokens(6)
    _, cache = naive.read([tokens, tokens[:3]])
    keep = np.zeros((L, 2, K, 6), bool)
    keep[:, 0, :, [1, 4, 5]] = True
    keep[:, 1, :, [0]] = True
    keep[1, 0, 1] = [True, False, False, False, False, False]
    small = compact(cache, jnp.asarray(keep), 3, 2)
    want = np.full((L, 2, K, 5), -1)
    want[:, 0, :, :3] = [1, 4, 5]
    want[:, 1, :, 0] = 0
    want[1, 0, 1] = [0, -1, -1, -1, -1]
    np.testing.assert_array_equal(small.layers.position, want)
    assert small.layers.k.shape == (L, 2, K, 5, TINY.head_dim)
    np.testing.assert_array_equal(small.layers.v[0, 0, :, :3], cache.layers.v[0, 0][:, np.asarray([1, 4, 5])])
    np.testing.assert_array_equal(
        small.layers.stats.last[1, 0, :2, :3], cache.layers.stats.last[1, 0, :2][:, np.asarray([1, 4, 5])]
    )
    np.testing.assert_array_equal(small.layers.stats.last[1, 0, 2:, 0], cache.layers.stats.last[1, 0, 2:, 0])
    empty = np.repeat(want < 0, 2, axis=2)
    for leaf in jax.tree.leaves(small.layers.stats):
        assert (np.asarray(leaf)[empty] == 0).all()
    assert (np.asarray(small.layers.value_norm)[want < 0] == 0).all()
    np.testing.assert_array_equal(small.length, [6, 3])  # evicted tokens count
    np.testing.assert_array_equal(small.row_entropy, cache.row_entropy)


def test_compact_unrolled_equals_stacked():
    tokens = naive.some_tokens(6)
    _, cache = naive.read([tokens])
    keep = jnp.asarray(keep_of("head", np.random.default_rng(2), 6))
    a, b = compact(cache, keep, 5, 1), compact(kv.unstack(cache), keep, 5, 1)
    assert isinstance(b.layers, tuple) and len(b.layers) == L
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(dataclasses.replace(b, layers=kv.stacked(b))), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("layout", ["stacked", "unrolled"])
def test_donated_cache_is_updated_in_place(layout):
    request = dataclasses.replace(naive.EVERYTHING, last=False)  # `last` is replaced, not read
    params, (_, cache) = naive.weights(), naive.read([naive.some_tokens(40), naive.some_tokens(30)], request, pad=64)
    if layout == "unrolled":
        params, cache = model.unstack(params), kv.unstack(cache)
    cache = jax.tree.map(jnp.copy, cache)  # donated below

    def step(params, token, cache):
        hidden, cache = model.extend(params, TINY, token, cache)
        return model.unembed(params, hidden, TINY), cache

    token = jnp.zeros((2, 1), jnp.int32)
    compiled = jax.jit(step, donate_argnums=2).lower(params, token, cache).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= kv.nbytes(cache, statistics=True) >= kv.nbytes(cache) > 0
    leaves = jax.tree.leaves(cache)
    compiled(params, token, cache)
    assert all(leaf.is_deleted() for leaf in leaves)


def test_bytes_by_hand():
    _, cache = naive.read([naive.some_tokens(6), naive.some_tokens(5)], pad=8)
    keys = 2 * 2 * 8 * 8 * 4 * L  # B K S H f32
    assert kv.nbytes(cache) == 2 * keys == 2 * 8 * TINY.kv_bytes_per_token()
    per_slot = (
        L * 2 * (K * (4 + 4 + 4) + 4 * 3 * 4)
    )  # position and two norms; mass, last and one window of 4 query heads
    rows = 2 * 64 * 8 * 4 + 2 * 64 * 4
    assert kv.nbytes(cache, statistics=True) == 2 * keys + 8 * per_slot + rows + 2 * 4
    assert kv.nbytes(kv.unstack(cache)) == kv.nbytes(cache)
    one = kv.select(cache, jnp.int32(0))
    shared = kv.share_prompt(one, 5, 3)
    # The prompt's keys and values are counted once, each student's tail for itself.
    assert kv.nbytes(shared) == (8 + 5 * 3) * TINY.kv_bytes_per_token()
    half = dataclasses.replace(TINY, dtype="bfloat16")
    _, small = naive.read([naive.some_tokens(8)], StatsRequest(), half)
    assert kv.nbytes(small) == 8 * half.kv_bytes_per_token() == kv.nbytes(one) // 2
    keep = jnp.ones((L, 1, K, 8), bool)
    assert kv.nbytes(compact(one, keep, 2, 1)) == 3 * TINY.kv_bytes_per_token()


def test_select_grow_restrict():
    texts = [naive.some_tokens(6), naive.some_tokens(4)]
    _, cache = naive.read(texts)
    second = kv.select(cache, jnp.int32(1))
    _, alone = naive.read([texts[1]], pad=6)
    for a, b in zip(jax.tree.leaves(second), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    larger = grow(second, 3)
    assert larger.layers.k.shape[-2] == larger.layers.position.shape[-1] == larger.rows.shape[-1] == 9
    assert larger.layers.stats.mass.shape[-1] == larger.layers.stats.windows[32].shape[-1] == 9
    assert (np.asarray(larger.layers.position)[..., 4:] == -1).all()
    np.testing.assert_array_equal(larger.layers.k[..., :6, :], second.layers.k)
    for request in (StatsRequest(), StatsRequest(mass=True), StatsRequest(windows=(32,), last=True), naive.EVERYTHING):
        for layout in (cache, kv.unstack(cache)):
            fewer = kv.restrict(layout, request)
            stats = kv.stacked(fewer).stats
            assert (stats.mass is not None) == request.mass and (stats.last is not None) == request.last
            assert tuple(stats.windows) == request.windows
            assert (fewer.rows is not None) == (fewer.row_entropy is not None) == bool(request.rows)
            assert kv.nbytes(fewer) == kv.nbytes(cache)
    bare = kv.restrict(cache, StatsRequest())
    _, after = feed(grow(bare, 1), [[1], [2]])
    assert after.layers.stats == Stats() and after.rows is None


def test_eviction_touches_positions_only():
    _, cache = naive.read([naive.some_tokens(6)])
    keep = jnp.asarray(keep_of("head", np.random.default_rng(4), 6))
    new = evict(cache, keep)
    np.testing.assert_array_equal(new.layers.position, np.where(keep, cache.layers.position, -1))
    for name in ("k", "v"):
        np.testing.assert_array_equal(getattr(new.layers, name), getattr(cache.layers, name))
    np.testing.assert_array_equal(new.length, cache.length)
    both = evict(kv.unstack(cache), keep)
    np.testing.assert_array_equal(kv.positions(both), new.layers.position)


def test_append_by_hand():
    # One sequence, one head, four own slots after two shared ones; two tokens at own slot 1.
    stats = Stats(mass=jnp.ones((1, 1, 6)))
    layer = kv.LayerCache(
        jnp.zeros((1, 1, 4, 2)), jnp.zeros((1, 1, 4, 2)), jnp.asarray([[[0, 1, 2, -1, -1, -1]]], jnp.int32),
        jnp.asarray([[[1.0, 2, 3, 0, 0, 0]]]), jnp.asarray([[[5.0, 6, 7, 0, 0, 0]]]), stats,
    )  # fmt: skip
    k = jnp.asarray([[[[1.0, 2.0]], [[3.0, 4.0]]]])
    new = kv.append(layer, k, 3 * k, jnp.asarray([[3, 4]], jnp.int32), jnp.asarray([[1]], jnp.int32))
    np.testing.assert_array_equal(new.k[0, 0], [[0, 0], [1, 2], [3, 4], [0, 0]])
    np.testing.assert_array_equal(new.v, 3 * new.k)
    np.testing.assert_array_equal(new.position[0, 0], [0, 1, 2, 3, 4, -1])
    np.testing.assert_allclose(new.key_norm[0, 0], [1, 2, 3, 5**0.5, 5, 0], rtol=1e-6)
    np.testing.assert_allclose(new.value_norm[0, 0], [5, 6, 7, 3 * 5**0.5, 15, 0], rtol=1e-6)
    np.testing.assert_array_equal(new.stats.mass, stats.mass)


def test_first_free():
    position = jnp.asarray([[0, 1, -1, -1], [-1, 2, 3, -1], [4, 5, 6, -1]], jnp.int32)
    np.testing.assert_array_equal(kv.first_free(position), [2, 0, 3])


def test_row_entropies():
    rows = jnp.asarray([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]])
    np.testing.assert_allclose(kv.row_entropies(rows), [np.log(2), 0, 0, np.log(3)], atol=1e-6)


def test_segments_of_an_unrolled_shared_prompt():
    # The unrolled layout takes its layer of the shared prompt: the same logits as the scanned one.
    tokens = naive.some_tokens(T)
    _, cache = naive.read([tokens[:P]], StatsRequest(mass=True, rows=64))
    shared = kv.share_prompt(cache, 2, 3)
    assert isinstance(shared.prompt, Segment)
    fed = np.asarray([[3, 4], [9, 2]])
    a, _ = feed(shared, fed, 0)
    b, flat = feed(kv.unstack(shared), fed, 0, params=model.unstack(naive.weights()))
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)
    assert isinstance(flat.layers, tuple)
