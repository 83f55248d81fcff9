"""The kernel for single queries over a cache with holes, interpreted on CPU, against dense attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache.kernels import decode
from tests.kernels import dense


# Several blocks of which the last one lies partly outside the arrays, whole blocks, and less than one; G = 3, 1 and 2.
@pytest.mark.parametrize(
    "dtype, heads, kv_heads, width, slots",
    [("float32", 6, 2, 8, 300), ("float32", 2, 2, 16, 5), ("bfloat16", 4, 2, 64, 384)],
)
def test_holes(getkey, dtype, heads, kv_heads, width, slots):
    q, k, v = dense.random_qkv(getkey(), 3, slots, heads, kv_heads, width, dtype)
    q = q[:, 0]
    for share in (0.5, 0.02, 1.0):
        seen = jax.random.bernoulli(getkey(), share, (3, kv_heads, slots)).at[:, :, 3].set(True)
        seen = seen.at[2].set(False)  # a sequence that sees nothing
        out, probs = decode.attend(q, k, v, seen, block=128, interpret=True)
        assert out.dtype == q.dtype and probs.dtype == jnp.float32
        assert (dense.float64(out[2]) == 0).all() and (np.asarray(probs[2]) == 0).all()
        for b in range(2):
            want, _, p = dense.attention(q[b][None], k[b], v[b], np.asarray(seen[b])[:, None])
            rounding = 0.0 if dtype == "float32" else 2**-6
            np.testing.assert_allclose(dense.float64(out[b]), want[0], rtol=1e-4, atol=1e-5 + rounding)
            np.testing.assert_allclose(probs[b], p[:, 0], rtol=1e-4, atol=1e-6)
            assert (np.asarray(probs[b])[~np.repeat(seen[b], heads // kv_heads, axis=0)] == 0).all()


def test_blocks_with_nothing_visible_are_not_read(getkey):
    # At the start, in the middle and at the end; what they hold would spoil every product.
    q, k, v = dense.random_qkv(getkey(), 1, 640, 2, 1, 8, "float32")
    seen = np.zeros((1, 1, 640), bool)
    seen[..., [130, 255, 390]] = True
    dead = np.repeat([True, False, True, False, True], 128)
    poisoned = (jnp.where(dead[None, None, :, None], jnp.nan, x) for x in (k, v))
    out, probs = decode.attend(q[:, 0], *poisoned, jnp.asarray(seen), block=128, interpret=True)
    want, _, p = dense.attention(q[0, :1], k[0], v[0], seen[0][:, None])
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(probs, p.swapaxes(0, 1), rtol=1e-5, atol=1e-7)


def test_hidden_slots_give_exactly_nothing(getkey):
    # Also when a hidden key would have had an overwhelming logit, or a value left by padding is huge.
    q, k, v = dense.random_qkv(getkey(), 1, 6, 4, 2, 8, "float32")
    k, v = k.at[:, :, 2].mul(1e4), v.at[:, :, 2].set(1e30)
    seen = jnp.broadcast_to(jnp.asarray([True, True, False, True, True, False]), (1, 2, 6))
    out, probs = decode.attend(q[:, 0], k, v, seen, interpret=True)
    assert (np.asarray(probs)[..., [2, 5]] == 0).all() and np.abs(out).max() < 100
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-6)
