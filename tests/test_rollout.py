"""Teacher and students against the dense model, decision by decision."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import budget as budgets
from dcache import cache as kv
from dcache import model, rollout, signals
from dcache.attention import EMPTY, StatsRequest
from dcache.errors import ConfigError
from dcache.policies import make
from tests import naive
from tests.naive import TINY

L, K, P, T = TINY.num_layers, TINY.num_kv_heads, 40, 6
NAMES = signals.EXTENDED_SIGNALS
POLICY = make("distillcache", hidden=8)
CLOSE = dict(rtol=1e-3, atol=2e-4)

teacher_jit = jax.jit(rollout.teacher_log_probs, static_argnums=1)
students_jit = jax.jit(
    rollout.sample_students, static_argnums=(1, 2), static_argnames=("samples", "evict_every", "law", "minimum", "most")
)
follow_jit = jax.jit(rollout.follow, static_argnums=(1, 2), static_argnames=("evict_every", "minimum"))
teach_jit = jax.jit(rollout.teach, static_argnums=(2, 9), static_argnames=("decode", "unseen"))
observe_jit = jax.jit(type(make("oracle")).observe, static_argnums=(0, 3))
TEXT = naive.some_tokens(P + T, seed=4)


@functools.cache
def policy_params():
    """Random in the last layer too, so that scores differ."""
    params = POLICY.init(jax.random.key(1))
    return jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), params)


@functools.cache
def setting():
    """Weights, the cache of one prompt, the teacher's log-probabilities."""
    params = naive.weights()
    _, cache = naive.read([TEXT[:P]], POLICY.needs)
    return params, cache, teacher_jit(params, TINY, cache, jnp.asarray(TEXT[P:]))


def test_teacher_log_probs():
    params, _, teacher = setting()
    np.testing.assert_allclose(teacher, naive.forward(params, TINY, TEXT).log_probs()[P:], **CLOSE)


def kl(p, q):
    return np.sum(np.exp(p) * (p - q), -1)


def test_kl_divergence_by_hand():
    p, q = (
        jnp.log(jnp.asarray(x)) for x in ([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]], [[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]])
    )
    np.testing.assert_allclose(rollout.kl_divergence(p, q), [0.25 * np.log(2), 0], atol=1e-6)


def standardised(raw, alive):
    """Features in float64, of the tokens that are there: raw [T, F]."""
    logged = [n in ("alpha", "sigma") or n.startswith(("window", "last")) for n in NAMES]
    x = np.where(logged, np.log(np.maximum(raw, 0) + 1e-8), raw)[alive]
    deviation = x.std(0)
    # A signal that is the same for all tokens says nothing: 0 (a neighbourhood can span the whole short text).
    return np.where(deviation > 1e-9, (x - x.mean(0)) / np.where(deviation > 1e-9, deviation, 1.0), 0.0)


@pytest.mark.parametrize(
    "law, evict_every", [("plackett_luce", 0), ("plackett_luce", 1), ("plackett_luce", 3), ("subset", 3)]
)
def test_students_equal_single_dense_runs(law, evict_every):
    # Every student is run alone on the dense model with the keep-sets that were drawn for it.
    params, cache, teacher = setting()
    samples, ratio, minimum = 3, 0.3, 4
    rolled = students_jit(
        params, TINY, POLICY, policy_params(), cache, jnp.asarray(TEXT[P:]), teacher, jnp.float32(ratio),
        jax.random.key(8), samples=samples, evict_every=evict_every, law=law, minimum=minimum, most=P + T,
    )  # fmt: skip
    chunk = evict_every or T
    decisions = T // chunk
    assert rolled.features.shape == (decisions, samples, P + T, len(NAMES)) and rolled.kl.shape == (samples, T)
    teacher_dense = naive.forward(params, TINY, TEXT).log_probs()[P:]
    drawn = set()
    for a in range(samples):
        allowed = np.ones((L, K, P + T, P + T), bool)
        alive = np.arange(P + T) < P
        for d in range(decisions):
            seen = P + d * chunk
            budget = int(rolled.budget[d, a])
            assert budget == budgets.tokens_kept(ratio, seen, minimum)
            np.testing.assert_array_equal(rolled.filled[d, a], alive)
            before = naive.forward(params, TINY, TEXT[:seen], allowed[:, :, :seen, :seen])
            held = np.broadcast_to(alive[:seen], (L, K, seen))
            raw = np.stack([naive.signal(n, before, held, P) for n in NAMES], -1)
            got = np.asarray(rolled.features[d, a])
            np.testing.assert_allclose(got[alive], standardised(raw, alive[:seen]), rtol=1e-2, atol=1e-2)
            assert (got[~alive] == 0).all()
            keep = np.zeros(P + T, bool)
            keep[np.asarray(rolled.order[d, a, :budget])] = True
            assert keep.sum() == budget and not keep[~alive].any()
            if d == 0:
                drawn.add(keep.tobytes())
            allowed[:, :, seen:, :] &= keep | (np.arange(P + T) >= seen)
            alive = keep | ((np.arange(P + T) >= seen) & (np.arange(P + T) < seen + chunk))
        student = naive.forward(params, TINY, TEXT, allowed).log_probs()[P:]
        np.testing.assert_allclose(rolled.kl[a], kl(teacher_dense, student), rtol=1e-2, atol=1e-4)
        assert rolled.kl[a].max() > 1e-3
    assert len(drawn) == samples  # each student draws for itself


def test_keeping_everything_costs_nothing():
    params, cache, teacher = setting()
    for evict_every in (0, 3):
        rolled = students_jit(
            params, TINY, POLICY, policy_params(), cache, jnp.asarray(TEXT[P:]), teacher, jnp.float32(1.0),
            jax.random.key(8), samples=3, evict_every=evict_every, law="plackett_luce", minimum=4, most=P + T,
        )  # fmt: skip
        np.testing.assert_allclose(rolled.kl, 0, atol=1e-5)
        assert rolled.kl.min() > -1e-5
        np.testing.assert_array_equal(
            rolled.budget[:, 0], [P + d * (evict_every or T) for d in range(len(rolled.budget))]
        )


def test_one_chunk_is_the_same_as_evict_every_horizon():
    params, cache, teacher = setting()
    one, whole = (
        students_jit(
            params, TINY, POLICY, policy_params(), cache, jnp.asarray(TEXT[P:]), teacher, jnp.float32(0.25),
            jax.random.key(3), samples=3, evict_every=e, law="plackett_luce", minimum=4, most=P + T,
        )
        for e in (0, T)
    )  # fmt: skip
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(x, y)


def test_same_key_same_students():
    params, cache, teacher = setting()
    a, b, c = (
        students_jit(
            params, TINY, POLICY, policy_params(), cache, jnp.asarray(TEXT[P:]), teacher, jnp.float32(0.25), key,
            samples=3, evict_every=3, law="plackett_luce", minimum=4, most=P + T,
        )
        for key in (jax.random.key(3), jax.random.key(3), jax.random.key(4))
    )  # fmt: skip
    np.testing.assert_array_equal(a.order, b.order)
    np.testing.assert_array_equal(a.kl, b.kl)
    assert not np.array_equal(a.order, c.order)


def h2o_scores(dense):
    return dense.probs.sum(2).reshape(L, K, 2, -1).mean(2)


def tova_scores(dense):
    last = dense.probs[:, :, -1].mean(1, keepdims=True)
    return np.broadcast_to(last, (L, K, last.shape[-1]))


@pytest.mark.parametrize("method, evict_every", [("h2o", 0), ("h2o", 1), ("tova", 2)])
def test_follow_equals_token_by_token(method, evict_every):
    # Several budgets at once against a loop over tokens with a list of kept tokens for each layer and head.
    params, cache, teacher = setting()
    policy, minimum = make(method), 4
    arms = [0.3, 0.5, 1.0, 7, 1]  # three ratios, two counts
    encoded = [budgets.encode(arm) for arm in arms]
    _, cache = naive.read([TEXT[:P]], StatsRequest(mass=True, last=True))
    log_q, first = follow_jit(
        params, TINY, policy, (), cache, jnp.asarray(TEXT[P:]), jnp.asarray(encoded, jnp.float32), jax.random.key(0),
        evict_every=evict_every, minimum=minimum,
    )  # fmt: skip
    assert log_q.shape == (len(arms), T, TINY.vocab_size) and first.shape == (L, len(arms), K, P)
    for a, arm in enumerate(arms):
        allowed = np.ones((L, K, P + T, P + T), bool)
        alive = np.ones((L, K, P), bool)
        for seen in range(P, P + T):
            if seen == P or (evict_every and (seen - P) % evict_every == 0):
                before = naive.forward(params, TINY, TEXT[:seen], allowed[:, :, :seen, :seen])
                budget = budgets.tokens_kept(arm, seen, minimum)
                count = int(0.5 * budget) if method == "h2o" else 1
                protected = np.broadcast_to(np.arange(seen) >= seen - count, alive.shape)
                scores = h2o_scores(before) if method == "h2o" else tova_scores(before)
                alive = naive.top(scores, alive, budget, protected)
                if seen == P:
                    np.testing.assert_array_equal(first[:, a], alive)
                allowed[:, :, seen:, :seen] &= alive[:, :, None]
            alive = np.concatenate([alive, np.ones((L, K, 1), bool)], axis=-1)
        want = naive.forward(params, TINY, TEXT, allowed).log_probs()[P:]
        np.testing.assert_allclose(log_q[a], want, **CLOSE)
    np.testing.assert_allclose(log_q[2], teacher, **CLOSE)  # a ratio of 1 keeps everything


def test_follow_distillcache_keeps_the_best_scores():
    params, cache, _ = setting()
    budget = jnp.asarray([budgets.encode(12)])
    _, first = follow_jit(
        params, TINY, POLICY, policy_params(), cache, jnp.asarray(TEXT[P:]), budget, jax.random.key(0), evict_every=0
    )
    scores = np.asarray(jax.jit(POLICY.scores)(policy_params(), cache, jax.random.key(0)))[0]
    want = naive.top(scores, np.ones(P, bool), 12)
    assert (np.asarray(first) == want).all()


# With tied embeddings a random model repeats its last token for ever.
UNTIED = dataclasses.replace(TINY, tie_embeddings=False)


def greedy(params, prompt, count):
    text = list(prompt)
    for _ in range(count):
        text.append(int(naive.forward(params, UNTIED, np.asarray(text)).logits[-1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("layout", ["stacked", "unrolled"])
def test_teach(layout):
    params = naive.weights(UNTIED)
    prompts = [naive.some_tokens(12, seed=1), naive.some_tokens(9, seed=2), naive.some_tokens(5, seed=3)]
    given = np.asarray([[1, 2, 3, 4, 5, 6], [7, 8, 0, 0, 0, 0], [9, 9, 9, 9, 9, 9]], np.int32)
    padded = np.full((3, 12), 7, np.int32)
    for row, p in zip(padded, prompts, strict=True):
        row[: len(p)] = p
    own = greedy(params, prompts[2], T)
    stop = np.asarray([own[2], 10_000], np.int32)  # the third own token, or where it first occurs, ends the text
    ends = own.index(own[2])
    decode_params = model.unstack(params) if layout == "unrolled" else params
    out = teach_jit(
        params, decode_params, UNTIED, jnp.asarray(padded), jnp.asarray([12, 9, 5], jnp.int32), jnp.asarray(given),
        jnp.asarray([6, 2, 6], jnp.int32), jnp.asarray([False, False, True]), jnp.asarray(stop), (make("distillcache"),),
        ((),), decode=True,
    )  # fmt: skip
    np.testing.assert_array_equal(out.continuation[:2], given[:2])
    np.testing.assert_array_equal(out.continuation[2], own)
    weight = np.asarray([[1] * 6, [1, 1, 0, 0, 0, 0], [1] * ends + [0] * (6 - ends)])
    np.testing.assert_array_equal(out.weight, weight)
    assert 0 < ends < T  # both kinds of weight occur
    assert out.cache.layers.k.shape[-2] == 12 and out.cache.layers.stats.mass is not None
    for b, prompt in enumerate(prompts):
        _, alone = naive.read([prompt], config=UNTIED, pad=12)
        for x, y in zip(jax.tree.leaves(kv.select(out.cache, jnp.int32(b))), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["stacked", "unrolled"])
def test_teach_hidden_questions(layout):
    params, unseen, oracle = naive.weights(UNTIED), 3, make("oracle")
    whole = [naive.some_tokens(12, seed=1), naive.some_tokens(9, seed=2)]
    plain = naive.some_tokens(7, seed=3)
    seen = [whole[0][:-unseen], whole[1][:-unseen], plain]
    padded = np.full((3, 12), 7, np.int32)
    for row, p in zip(padded, seen, strict=True):
        row[: len(p)] = p
    given = np.asarray([[*whole[0][-unseen:], 0, 0, 0], [*whole[1][-unseen:], 5, 6, 0], [1, 2, 3, 4, 0, 0]], np.int32)
    own = greedy(params, whole[0], T - unseen)
    # A token that ends a text also stands in the question, as chat templates do; there it ends nothing.
    stop = np.asarray([own[1], whole[0][-1]], np.int32)
    ends = next(i for i, token in enumerate(own) if token in stop)
    decode_params = model.unstack(params) if layout == "unrolled" else params
    out = teach_jit(
        params, decode_params, UNTIED, jnp.asarray(padded), jnp.asarray([9, 6, 7], jnp.int32), jnp.asarray(given),
        jnp.asarray([3, 5, 4], jnp.int32), jnp.asarray([True, False, False]), jnp.asarray(stop), (oracle,), ((),),
        decode=True, asked=jnp.asarray([True, True, False]), unseen=unseen,
    )  # fmt: skip
    np.testing.assert_array_equal(out.continuation[0], [*whole[0][-unseen:], *own])
    np.testing.assert_array_equal(out.continuation[1:], given[1:])
    want = [[0, 0, 1, *[1] * ends, *[0] * (T - unseen - ends)], [0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]
    np.testing.assert_array_equal(out.weight, want)
    future = [[*whole[0][-unseen:], *own[:ends]], [*whole[1][-unseen:], 5, 6], [1, 2, 3, 4]]
    for b, prompt in enumerate(
        seen
    ):  # the policies see what comes before the question, the oracle all of the text to come
        _, alone = naive.read([prompt], oracle.needs, config=UNTIED, pad=12)
        padding = np.full((1, 12), 7, np.int32)
        padding[0, : len(prompt)] = prompt
        to_come = np.full((1, T), EMPTY, np.int32)
        to_come[0, : len(future[b])] = future[b]
        alone = observe_jit(oracle, (), params, UNTIED, alone, jnp.asarray(padding), jnp.asarray(to_come))
        for x, y in zip(jax.tree.leaves(kv.select(out.cache, jnp.int32(b))), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_teach_given_texts_only():
    params = naive.weights()
    tokens, given = jnp.asarray(naive.some_tokens(8))[None], jnp.asarray([[3, 4, 5, 6, 7, 8]], jnp.int32)
    out = teach_jit(
        params, params, TINY, tokens, jnp.asarray([8], jnp.int32), given, jnp.asarray([4], jnp.int32),
        jnp.asarray([False]), jnp.asarray([2], jnp.int32), (), (), decode=False,
    )  # fmt: skip
    np.testing.assert_array_equal(out.continuation, given)
    np.testing.assert_array_equal(out.weight, [[1, 1, 1, 1, 0, 0]])


def test_schedule():
    assert rollout.check_schedule(32, 0) == 1
    assert rollout.check_schedule(32, 8) == 4
    assert rollout.check_schedule(32, 1) == 32
    assert rollout.check_schedule(32, 32) == 1
    for horizon, every in ((32, 5), (0, 0), (8, -1), (4, 8)):
        with pytest.raises(ConfigError, match=str(horizon)):
            rollout.check_schedule(horizon, every)
