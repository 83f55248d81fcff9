"""The kernels for prompts, interpreted on CPU, against dense attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache.kernels import prefill
from tests.kernels import dense

SLOTS = 300  # three blocks of 128, the last one partly outside the arrays
# The shape is the same for all, so that one program serves them: full, short, empty, one token, block borders.
LENGTHS = [(300, 257, 0), (1, 128, 129)]
WIDTHS = (SLOTS, 1, 40, 1000)


# Query heads per key/value head 2, 3 and 1; windows that are shorter than a block, longer than one, and none.
@pytest.mark.parametrize(
    "dtype, heads, kv_heads, width, window",
    [("float32", 4, 2, 8, None), ("float32", 3, 1, 16, 150), ("bfloat16", 2, 2, 64, 20)],
)
def test_prompt(getkey, dtype, heads, kv_heads, width, window):
    q, k, v = dense.random_qkv(getkey(), 3, SLOTS, heads, kv_heads, width, dtype)
    by_head = q.transpose(0, 2, 3, 1)
    close = dict(rtol=1e-4, atol=1e-5)
    for lengths in LENGTHS:
        length = jnp.asarray(lengths, jnp.int32)
        out, lse, entropy = prefill.attend(
            by_head, k, v, length, sliding_window=window, entropy=True, block=128, interpret=True
        )
        sums = prefill.column_sums(
            by_head, k, lse, jnp.zeros_like(length), length, widths=WIDTHS, sliding_window=window, block=128, interpret=True
        )  # fmt: skip
        assert out.dtype == q.dtype and {x.dtype for x in (lse, entropy, sums)} == {jnp.dtype("float32")}
        out = out.transpose(0, 3, 1, 2)
        for b, n in enumerate(lengths):
            for x in (out[b, n:], lse[b, :, n:], entropy[b, :, n:], sums[b, :, :, n:]):
                assert (dense.float64(x) == 0).all()  # padding
            if n == 0:
                continue
            seen = np.broadcast_to(dense.causal(n, window), (kv_heads, n, n))
            want, want_lse, probs = dense.attention(q[b, :n], k[b, :, :n], v[b, :, :n], seen)
            rounding = 0.0 if dtype == "float32" else 2**-7  # of the output and of the probabilities before it
            np.testing.assert_allclose(dense.float64(out[b, :n]), want, rtol=1e-4, atol=1e-5 + 2 * rounding)
            np.testing.assert_allclose(lse[b, :, :n], want_lse, **close)
            np.testing.assert_allclose(entropy[b, :, :n], dense.entropy(probs), **close)
            for row, count in enumerate(WIDTHS):
                np.testing.assert_allclose(sums[b, :, row, :n], probs[:, -count:].sum(1), **close)


def test_without_entropy_and_in_one_block_nothing_changes(getkey):
    q, k, v = dense.random_qkv(getkey(), 2, SLOTS, 4, 2, 8, "float32")
    q, length = q.transpose(0, 2, 3, 1), jnp.asarray([300, 40], jnp.int32)
    out, lse, entropy = prefill.attend(q, k, v, length, interpret=True)
    want, want_lse, _ = prefill.attend(q, k, v, length, block=128, interpret=True)
    assert entropy is None
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


def test_column_sums_of_a_tail(getkey):
    # Queries that begin in the middle of each prompt, at a place of its own, give what all queries give.
    q, k, v = dense.random_qkv(getkey(), 2, SLOTS, 2, 1, 8, "float32")
    q, length, first = q.transpose(0, 2, 3, 1), jnp.asarray([300, 200], jnp.int32), jnp.asarray([172, 72], jnp.int32)
    lse = prefill.attend(q, k, v, length, block=128, interpret=True)[1]
    whole = prefill.column_sums(q, k, lse, 0 * first, length, widths=(5, 128), block=128, interpret=True)
    q, lse = (jnp.stack([x[b, ..., at : at + 128] for b, at in enumerate((172, 72))]) for x in (q, lse))
    tail = prefill.column_sums(q, k, lse, first, length, widths=(5, 128), block=128, interpret=True)
    np.testing.assert_allclose(tail, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300])
def test_blocks_that_are_skipped_hold_nothing(window):
    # What `_keys_of` and `_queries_of` leave out, pair by pair of blocks, is what no query sees.
    block, slots = 128, 1024
    keys = jax.jit(lambda i, length: prefill._keys_of(i, block, length, window))
    queries = jax.jit(lambda j, length: prefill._queries_of(j, block, block, slots, 0, length, 200, window))
    for length in (1, 128, 700, 1024):
        seen = dense.causal(slots, window)
        seen[length:] = False
        counted = seen & (np.arange(slots) >= length - 200)[:, None]
        for x in range(slots // block):
            rows = slice(x * block, (x + 1) * block)
            for found, (first, last) in (
                (seen[rows].any(0), keys(x, length)), (counted[:, rows].any(1), queries(x, length)),
            ):  # fmt: skip
                needed = np.flatnonzero(found.reshape(-1, block).any(1))
                assert needed.size == 0 or (first == needed[0] and last == needed[-1])
                assert 0 <= last < slots // block
