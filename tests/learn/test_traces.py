"""Traces: block sums against dense attention, sizes, resuming, refusals."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from dcache.data.prompts import Prompt
from dcache.errors import ConfigError, LoadError
from dcache.learn import traces
from tests import naive
from tests.naive import TINY

LENGTH, BLOCK = 48, 8
SIZES = {"length": LENGTH, "horizon": 3, "block": BLOCK, "identity": {"texts": "some"}}


def prompt_of(number):
    text = naive.some_tokens(40 + 5 * number, seed=number)
    return Prompt(text[:-5], "text", text[-5:], (), f"{number}:here", "text")


@pytest.fixture(scope="module")
def lm(tiny):
    return dataclasses.replace(tiny, params=naive.weights())


def test_block_sums(tmp_path, lm):
    assert traces.collect(tmp_path, lm, prompt_of, 3, **SIZES)
    for number, length in enumerate((38, 43, 48)):
        trace = traces.read(traces.path_of(tmp_path, number))
        assert (trace.length, trace.name, trace.kind) == (length, f"{number}:here", "text")
        assert trace.k.dtype == trace.v.dtype == ml_dtypes.bfloat16 and trace.received.dtype == np.float16
        assert trace.k.shape == trace.v.shape == (2, 2, LENGTH, 8) and trace.received.shape == (2, 2, 6, LENGTH)
        dense = naive.forward(lm.params, TINY, naive.some_tokens(40 + 5 * number, seed=number)[:length])
        np.testing.assert_allclose(trace.k[:, :, :length].astype(np.float32), dense.keys, rtol=0.01, atol=1e-3)
        np.testing.assert_allclose(trace.v[:, :, :length].astype(np.float32), dense.values, rtol=0.01, atol=1e-3)
        assert not trace.k[:, :, length:].any() and not trace.v[:, :, length:].any()
        largest = dense.probs.reshape(2, 2, 2, length, length).max(2)  # [L, K, T, T]
        for block in range(6):
            want = largest[:, :, block * BLOCK : (block + 1) * BLOCK].sum(2)
            np.testing.assert_allclose(trace.received[:, :, block, :length], want, rtol=2e-3, atol=1e-4)
        assert not trace.received[..., length:].any()
        for count in (8, 32):
            got = trace.importance(count)
            assert got.shape == (2, 2, count) and got.dtype == np.float32
            np.testing.assert_allclose(got, largest[:, :, count:, :count].sum(2), rtol=2e-3, atol=1e-3)
        with pytest.raises(ConfigError, match="20 tokens.*multiple of the block, 8"):
            trace.importance(20)


def test_size_of_a_trace_of_the_default_model(tmp_path):
    # 1,024 tokens of SmolLM2-135M: 30 layers, 3 key/value heads of dimension 64, blocks of 64.
    k = np.zeros((30, 3, 1024, 64), ml_dtypes.bfloat16)
    traces._write(tmp_path / "x", k, k, np.zeros((30, 3, 16, 1024), np.float16), {"length": 1, "name": "", "kind": ""})
    assert (tmp_path / "x").stat().st_size < 32e6
    assert traces.read(tmp_path / "x").k.shape == k.shape


def test_an_interrupted_collection_goes_on(tmp_path, lm, monkeypatch):
    asked = iter([False, False, True])
    assert not traces.collect(tmp_path, lm, prompt_of, 3, **SIZES, stopped=lambda: next(asked))
    (tmp_path / ".00002.safetensors.abc").write_bytes(b"what a killed run was writing")
    before = {path.name: path.read_bytes() for path in tmp_path.glob("0*")}
    assert sorted(before) == ["00000.safetensors", "00001.safetensors"]
    made = []
    assert traces.collect(tmp_path, lm, lambda n: made.append(n) or prompt_of(n), 3, **SIZES)
    assert made == [2]
    assert traces.collect(tmp_path, lm, lambda n: made.append(n), 3, **SIZES) and made == [2]
    assert all((tmp_path / name).read_bytes() == raw for name, raw in before.items())
    whole = tmp_path / "whole"
    traces.collect(whole, lm, prompt_of, 3, **SIZES)
    assert all(path.read_bytes() == (tmp_path / path.name).read_bytes() for path in whole.iterdir())


def test_foreign_and_damaged_traces_are_refused(tmp_path, lm, tiny):
    traces.collect(tmp_path, lm, prompt_of, 1, **SIZES)
    for other, message in [
        ({"block": 16}, r"differs in block \(8 there, 16 here\)"),
        ({"length": 56}, r"length \(48 there, 56 here\)"),
        ({"horizon": 4}, "horizon"),
        ({"identity": {"texts": "others"}}, r"texts \('some' there, 'others' here\); use another folder"),
    ]:
        with pytest.raises(LoadError, match=message):
            traces.collect(tmp_path, lm, prompt_of, 2, **SIZES | other)
    with pytest.raises(LoadError, match="differs in model .tiny"):
        traces.collect(tmp_path, tiny, prompt_of, 2, **SIZES)  # the name is the same, the weights are not
    with pytest.raises(ConfigError, match="48 tokens cannot be cut into blocks of 9"):
        traces.collect(tmp_path, lm, prompt_of, 1, **SIZES | {"block": 9})
    path = traces.path_of(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-20])
    for use in (lambda: traces.read(path), lambda: traces.collect(tmp_path, lm, prompt_of, 1, **SIZES)):
        with pytest.raises(LoadError, match="00000.safetensors' is no trace, or damaged.*delete it"):
            use()
    with pytest.raises(LoadError, match="00007"):
        traces.read(traces.path_of(tmp_path, 7))
