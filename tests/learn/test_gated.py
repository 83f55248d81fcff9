"""The gated model against the plain and the naive one, and what it samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import model
from dcache.learn import gated
from tests import naive
from tests.naive import TINY

L, K = TINY.num_layers, TINY.num_kv_heads
P, A, T = 24, 3, 4
LOCAL = {"sinks": 2, "recent": 5}
sample_jit = jax.jit(gated.sample, static_argnums=1, static_argnames=("samples", "horizon", "sinks", "recent"))
log_probs_jit = jax.jit(gated.answer_log_probs, static_argnums=1, static_argnames=("sinks", "recent"))


def answers():
    return np.stack([naive.some_tokens(T, seed=s) for s in range(A)])


def dense(prompt, answer, gates):
    """f64[T]: log-probabilities of an answer by the naive model; gates 0 or 1."""
    text = np.concatenate([prompt, answer])
    t, s = np.arange(len(text))[:, None], np.arange(len(text))[None]
    local = (s < LOCAL["sinks"]) | (s > t - LOCAL["recent"])
    allowed = np.where(np.asarray(gates)[..., None, None] > 0, True, local[None, None])
    log_probs = naive.forward(naive.weights(), TINY, text, allowed).log_probs()
    return np.asarray([log_probs[len(prompt) - 1 + i, token] for i, token in enumerate(answer)])


@pytest.mark.parametrize(
    "gates", [np.ones((L, K)), np.zeros((L, K)), np.asarray([[1, 0], [0, 1]])], ids=["1", "0", "both"]
)
def test_gated_model_with_closed_and_open_gates(gates):
    # Two lengths: the longer prompt fills its row, the other one is padded. Each answer is alone with the prompt.
    gates = gates.astype(np.float32)
    for length in (P, 17):
        prompt = naive.some_tokens(length, seed=9)
        padded = np.full(P, 7, np.int32)
        padded[:length] = prompt
        got = log_probs_jit(naive.weights(), TINY, gates, padded, jnp.int32(length), answers(), **LOCAL)
        want = [dense(prompt, answer, gates) for answer in answers()]
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_open_gates_are_the_plain_model():
    prompt = naive.some_tokens(P, seed=9)
    tree = gated.empty_tree(TINY, 1, P)
    index = jnp.arange(P, dtype=jnp.int32)[None]
    feed = jax.jit(gated.gated_extend, static_argnums=1, static_argnames=("sinks", "recent"))
    hidden, tree = feed(
        naive.weights(), TINY, jnp.ones((L, K)), tree, prompt[None], index, jnp.zeros_like(index), jnp.int32(0), **LOCAL
    )
    got = naive.logits_of(naive.weights(), hidden, TINY)
    want = jax.jit(model.full_logits, static_argnums=1)(naive.weights(), TINY, jnp.asarray(prompt[None]))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(tree.position, index)


def test_gated_attention_mixes_outputs():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in ((1, 3, 4, 8), (1, 2, 5, 8), (1, 2, 5, 8)))
    gate = np.asarray([0.3, 0.8], np.float32)
    full = np.tril(np.ones((3, 5), bool), 2)
    local = np.triu(full, 1)
    want = np.zeros((1, 3, 4, 8))
    for t in range(3):
        for n in range(4):
            for share, seen in ((gate[n // 2], full[t]), (1 - gate[n // 2], local[t])):
                weight = np.exp(k[0, n // 2, seen] @ q[0, t, n] / np.sqrt(8))
                want[0, t, n] += share * (weight / weight.sum()) @ v[0, n // 2, seen]
    got = jax.jit(gated.gated_attention)(*map(jnp.asarray, (q, k, v, gate, full[None], local[None])))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_samples_and_their_log_probs():
    gates = np.random.default_rng(2).uniform(0, 1, (L, K)).astype(np.float32)
    lengths = np.asarray([P, 15], np.int32)
    tokens = np.stack([naive.some_tokens(P, seed=s) for s in (1, 2)])
    params = naive.weights() | {"embed": 0.1 * naive.weights()["embed"]}  # otherwise it is sure of every token

    def draw(key):
        return sample_jit(params, TINY, gates, tokens, lengths, jax.random.key(key), samples=A, horizon=T, **LOCAL)

    drawn, log_probs = draw(0)
    assert drawn.shape == log_probs.shape == (2, A, T) and drawn.dtype == jnp.int32
    # What decoding step by step says of its tokens is what the whole row says, which is differentiated.
    for b in range(2):
        want = log_probs_jit(params, TINY, gates, tokens[b], lengths[b], drawn[b], **LOCAL)
        np.testing.assert_allclose(log_probs[b], want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(drawn, draw(0)[0])
    assert (np.asarray(drawn) != np.asarray(draw(1)[0])).any()
    # First tokens follow the distribution after the prompt.
    first = np.concatenate([np.asarray(draw(key)[0])[0, :, 0] for key in range(100)])
    everything = np.arange(TINY.vocab_size, dtype=np.int32)[:, None].repeat(2, axis=1)
    p = np.exp(log_probs_jit(params, TINY, gates, tokens[0], lengths[0], everything, **LOCAL)[:, 0])
    assert p.sum() == pytest.approx(1.0, abs=1e-4)
    likely = int(p.argmax())
    deviation = float(np.sqrt(p[likely] * (1 - p[likely]) / len(first)))
    assert p[likely] < 0.9
    assert (first == likely).mean() == pytest.approx(float(p[likely]), abs=4 * deviation)
