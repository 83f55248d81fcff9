"""A policy on a model that it was not trained for: one keep-set per sequence fits any, learned terms of each head do not."""

import dataclasses
import pathlib

import numpy as np
import pytest

import dcache
from dcache.tokenizer import ByteTokenizer
from tests import naive
from tests.naive import TINY

POLICIES = pathlib.Path(__file__).resolve().parents[1] / "policies"


@pytest.fixture(scope="module")
def other():
    """A random model of other depth and other numbers of heads than those of the default model and of "tiny"."""
    config = dataclasses.replace(TINY, num_layers=3, num_heads=6, num_kv_heads=1, head_dim=4)
    return dcache.LanguageModel(config, naive.weights(config), ByteTokenizer(), "other")


def test_sequence_policy_runs(other):
    prompt, continuation = naive.some_tokens(160), naive.some_tokens(8)
    got = dcache.fidelity(other, prompt, continuation, POLICIES / "smollm2-distillcache", 0.25, evict_every=4)
    assert np.isfinite(got.kl).all() and got.kl.max() > 0
    assert np.isfinite(got.nll).all() and got.nll[0] == got.nll_full[0]


def test_head_policy_refuses(other):
    with pytest.raises(dcache.ConfigError, match="for 30 layers of 3 key/value heads; the model has 3 of 1. Train one"):
        dcache.keep(other, naive.some_tokens(160), POLICIES / "smollm2-distillcache-head", 0.25)
