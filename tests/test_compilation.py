import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from configs import kvp_smollm2, mistral7b
from dcache import compilation, hlo
from dcache.axes import ShardingRules
from dcache.compilation import Compiled, Target
from dcache.config import PRESETS
from dcache.errors import ConfigError
from dcache.experiment import from_config
from dcache.load import config_of
from dcache.roofline import Chip
from dcache.sharding import make_mesh
from dcache.signals import PAPER_SIGNALS

ROOT = Path(__file__).parents[1]
RULES = ShardingRules(data=4, tensor=2)


@pytest.fixture(scope="module")
def steps():
    """The steps of the tiny model on a mesh of CPU devices: everything but the TPU's compiler."""
    config = mistral7b.get_config("tiny")
    config.data.length, config.learn.horizon, config.learn.samples, config.dtype = 128, 4, 4, "float32"
    target = Target("cpu:8", RULES, make_mesh(RULES))
    found = list(compilation.compile_steps(from_config(config), target))
    assert [step.name for step in found] == list(compilation.STEPS)
    return {step.name: step for step in found}


def test_weights_and_caches_of_one_chip(steps):
    tiny = PRESETS["tiny"]
    d, f, v, heads = tiny.embed_dim, tiny.ffn_dim, tiny.vocab_size, tiny.num_heads + tiny.num_kv_heads
    split = v * d + tiny.num_layers * (d * 2 * heads * tiny.head_dim + 3 * d * f)
    # q and o have N heads each, k and v K heads each: 2 (N + K) in all.
    weights = 4 * (split / 2 + (2 * tiny.num_layers + 1) * d)
    assert steps["students"].weights == steps["prefill"].weights == weights
    assert steps["teacher"].weights == 2 * weights  # for reading and for decoding
    keys_and_values = 2 * tiny.num_layers * 1 * tiny.head_dim * 4
    # Eight prompts on four groups of chips, one key/value head on each chip of a group.
    assert steps["prefill"].cache > 2 * keys_and_values * 32


def test_the_cache_of_a_decoding_loop_is_donated(steps):
    decode = steps["decode"]
    assert decode.donates and decode.donated >= decode.cache > 0
    assert steps["students"].donates is False  # the next students read the teacher's cache, too
    assert steps["teacher"].donates is None and steps["teacher"].donated == 0
    # Its budget is a quarter of 128 tokens and 64 more: what is read in 16 tokens is at least the weights each time.
    assert decode.units == 16 and decode.work.bytes > 16 * decode.weights


def test_work_is_shared_among_chips(steps):
    tiny, prompts, length, hidden = PRESETS["tiny"], 8, 128, 128
    layer = tiny.embed_dim * (2 * (tiny.num_heads + tiny.num_kv_heads) * tiny.head_dim + 3 * tiny.ffn_dim)
    weights = 2 * prompts * length * tiny.num_layers * layer / 8
    attention = 4 * prompts * length**2 * tiny.num_layers * tiny.num_heads * tiny.head_dim / 8
    # The network that scores tokens is whole on each chip and works on the prompts of its group.
    scores = 2 * prompts * length * (len(PAPER_SIGNALS) * hidden + hidden * hidden + hidden) / 4
    on_paper = weights + attention + scores
    assert on_paper < steps["prefill"].work.flops < 1.2 * on_paper
    assert sum(steps["prefill"].work.sent.values()) > 0
    assert all(step.work.unknown == () for step in steps.values())


def step(name, units, work):
    return Compiled(
        name,
        units,
        weights=2e9,
        cache=1e9,
        temporaries=5e8,
        total=4e9,
        donated=1e9,
        donates=True,
        phases=(work,),
        seconds=3,
    )


CHIP = Chip(flops=1e12, memory=16e9, bandwidth=1e9, link=1e9)


def test_a_training_step_is_a_share_of_the_teacher_and_the_students():
    found = [
        step("teacher", 4, hlo.Work(flops=8e12, bytes=1e9)),
        step("students", 1, hlo.Work(flops=1e12, bytes=3e9)),
        step("decode", 16, hlo.Work(flops=1e15)),
    ]
    assert compilation.training_seconds(found, CHIP) == 8 / 4 + 3


def test_what_is_printed():
    work = hlo.Work(2e12, 1e9, {"all-reduce": 5e8}, {"all-reduce": 64}, ("rounds of the loop w",))
    text = "\n".join(compilation.lines_of(step("decode", 16, work), CHIP))
    for expected in (
        "decode: one call for 16 tokens", "4.00 of 16 GB", "cache 1.00 (donated)", "0.500 GB by 64 all-reduce",
        "2000.00 ms, bound by compute", "links 250.00 ms", "not counted: rounds of the loop w",
    ):  # fmt: skip
        assert expected in text, text
    kept = dataclasses.replace(step("decode", 16, work), donates=False)
    assert "not donated" in compilation.lines_of(kept, CHIP)[1]


def test_a_mistake_on_the_command_line_is_one_line():
    command = [
        sys.executable,
        str(ROOT / "launch/compile.py"),
        f"--config={ROOT}/configs/mistral7b.py",
        "--topology=v4:2x2x1",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: The topology 'v4:2x2x1'") and done.stdout == ""
    assert done.stderr.count("\n") == 1


def test_without_libtpu(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs libtpu, which is not installed"):
        compilation.describe("v5e:2x4")


def test_other_methods_are_refused():
    target = Target("cpu:8", RULES, make_mesh(RULES))
    with pytest.raises(ConfigError, match="'kvp'.*DistillCache"):
        next(compilation.compile_steps(from_config(kvp_smollm2.get_config("tiny")), target))


def test_architectures_without_weights():
    found = config_of("mistralai/Mistral-7B-Instruct-v0.3", "bfloat16")
    assert found == PRESETS["mistral7b"] and config_of("llama3_8b", "bfloat16") == PRESETS["llama3_8b"]
    assert config_of("smollm2", "bfloat16") == dataclasses.replace(PRESETS["smollm2"], dtype="bfloat16")
