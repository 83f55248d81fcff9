import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from configs import smollm2
from dcache import model, sharding
from dcache.attention import StatsRequest
from dcache.axes import spec
from dcache.config import PRESETS
from dcache.errors import ConfigError
from dcache.experiment import from_config
from dcache.sharding import ShardingRules

RULES = ShardingRules(data=2, fsdp=2, tensor=2)
SIZES = {"data": 2, "fsdp": 2, "tensor": 2, "sequence": 1}


def test_presets_and_sizes_by_name():
    assert set(sharding.PRESETS) == {"v5e-8", "v5p-8", "v6e-8", "gpu-80gb", "gpu-8", "none"}
    assert sharding.PRESETS["v5e-8"].sizes(8) == (1, 1, 8, 1)
    assert sharding.PRESETS["v5p-8"].sizes(4) == (1, 1, 4, 1)
    assert sharding.PRESETS["gpu-8"].sizes(8) == (2, 1, 4, 1)
    assert sharding.PRESETS["gpu-80gb"].sizes(1) == sharding.PRESETS["none"].sizes(8) == (1, 1, 1, 1)
    assert sharding.parse("v6e-8") is sharding.PRESETS["v6e-8"]
    assert sharding.parse("tensor=4, sequence=2") == ShardingRules(-1, 1, 4, 2)
    for rules in sharding.PRESETS.values():
        assert sharding.parse(rules.text()) == rules


@pytest.mark.parametrize(
    "text", ["v4-8", "", "tensor", "tensor=x", "model=2", "tensor=2,tensor=4", "tensor=0", "fsdp=-1"]
)
def test_what_is_no_sharding(text):
    with pytest.raises(ConfigError):
        sharding.parse(text)


@pytest.mark.parametrize("rules", [ShardingRules(tensor=3), ShardingRules(data=2, tensor=2), ShardingRules(tensor=16)])
def test_a_mesh_that_does_not_fit_the_devices(rules):
    with pytest.raises(ConfigError, match="does not fit 8 devices"):
        sharding.make_mesh(rules)


def test_a_mesh_has_the_agreed_axes():
    mesh = sharding.make_mesh(ShardingRules(tensor=4))
    assert mesh.axis_names == ("data", "fsdp", "tensor", "sequence") and dict(mesh.shape) == {
        "data": 2, "fsdp": 1, "tensor": 4, "sequence": 1,
    }  # fmt: skip
    assert sharding.make_mesh(sharding.PRESETS["none"]).size == 1


def test_where_tensors_lie():
    weights, activations = ShardingRules.WEIGHTS, ShardingRules.ACTIVATIONS
    assert spec("LDNH", (2, 32, 4, 8), weights, SIZES) == P(None, "fsdp", "tensor", None)
    assert spec("LDKH", (2, 32, 3, 8), weights, SIZES) == P(None, "fsdp", None, None)  # 2 does not divide 3 heads
    assert spec("BTD", (4, 16, 32), activations, SIZES) == P(("data", "fsdp"), None, None)
    assert spec("BTD", (2, 16, 32), activations, SIZES) == P("data", None, None)
    assert spec("BAV", (4, 4, 64), activations, SIZES) == P(("data", "fsdp"), None, "tensor")
    assert spec("BKSH", (1, 2, 16, 8), activations, SIZES | {"sequence": 2}) == P(None, "tensor", "sequence", None)


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("preset", ["v5e-8", "gpu-8"])
def test_no_large_weight_is_whole_on_any_device(name, preset):
    """Unless its number of heads does not allow it: 3 or 4 key/value heads, 9 or 28 query heads, on 4 or 8 devices."""
    config, rules = PRESETS[name], sharding.PRESETS[preset]
    mesh = sharding.make_mesh(rules)
    places = sharding.param_shardings(config, rules, mesh)
    assert jax.tree.structure(places) == jax.tree.structure(model.param_specs(config))
    for path, weight in jax.tree_util.tree_leaves_with_path(model.param_specs(config)):
        place = places
        for key in path:
            place = place[key.key]
        heads = {"N": config.num_heads, "K": config.num_kv_heads}
        divided = any(
            letter in "FV" or heads.get(letter, 1) % rules.tensor == 0 for letter in weight.axes if letter in "NKFV"
        )
        shard = int(np.prod(place.shard_shape(weight.shape)))
        assert shard == int(np.prod(weight.shape)) // (rules.tensor if divided else 1)


def test_constrain_does_nothing_without_a_mesh_and_pins_with_one():
    x = jnp.zeros((4, 6, 8))
    assert sharding.constrain(x, "BTV") is x
    with sharding.on(sharding.make_mesh(RULES)):
        y = jax.jit(lambda x: sharding.constrain(x, "BTV"))(x)
        assert y.sharding.spec == P(("data", "fsdp"), None, "tensor")
        assert sharding.shards("tensor") == 2
    assert sharding.shards("tensor") == 1


def test_a_cache_has_axes_for_every_array(tiny):
    request = StatsRequest(
        mass=True, last=True, windows=(4,), spreads=(4,), rows=2, projected=True, queries=True, hidden=True
    )
    tokens, length = jnp.zeros((4, 16), jnp.int32), jnp.full((4,), 16, jnp.int32)
    cache = jax.eval_shape(lambda p: model.prefill(p, tiny.config, tokens, length, request)[1], tiny.params)
    mesh = sharding.make_mesh(ShardingRules(data=2, tensor=2, sequence=2))
    places = sharding.cache_shardings(cache, ShardingRules(), mesh)
    assert places.layers.k.spec == P(None, "data", "tensor", "sequence", None)
    assert places.layers.stats.windows[4].spec == P(None, "data", "tensor", None)
    assert jax.tree.structure(places) == jax.tree.structure(cache)
    jax.tree.map(lambda place, x: place.shard_shape(x.shape), places, cache)


def test_several_processes_need_a_mesh_and_a_cluster(monkeypatch):
    config = smollm2.get_config("tiny")
    config.distributed = True
    with pytest.raises(ConfigError, match="a mesh of all their devices"):
        from_config(config)
    config.sharding = "data=2"
    other = from_config(config)
    # Where it runs is no part of what a run is: a checkpoint goes on anywhere.
    assert other.identity() == from_config(smollm2.get_config("tiny")).identity()

    def nobody():
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", nobody)
    with pytest.raises(ConfigError, match="cannot find each other"):
        sharding.join_processes()


@pytest.mark.parametrize(
    ("error", "processes", "lost"),
    [
        (jax.errors.JaxRuntimeError("UNAVAILABLE: peer closed"), 2, True),
        (TimeoutError("waited for 300 s"), 2, True),
        (ValueError("UNKNOWN: Gloo AllGather failed: Read error [127.0.0.1]: Connection reset by peer"), 2, True),
        (ValueError("Barrier failed because: task is set to ERROR: UNAVAILABLE: Task 1 heartbeat timeout"), 2, True),
        (ValueError("NOT_FOUND: the bucket is not there"), 2, False),
        (OSError(28, "No space left on device"), 2, False),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory while gathering with Gloo"), 2, False),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: peer closed"), 1, False),
        (TimeoutError("waited for 300 s"), 1, False),
    ],
)
def test_a_lost_process_is_told_from_a_fault_of_this_one(monkeypatch, error, processes, lost):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    assert sharding.lost_another(error) is lost
    wrapped = RuntimeError("a library's own words")
    wrapped.__cause__ = error
    assert sharding.lost_another(wrapped) is lost
