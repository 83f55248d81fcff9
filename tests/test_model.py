"""The forward pass against a dense numpy model, for every architectural feature; prefill, decoding, layouts, dtypes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import cache as kv
from dcache import model
from dcache.attention import StatsRequest
from dcache.config import PRESETS, RopeScaling
from tests import naive
from tests.naive import TINY

SCALED = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
VARIANTS = {
    "gqa": TINY,
    "mha": dataclasses.replace(TINY, num_kv_heads=4),
    "mqa": dataclasses.replace(TINY, num_kv_heads=1),
    "bias": dataclasses.replace(TINY, qkv_bias=True),
    "untied": dataclasses.replace(TINY, tie_embeddings=False),
    "window": dataclasses.replace(TINY, sliding_window=5),
    "llama3": dataclasses.replace(TINY, rope_scaling=SCALED),
    # N * H differs from D, a large epsilon, another base: nothing may be taken from a default.
    "odd": dataclasses.replace(TINY, num_heads=6, num_kv_heads=3, head_dim=4, norm_eps=0.3, rope_theta=100.0),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_equals_naive(variant):
    config = VARIANTS[variant]
    params, prompts = naive.weights(config), [naive.some_tokens(20), naive.some_tokens(13)]
    hidden, cache = naive.read(prompts, StatsRequest(), config)
    logits = np.asarray(naive.logits_of(params, hidden, config))
    for b, tokens in enumerate(prompts):
        want = naive.forward(params, config, tokens)
        np.testing.assert_allclose(logits[b, : len(tokens)], want.logits, rtol=1e-4, atol=2e-4)
        np.testing.assert_allclose(cache.layers.k[:, b, :, : len(tokens)], want.keys, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(cache.layers.v[:, b, :, : len(tokens)], want.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_equals_naive(variant):
    config = VARIANTS[variant]
    params, tokens = naive.weights(config), naive.some_tokens(20)
    want = naive.forward(params, config, tokens).logits
    _, cache = naive.read([tokens[:13]], StatsRequest(), config, pad=20)
    for t in range(13, 20):
        hidden, cache = naive.extend(params, config, jnp.asarray(tokens[None, t : t + 1]), cache)
        logits = np.asarray(naive.logits_of(params, hidden, config))
        np.testing.assert_allclose(logits[0, 0], want[t], rtol=1e-4, atol=2e-4)


def test_features_matter():
    # Otherwise a comparison above could pass because neither side has the feature.
    outputs = {}
    for name, config in VARIANTS.items():
        if config.num_kv_heads == TINY.num_kv_heads and name != "untied":
            params = naive.weights(dataclasses.replace(TINY, qkv_bias=True))
            outputs[name] = naive.forward(params, config, naive.some_tokens(20)).logits[-1]
    for name in ("bias", "window", "llama3"):
        assert np.abs(outputs[name] - outputs["gqa"]).max() > 0.05, name


@pytest.mark.parametrize("variant", ["gqa", "bias"])
def test_bfloat16(variant):
    # Weights, activations and cache have 8 significant bits: the error is measured against the spread of the logits.
    config = dataclasses.replace(VARIANTS[variant], dtype="bfloat16")
    params, tokens = naive.weights(config), naive.some_tokens(20)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params))
    want = naive.forward(params, config, tokens).logits
    hidden, cache = naive.read([tokens[:16]], naive.EVERYTHING, config, pad=20)
    assert hidden.dtype == cache.layers.k.dtype == cache.layers.v.dtype == jnp.bfloat16
    assert cache.layers.stats.mass.dtype == cache.layers.value_norm.dtype == cache.rows.dtype == jnp.float32
    got = naive.logits_of(params, hidden[:, :16], config)
    assert got.dtype == jnp.float32
    error = np.abs(np.asarray(got[0]) - want[:16]).max()
    assert error < 0.1 * want.std(), error
    # Attention rows are float32 throughout: they sum to one much more closely than bfloat16 could.
    np.testing.assert_allclose(cache.layers.stats.mass[:, 0].sum(-1), 16, rtol=1e-5)
    for t in range(16, 20):
        hidden, cache = naive.extend(params, config, jnp.asarray(tokens[None, t : t + 1]), cache)
        assert cache.layers.k.dtype == jnp.bfloat16
        error = np.abs(np.asarray(naive.logits_of(params, hidden, config)[0, 0]) - want[t]).max()
        assert error < 0.1 * want.std(), error


@pytest.mark.parametrize("variant", ["gqa", "untied"])
def test_unrolled_equals_scanned(variant):
    config = VARIANTS[variant]
    params, tokens = naive.weights(config), naive.some_tokens(20)
    flat = model.unstack(params)
    assert isinstance(flat["layers"], tuple) and flat["head"].shape == (config.embed_dim, config.vocab_size)
    _, cache = naive.read([tokens[:13], tokens[:9]], naive.EVERYTHING, config, pad=20)
    unrolled = kv.unstack(cache)
    for t in range(3):
        fed = jnp.asarray([[tokens[t]], [tokens[t + 5]]])
        h1, cache = naive.extend(params, config, fed, cache)
        h2, unrolled = naive.extend(flat, config, fed, unrolled)
        a, b = naive.logits_of(params, h1, config), naive.logits_of(flat, h2, config)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)
    restacked = dataclasses.replace(unrolled, layers=kv.stacked(unrolled))
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(restacked), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


def test_padding_changes_nothing():
    # Whatever the padding tokens and however many: hidden states of real tokens, cache and statistics are the same.
    tokens = naive.some_tokens(9)
    params, length = naive.weights(), jnp.full((1,), 9, jnp.int32)
    results = []
    for pad in (0, 60):
        padded = np.full((1, 16), pad, np.int32)
        padded[0, :9] = tokens
        hidden, cache = naive.prefill(params, TINY, jnp.asarray(padded), length, naive.EVERYTHING)
        results.append((hidden[:, :9], model.last_logits(params, TINY, hidden, length), cache))
    assert (np.asarray(results[0][2].layers.position) == [*range(9), *[-1] * 7]).all()
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])
    a, b = (r[2] for r in results)
    for x, y in zip(jax.tree.leaves((a.layers.stats, a.rows, a.layers.value_norm)),
                    jax.tree.leaves((b.layers.stats, b.rows, b.layers.value_norm)), strict=True):  # fmt: skip
        np.testing.assert_array_equal(x, y)
        assert (np.asarray(x)[..., 9:] == 0).all()


def test_last_and_full_logits():
    params, tokens = naive.weights(), naive.some_tokens(12)
    want = naive.forward(params, TINY, tokens).logits
    full = jax.jit(model.full_logits, static_argnums=1)(params, TINY, jnp.asarray(np.stack([tokens, tokens])))
    np.testing.assert_allclose(full[0], want, rtol=1e-4, atol=2e-4)
    np.testing.assert_array_equal(full[0], full[1])
    hidden, _ = naive.read([tokens, tokens[:7]], StatsRequest())
    last = model.last_logits(params, TINY, hidden, jnp.asarray([12, 7], jnp.int32))
    np.testing.assert_allclose(last, want[[11, 6]], rtol=1e-4, atol=2e-4)


def test_one_token_prompt():
    params = naive.weights()
    hidden, cache = naive.read([np.asarray([5], np.int32)])
    want = naive.forward(params, TINY, [5])
    np.testing.assert_allclose(naive.logits_of(params, hidden, TINY)[0], want.logits, rtol=1e-4, atol=2e-4)
    np.testing.assert_allclose(cache.layers.stats.mass, 1.0, rtol=1e-6)


@pytest.mark.parametrize("name", ["tiny", "llama3"])
def test_rope_frequencies(name):
    config = VARIANTS["llama3"] if name == "llama3" else TINY
    got = model.rope_frequencies(config)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, naive.frequencies(config), rtol=1e-6)


def test_llama3_scaling_by_hand():
    # theta 10,000 and H = 8: frequencies 1, 0.1, 0.01, 0.001. Turns within 64 positions: 10.2 (more than 4: kept),
    # 1.0186 (between: a ramp), 0.10 and 0.01 (fewer than 1: divided by 8).
    ramp = (64 * 0.1 / (2 * math.pi) - 1) / 3
    want = [1.0, (1 - ramp) * 0.1 / 8 + ramp * 0.1, 0.01 / 8, 0.001 / 8]
    np.testing.assert_allclose(model.rope_frequencies(VARIANTS["llama3"]), want, rtol=1e-6)


def test_llama31_scaling_bands():
    # Llama 3.1: with 8,192 original positions, pairs 0-28 of 64 are kept, 29-34 lie on the ramp, 35-63 are stretched.
    plain = PRESETS["llama3_8b"]
    scaled = dataclasses.replace(plain, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192))
    ratio = model.rope_frequencies(plain) / model.rope_frequencies(scaled)
    turns = 8192 * 5e5 ** (-np.arange(64) / 64) / (2 * math.pi)
    kept, stretched = turns > 4, turns < 1
    assert kept.sum() == 29 and stretched.sum() == 29
    np.testing.assert_allclose(ratio[kept], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[stretched], 8, rtol=1e-6)
    between = ratio[~kept & ~stretched]
    assert (np.diff(between) > 0).all() and between[0] > 1 and between[-1] < 8


def test_rotary_is_relative_and_exact_far_out():
    # The product of a rotated query and key depends on their distance only, even at position 100,000.
    config = TINY
    q, k = jax.random.normal(jax.random.key(1), (2, 1, 1, 1, 8))

    def product(at, distance):
        a, b = (jnp.full((1, 1), p, jnp.int32) for p in (at + distance, at))
        return float(jnp.sum(model.rotate(q, a, config) * model.rotate(k, b, config)))

    near = product(0, 7)
    assert product(3000, 7) == pytest.approx(near, abs=1e-3)
    assert product(100_000, 7) == pytest.approx(near, abs=0.05)  # float32 angles, as the reference implementations have
    assert abs(product(0, 8) - near) > 0.05


def test_rotation_keeps_norm_and_dtype():
    x = jax.random.normal(jax.random.key(2), (2, 3, 2, 8)).astype(jnp.bfloat16)
    out = model.rotate(x, jnp.arange(6, dtype=jnp.int32).reshape(2, 3), TINY)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        jnp.linalg.norm(out.astype(jnp.float32), axis=-1), jnp.linalg.norm(x.astype(jnp.float32), axis=-1), rtol=0.02
    )
    np.testing.assert_array_equal(out[0, 0], x[0, 0])  # position 0


def test_rms_norm_by_hand():
    x, scale = jnp.asarray([[3.0, 4.0]]), jnp.asarray([2.0, 10.0])
    root = math.sqrt(12.5 + 0.5)
    np.testing.assert_allclose(model.rms_norm(x, scale, 0.5), [[6 / root, 40 / root]], rtol=1e-6)
    large = jnp.full((1, 4), 300.0, jnp.float16)  # the square overflows in float16
    np.testing.assert_allclose(model.rms_norm(large, jnp.ones(4, jnp.float16), 0.0), 1.0, rtol=1e-3)


@pytest.mark.parametrize("preset", PRESETS)
def test_param_specs_count(preset):
    config = PRESETS[preset]
    specs = jax.tree.leaves(model.param_specs(config), is_leaf=lambda x: isinstance(x, model.TensorSpec))
    assert all(len(s.shape) == len(s.axes) for s in specs)
    total = sum(math.prod(s.shape) for s in specs)
    known = {
        "smollm2": 134_515_008,
        "mistral7b": 7_248_023_552,
        "llama3_8b": 8_030_261_248,
        "qwen2_5_7b": 7_615_616_512,
    }
    if preset in known:
        assert total == known[preset]  # as the model cards count
    else:
        d, f, v, l = 32, 48, 64, 2
        assert total == v * d + d + l * (2 * d + d * 32 + 2 * d * 16 + 32 * d + 3 * d * f)


def test_init_params():
    for config in (TINY, VARIANTS["untied"], dataclasses.replace(VARIANTS["bias"], dtype="bfloat16")):
        params = model.init_params(jax.random.key(0), config)
        specs = model.param_specs(config)
        shapes = jax.tree.map(lambda s: s.shape, specs, is_leaf=lambda x: isinstance(x, model.TensorSpec))
        assert jax.tree.map(jnp.shape, params) == shapes
        assert all(leaf.dtype == config.dtype for leaf in jax.tree.leaves(params))
    same = model.init_params(jax.random.key(0), config)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(a.astype(jnp.float32), b.astype(jnp.float32))
    assert not np.array_equal(params["layers"]["gate"], params["layers"]["up"])
    assert (np.asarray(params["layers"]["q_bias"]) == 0).all() and (np.asarray(params["final_norm"]) == 1).all()
