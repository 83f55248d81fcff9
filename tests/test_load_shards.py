"""Loading onto a mesh: each host reads the parts that lie on its devices, once, and little memory beside them."""

import contextlib
import tracemalloc
import types

import jax
import numpy as np
import pytest
import safetensors

from dcache import sharding
from dcache.load import load, read_config, read_params
from tests.hf_models import (
    ARCHITECTURES,
    D,
    F,
    H,
    L,
    N,
    V,
    check_equal,
    expected,
    fuse,
    hf_config,
    hf_tensors,
    write_model,
)


class Reads:
    """Stands in for safetensors' files and notes what is read: (tensor, bytes)."""

    def __init__(self, monkeypatch):
        self.made, opened = [], safetensors.safe_open

        def spy(*args, **kwargs):
            file = opened(*args, **kwargs)
            return contextlib.nullcontext(
                types.SimpleNamespace(keys=file.keys, get_slice=lambda name: self.view(file, name))
            )

        monkeypatch.setattr(safetensors, "safe_open", spy)

    def view(self, file, name):
        inner, reads = file.get_slice(name), self

        class View:
            get_shape, get_dtype = inner.get_shape, inner.get_dtype

            def __getitem__(self, bounds):
                value = inner[bounds]
                reads.made.append((name, value.nbytes))
                return value

        return View()

    @property
    def total(self):
        return sum(size for _, size in self.made)


@pytest.mark.parametrize("kind", ["untied", "qwen2", "phi3"])
def test_weights_are_read_once_into_their_shards(tmp_path, monkeypatch, kind):
    config = hf_config(**ARCHITECTURES[kind])
    tensors = hf_tensors(config)
    directory = write_model(tmp_path / "m", config, fuse(tensors) if kind == "phi3" else tensors)
    reads = Reads(monkeypatch)
    lm = load(directory, sharding="data=2,fsdp=2,tensor=2")
    check_equal(lm.params, expected(tensors, config))
    rules = sharding.parse("data=2,fsdp=2,tensor=2")
    places = sharding.param_shardings(lm.config, rules, lm.mesh)
    jax.tree.map(lambda x, place: np.testing.assert_equal(x.sharding, place), lm.params, places)
    assert lm.params["layers"]["q"].addressable_shards[0].data.shape == (L, D // 2, N // 2, H)
    # Two of the eight devices hold the same part, which is read once.
    assert reads.total == sum(value.nbytes for value in tensors.values())
    # No tensor is read whole but those of a few numbers.
    assert all(size < tensors.get(name, np.zeros(V * D, np.float32)).nbytes for name, size in reads.made)


def test_a_host_reads_only_what_lies_on_its_devices(tmp_path, monkeypatch):
    config = hf_config()
    directory = write_model(tmp_path / "m", config, hf_tensors(config))
    rules, mesh = sharding.parse("tensor=2"), sharding.mesh_of("tensor=2")
    places = sharding.param_shardings(read_config(directory), rules, mesh)
    mine, shares = set(mesh.devices[:, :, 0].flat), []

    def of_one_host(shape, place, callback, dtype):
        indices = {device: index for device, index in place.devices_indices_map(shape).items() if device in mine}
        shares.append(next(iter([callback(index) for index in indices.values()])).nbytes)

    monkeypatch.setattr(jax, "make_array_from_callback", of_one_host)
    reads = Reads(monkeypatch)
    read_params(directory, read_config(directory), places)
    whole = sum(value.nbytes for value in hf_tensors(config).values())
    assert reads.total == sum(shares)
    assert 0.5 * whole < reads.total < 0.52 * whole  # norms are whole on each device


def test_memory_while_weights_are_read(tmp_path):
    """Beside the shards themselves, which lie on the host here: less than the largest tensor of all layers."""
    config = hf_config(hidden_size=128, intermediate_size=1024, vocab_size=4096, num_hidden_layers=4)
    rng, sizes = np.random.default_rng(0), {D: 128, F: 1024, V: 4096}
    tensors = {
        name: rng.standard_normal([sizes.get(size, size) for size in value.shape], np.float32)
        for name, value in hf_tensors(hf_config(num_hidden_layers=4)).items()
    }
    directory = write_model(tmp_path / "m", config, tensors)
    places = sharding.param_shardings(read_config(directory), sharding.parse("tensor=2"), sharding.mesh_of("tensor=2"))
    largest = 4 * 4 * 128 * 1024
    read_params(directory, read_config(directory), places)  # imports and caches are filled
    tracemalloc.start()
    read_params(directory, read_config(directory), places)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < sum(value.nbytes for value in tensors.values()) + largest
