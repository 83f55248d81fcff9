"""What the seam chooses, and that what it chooses gives the reference's numbers: statistics, whole model, mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcache import attention, model, sharding
from dcache.attention import Segment, StatsRequest
from dcache.axes import ShardingRules
from dcache.kernels import decode, seam
from tests import naive
from tests.kernels import dense

# Windows that the reference reads off the rows, one that a tail of queries gives, and one longer than the prompt.
REQUEST = StatsRequest(mass=True, last=True, windows=(3, 8, 40, 1000), spreads=(5,), rows=8)
reference_prompt = jax.jit(attention.attend_prompt, static_argnums=(4, 5))
kernel_prompt = jax.jit(functools.partial(seam.prompt_on_tpu, interpret=True), static_argnums=(4, 5))
kernel_attend = jax.jit(functools.partial(seam.attend_on_tpu, interpret=True), static_argnums=4)


def positions(lengths, width):
    index = np.arange(width)[None]
    return jnp.asarray(np.where(index < np.asarray(lengths)[:, None], index, -1), jnp.int32)


def assert_same_prompt(got, want, real):
    (out, *statistics), (want_out, *want_statistics) = got, want
    np.testing.assert_allclose(np.asarray(out)[real], np.asarray(want_out)[real], rtol=1e-4, atol=1e-5)
    assert jax.tree.structure(statistics) == jax.tree.structure(want_statistics)
    for a, b in zip(jax.tree.leaves(statistics), jax.tree.leaves(want_statistics), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 33])
def test_prompt_gives_all_statistics(getkey, window):
    lengths = (200, 77, 1)
    q, k, v = dense.random_qkv(getkey(), 3, 200, 4, 2, 8, "float32")
    position = positions(lengths, 200)
    args = (q, k, v, position, REQUEST, window)
    assert_same_prompt(kernel_prompt(*args), reference_prompt(*args), np.asarray(position) >= 0)


def test_prompt_computes_nothing_unasked(getkey):
    q, k, v = dense.random_qkv(getkey(), 1, 20, 4, 2, 8, "float32")
    _, stats, rows = kernel_prompt(q, k, v, positions([20], 20), StatsRequest(), None)
    assert (stats.mass, stats.last, stats.windows, rows) == (None, None, {}, None)
    program = str(
        jax.make_jaxpr(seam.prompt_on_tpu, static_argnums=(4, 5))(q, k, v, positions([20], 20), StatsRequest(), None)
    )
    assert "attend_prompt" in program and "column_sums" not in program


@pytest.mark.parametrize("window", [None, 50])
def test_cache_in_any_order(getkey, window):
    q, k, v = dense.random_qkv(getkey(), 2, 150, 4, 2, 8, "float32")
    position = np.stack([[np.random.default_rng(4 * b + h).permutation(150) for h in range(2)] for b in range(2)])
    position[:, :, 100:] = -1
    query = jnp.asarray([[150], [90]], jnp.int32)
    position = jnp.asarray(np.where(position == 60, np.asarray(query)[:, :, None], position), jnp.int32)
    got = kernel_attend(q[:, :1], Segment(k, v), query, position, window)
    want = attention.attend(q[:, :1], [Segment(k, v)], query, position, window)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_whole_model(monkeypatch):
    # A prefill of prompts of two lengths and three decode steps, each layer's statistics included.
    params, tokens = naive.weights(), naive.some_tokens(40)
    prompts = [tokens[:24], tokens[5:18]]
    request = StatsRequest(mass=True, last=True, windows=(4, 20), rows=16, projected=True)
    hidden, cache = naive.read(prompts, request, pad=28)
    hiddens = [hidden]
    for t in range(3):
        hidden, cache = naive.extend(params, naive.TINY, jnp.asarray([[t], [t + 9]], jnp.int32), cache)
        hiddens.append(hidden)

    calls = []

    def interpreted(kernel, *args):
        calls.append(kernel.__name__)
        return kernel(*args, interpret=True)

    for kernel in (seam.prompt_on_tpu, seam.attend_on_tpu):
        monkeypatch.setattr(seam, kernel.__name__, functools.partial(interpreted, kernel))
    monkeypatch.setattr(seam, "platform", lambda: "tpu")
    monkeypatch.setattr(
        naive, "prefill", jax.jit(lambda p, c, *args: model.prefill(p, c, *args), static_argnums=(1, 4))
    )
    extend = jax.jit(lambda p, t, c: model.extend(p, naive.TINY, t, c))
    hidden, by_kernel = naive.read(prompts, request, pad=28)
    real = np.arange(28)[None] < np.asarray([[24], [13]])
    np.testing.assert_allclose(np.asarray(hidden)[real], np.asarray(hiddens[0])[real], rtol=1e-4, atol=1e-4)
    for t in range(3):
        hidden, by_kernel = extend(params, jnp.asarray([[t], [t + 9]], jnp.int32), by_kernel)
        np.testing.assert_allclose(hidden, hiddens[t + 1], rtol=1e-4, atol=1e-4)
    assert calls == ["prompt_on_tpu", "attend_on_tpu"]  # one scanned layer each
    np.testing.assert_array_equal(by_kernel.layers.position, cache.layers.position)
    for a, b in zip(jax.tree.leaves((by_kernel.layers.stats, by_kernel.rows, by_kernel.row_entropy)),
                    jax.tree.leaves((cache.layers.stats, cache.rows, cache.row_entropy)), strict=True):  # fmt: skip
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_on_a_mesh(getkey):
    # Each device takes its own prompts and heads.
    q, k, v = dense.random_qkv(getkey(), 2, 40, 4, 2, 8, "float32")
    args = (q, k, v, positions((40, 17), 40), StatsRequest(mass=True), None)
    want = kernel_prompt(*args)
    with sharding.on(sharding.make_mesh(ShardingRules(data=2, tensor=2), jax.devices()[:4])):
        got = kernel_prompt(*args)
    assert got[0].sharding.shard_shape(got[0].shape) == (1, 40, 2, 8)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_key_value_heads_that_the_mesh_does_not_divide_stay_whole(getkey):
    # So do the query heads that belong to them, although `tensor` divides those.
    q, k, v = dense.random_qkv(getkey(), 2, 40, 4, 2, 8, "float32")
    position = jnp.broadcast_to(positions((40, 17), 40)[:, None], (2, 2, 40))
    args = (q[:, :1], Segment(k, v), jnp.asarray([[39], [16]], jnp.int32), position, None)
    want = kernel_attend(*args)
    with sharding.on(sharding.make_mesh(ShardingRules(tensor=4), jax.devices()[:4])):
        got = kernel_attend(*args)
    assert got[0].sharding.shard_shape(got[0].shape) == (2, 1, 4, 8)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.fixture
def chosen(monkeypatch):
    """The names of the functions that the seam calls; they compute nothing."""
    calls = []
    for module, name in ((seam, "attend_on_tpu"), (seam, "prompt_on_tpu"), (seam, "prompt_by_library"),
                         (attention, "attend"), (attention, "attend_prompt")):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *args, name=name: calls.append(name))
    return calls


def attend_on(monkeypatch, platform, *, queries=1, shared=False, slots=40, weight=None, parts=1):
    monkeypatch.setattr(seam, "platform", lambda: platform)
    kv = Segment(*[jnp.zeros((1 if shared else 2, 2, slots, 8))] * 2)
    position = jnp.zeros((2, 2, parts * slots), jnp.int32)
    seam.attend(jnp.zeros((2, queries, 4, 8)), [kv] * parts, jnp.zeros((2, queries), jnp.int32), position, None, weight)


def test_single_queries_over_a_cache_of_ones_own_are_for_the_kernel(chosen, monkeypatch):
    attend_on(monkeypatch, "tpu")
    attend_on(monkeypatch, "cpu")
    attend_on(monkeypatch, "gpu")
    attend_on(monkeypatch, "tpu", queries=2)
    attend_on(monkeypatch, "tpu", shared=True)
    attend_on(monkeypatch, "tpu", parts=2)
    attend_on(monkeypatch, "tpu", weight=jnp.ones((2, 2, 40)))
    monkeypatch.setattr(decode, "MOST_PROBABILITIES", 8 * 40 - 1)  # two query heads take as much room as 8
    attend_on(monkeypatch, "tpu")
    assert chosen == ["attend_on_tpu"] + ["attend"] * 7


def test_prompts_are_for_the_kernel_or_the_library(chosen, monkeypatch):
    def prompt(platform, dtype="bfloat16", request=StatsRequest(last=True), capability="9.0", width=64):  # noqa: B008
        monkeypatch.setattr(seam, "platform", lambda: platform)
        monkeypatch.setattr(jax, "devices", lambda: [type("Device", (), {"compute_capability": capability})])
        q = jnp.zeros((1, 8, 4, width), dtype)
        seam.attend_prompt(q, q.swapaxes(1, 2), q.swapaxes(1, 2), positions([8], 8), request)

    prompt("tpu")
    prompt("gpu")
    prompt("gpu", dtype="float32")
    prompt("gpu", request=StatsRequest(mass=True))
    prompt("gpu", capability="7.5")
    prompt("gpu", capability="gfx90a")
    prompt("gpu", width=256)
    prompt("cpu")
    assert chosen == ["prompt_on_tpu", "prompt_by_library"] + ["attend_prompt"] * 6


def test_split_slots_are_for_the_reference(chosen, monkeypatch):
    with sharding.on(sharding.make_mesh(ShardingRules(sequence=2), jax.devices()[:2])):
        attend_on(monkeypatch, "tpu")
        q = jnp.zeros((1, 8, 4, 8))
        seam.attend_prompt(q, q.swapaxes(1, 2), q.swapaxes(1, 2), positions([8], 8), StatsRequest())
    assert chosen == ["attend", "attend_prompt"]


@pytest.mark.parametrize("window", [None, 1, 7])
def test_library_gives_the_same(getkey, window):
    # cuDNN runs on a GPU only; JAX's own implementation of the same call takes the same arguments.
    q, k, v = dense.random_qkv(getkey(), 2, 40, 4, 2, 8, "float32")
    position, request = positions((40, 17), 40), StatsRequest(last=True, windows=(5,))
    call = jax.jit(functools.partial(seam.prompt_by_library, implementation="xla"), static_argnums=(4, 5))
    args = (q, k, v, position, request, window)
    assert_same_prompt(call(*args), reference_prompt(*args), np.asarray(position) >= 0)
