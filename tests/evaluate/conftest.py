"""What the tests of the evaluation share: a small model whose continuations vary, random prompts, made-up records."""

import dataclasses

import jax
import numpy as np
import pytest

from dcache.config import PRESETS
from dcache.data.prompts import Prompt
from dcache.load import LanguageModel
from dcache.model import init_params

LENGTH = 48


class Numbers:
    """A tokenizer whose text is the token ids themselves, so that answers can be compared token by token."""

    bos_id = None
    adds_bos = False
    vocab_size = 64

    def __init__(self, eos_ids=(1,)):
        self.eos_ids = eos_ids

    def encode(self, text):
        return np.array([int(word) for word in text.split()], np.int32)

    def decode(self, ids):
        return " ".join(str(int(i)) for i in ids)

    def chat(self, messages):
        return self.encode(messages)


@pytest.fixture(scope="session")
def lm():
    config = PRESETS["tiny"]
    params = init_params(jax.random.key(3), config)
    # The tied embedding of the preset repeats its input for ever; a head of its own gives varied continuations.
    config = dataclasses.replace(config, tie_embeddings=False)
    params["head"] = 0.7 * jax.random.normal(jax.random.key(4), (config.embed_dim, config.vocab_size), np.float32)
    return LanguageModel(config, params, Numbers(), "varied")


def make_prompt(number, kind, length, answers=()):
    rng = np.random.default_rng([number, length])
    return Prompt(
        rng.integers(2, 64, length).astype(np.int32), kind, rng.integers(2, 64, 20).astype(np.int32), answers,
        f"{kind}{number}", "text" if kind == "text" else "fact/number",
    )  # fmt: skip


@pytest.fixture(scope="session")
def prompts():
    """Three retrieval prompts and two of plain text, of different lengths, at most `LENGTH`."""
    return [
        make_prompt(0, "retrieval", 48), make_prompt(1, "retrieval", 44), make_prompt(2, "retrieval", 44),
        make_prompt(3, "text", 48), make_prompt(4, "text", 44),
    ]  # fmt: skip


@pytest.fixture
def sample():
    """Header and records of an evaluation that was never run: `ours` (trained) is better than `h2o` on every prompt."""
    methods = {"full": None, "h2o": None, "h2o@sequence": None, "random": None, "ours": "abc"}
    header = {
        "model": "made <up>",
        "settings": {"length": 48, "horizon": 16, "evict_every": 0, "unseen": 0},
        "arms": [
            {
                "method": method, "budget": budget, "policy": f"{method}()", "weights": weights,
                "granularity": "head" if method == "h2o" else "sequence",
            }
            for method, weights in methods.items()
            for budget in (("100%",) if method == "full" else ("50%", "25%"))
        ],
    }  # fmt: skip
    factor = {"full": 0.0, "h2o": 1.0, "h2o@sequence": 1.5, "random": 4.0, "ours": 0.5}
    rng = np.random.default_rng(0)
    records = []
    for i in range(30):
        kind, level = ("retrieval", "text")[i % 2], 0.2 + rng.random()
        arms = {}
        for arm in header["arms"]:
            budget = {"100%": 1.0, "50%": 0.5, "25%": 0.25}[arm["budget"]]
            kl = factor[arm["method"]] * level * (1 - budget)
            cell = {"kl": kl, "top1": 1.0 - kl / 8, "nll": 2.0 + kl, "kept": budget, "retained": [budget] * 20}
            if kind == "retrieval":
                cell |= {"answer": "x", "correct": arm["method"] in ("full", "ours") or i % 6 == 0}
            arms.setdefault(arm["method"], {})[arm["budget"]] = cell
        records.append({"name": f"p{i}", "kind": kind, "task": "t", "length": 48, "counted": 16, "arms": arms})
    return header, records
