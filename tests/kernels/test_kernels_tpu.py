"""The kernels compiled for TPUs that are described, not there. Needs `libtpu` (`pip install -e '.[tpu]'`); nothing runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from dcache import model, sharding
from dcache.attention import StatsRequest
from dcache.axes import ShardingRules
from dcache.config import PRESETS
from dcache.kernels import decode, prefill

pytestmark = pytest.mark.slow
pytest.importorskip("libtpu")


@pytest.fixture(scope="module", params=["v5e:2x4", "v6e:2x4"])
def devices(request):
    """Eight chips of a described slice."""
    with pytest.MonkeyPatch.context() as patch:
        # Ask no metadata server which machine this is.
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        yield topologies.get_topology_desc(request.param, platform="tpu").devices


def compiled(function, *shapes):
    return jax.jit(function).lower(*shapes).compile()


# Mistral-7B and Llama-3-8B; the default model, in both dtypes; sizes that fill no register.
SIZES = [
    (1, 32, 8, 128, 4096, "bfloat16"), (2, 9, 3, 64, 1000, "float32"), (2, 9, 3, 64, 2048, "bfloat16"),
    (2, 4, 2, 8, 100, "float32"),
]  # fmt: skip


@pytest.mark.parametrize("b, n, k, h, s, dtype", SIZES)
def test_kernels(devices, b, n, k, h, s, dtype, monkeypatch):
    # Half of the 16 MiB of VMEM that a kernel gets are enough; the compiler refuses more than it is told.
    params = functools.partial(prefill.pltpu.CompilerParams, vmem_limit_bytes=8 * 2**20)
    monkeypatch.setattr(prefill.pltpu, "CompilerParams", params)
    mesh = sharding.make_mesh(ShardingRules(), devices[:1])
    with sharding.on(mesh):

        def shape(*size, dtype=dtype):
            return jax.ShapeDtypeStruct(size, dtype, sharding=jax.NamedSharding(mesh, jax.P()))

        q, length = shape(b, n, h, s), shape(b, dtype="int32")
        keys = shape(b, k, s, h)
        for settings in (dict(), dict(entropy=True, sliding_window=500)):
            compiled(functools.partial(prefill.attend, **settings), q, keys, keys, length)
        lse = shape(b, n, s, dtype="float32")
        sums = functools.partial(prefill.column_sums, widths=(s, 64), sliding_window=700)
        compiled(sums, q, keys, lse, length, length)
        program = compiled(decode.attend, shape(b, n, h), keys, keys, shape(b, k, s, dtype="bool"))
    assert "tpu_custom_call" in program.as_text()
    jax.clear_caches()


def test_decode_over_the_longest_cache_that_the_seam_gives_it(devices):
    mesh = sharding.make_mesh(ShardingRules(), devices[:1])
    heads, group = 4, 7  # Qwen2.5-7B
    slots = decode.MOST_PROBABILITIES // 8
    assert decode.fits(group, slots) and not decode.fits(group, slots + 1)
    with sharding.on(mesh):

        def shape(*size, dtype="bfloat16"):
            return jax.ShapeDtypeStruct(size, dtype, sharding=jax.NamedSharding(mesh, jax.P()))

        keys = shape(1, heads, slots, 128)
        compiled(decode.attend, shape(1, heads * group, 128), keys, keys, shape(1, heads, slots, dtype="bool"))


@pytest.mark.parametrize("devices", ["v5e:2x4"], indirect=True)
def test_mistral_7b_over_eight_chips(devices):
    # Prefill and decode step of the whole model, heads split over the chips: kernels inside, no layer's cache gathered.
    config, rules = PRESETS["mistral7b"], ShardingRules(tensor=8)
    mesh = sharding.make_mesh(rules, devices)
    request = StatsRequest(mass=True, last=True, windows=(32,), rows=64)

    def placed(shapes, places):
        return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, places)

    with sharding.on(mesh):
        params = jax.eval_shape(lambda: model.init_params(jax.random.key(0), config))
        params = placed(params, sharding.param_shardings(config, rules, mesh))
        whole = jax.NamedSharding(mesh, jax.P())
        tokens = jax.ShapeDtypeStruct((1, 4096), jnp.int32, sharding=whole)
        length = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=whole)

        def read(params, tokens, length):
            return model.prefill(params, config, tokens, length, request)

        program = compiled(read, params, tokens, length)
        text = program.as_text()
        assert "attend_prompt" in text and "column_sums" in text
        memory = program.memory_analysis()
        chip = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        assert chip < 16 * 2**30
        _, cache = jax.eval_shape(read, params, tokens, length)
        cache = placed(cache, sharding.cache_shardings(cache, rules, mesh))

        def step(params, token, cache):
            return model.extend(params, config, token, cache)

        text = compiled(step, params, jax.ShapeDtypeStruct((1, 1), jnp.int32, sharding=whole), cache).as_text()
        assert "attend_cache" in text
        layer = config.num_kv_heads * 4096 * config.head_dim
        gathered = [line for line in text.splitlines() if "all-gather(" in line and sizes(line) >= layer]
        assert not gathered, gathered


def sizes(line):
    """Elements of an instruction's result."""
    dims = line.split("[", 1)[1].split("]", 1)[0]
    return int(np.prod([int(d) for d in dims.split(",") if d]))
