import dataclasses
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import smollm2
from dcache import checkpoint, metrics, workdir
from dcache.data.prompts import Prompt
from dcache.errors import CheckpointError, ConfigError, TrainingError
from dcache.experiment import from_config
from dcache.learn import distill, learner, loop
from dcache.learn.blocks import Shuffled, make_block, training_prompts, unseen_tokens
from dcache.load import load

TIMES = ("seconds", "tokens_per_second")


@pytest.fixture(scope="module")
def lm():
    return load("tiny")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A directory of made-up prose."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    words = "the river stone of a lamp and boat under to quiet hill wind from with old tree garden by morning".split()
    for name in ("a", "b", "c", "d", "e", "f"):
        sentences = [" ".join(rng.choice(words, rng.integers(6, 14))).capitalize() + "." for _ in range(200)]
        paragraphs = [" ".join(sentences[i : i + 5]) for i in range(0, 200, 5)]
        (folder / f"{name}.txt").write_text("\n\n".join(paragraphs))
    return folder


@pytest.fixture
def experiment(texts):
    config = smollm2.get_config("tiny")
    config.data.source = str(texts)
    return from_config(config)


def final_state(folder, experiment):
    template = jax.eval_shape(lambda: distill.init_state(jax.random.key(0), experiment.policy, experiment.learn))
    return checkpoint.restore(folder / "checkpoints", template, {})


def without_times(records):
    return [{k: v for k, v in record.items() if k not in TIMES} for record in records]


def interrupt_at(monkeypatch, step, number=signal.SIGTERM):
    """Sends this process a signal when the metrics of a step are written."""
    write = metrics.Writer.write

    def wrapped(self, at, record):
        write(self, at, record)
        if at == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(metrics.Writer, "write", wrapped)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_resumed_run_is_the_same_run(tmp_path, monkeypatch, experiment, lm, number):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert loop.train(experiment, whole, lm=lm) == loop.Outcome(6, 6, trained=True)
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        # Noticed after the next step, 2, in the middle of the first block of 4. `checkpoint_every` is 2, and the
        # metrics of step 1 are written while step 2 runs.
        interrupt_at(patch, 1, number)
        stopped = loop.train(dataclasses.replace(experiment, checkpoint_every=100), parts, lm=lm)
    assert stopped == loop.Outcome(2, 6, trained=True)
    assert signal.getsignal(number) is handler
    assert [record["step"] for record in metrics.read(parts)] == [1, 2]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4, number)  # noticed at once, before a checkpoint's next step: the end of the first block
        assert loop.train(experiment, parts, resume=True, lm=lm).step == 4
    assert loop.train(experiment, parts, resume=True, lm=lm) == loop.Outcome(6, 6, trained=True)
    assert loop.train(experiment, parts, resume=True) == loop.Outcome(6, 6, trained=False)

    state, key = final_state(whole, experiment)
    again, key_again = final_state(parts, experiment)
    assert int(state.step) == 6 and key == key_again
    jax.tree.map(np.testing.assert_array_equal, state, again)
    assert without_times(metrics.read(parts)) == without_times(metrics.read(whole))
    trained = checkpoint.load_policy(parts)
    assert trained.policy == experiment.policy
    jax.tree.map(np.testing.assert_array_equal, trained.params, state.average)


def test_what_a_run_writes(tmp_path, experiment, lm):
    loop.train(experiment, tmp_path, lm=lm)
    records = metrics.read(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    for i, record in enumerate(records):
        assert record["kl"] == record["kl@0.25"] and record["ratio"] == 0.25
        assert record["kl"] > -1e-6  # rounding: the random model's attention is so flat that a prompt may lose nothing
        assert record["kind"] in ("retrieval", "text") and record["prompt"].startswith(f"{i}:")
        assert {"reward", "kl_deviation", "surprise", "grad_norm", "baseline", *TIMES} <= record.keys()
    assert len({record["prompt"] for record in records}) == 6
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["4", "6"]  # keep_checkpoints = 2
    assert list((tmp_path / "tensorboard").iterdir())
    assert json.loads((tmp_path / "config.json").read_text())["learn"]["steps"] == 6
    description = json.loads((tmp_path / "policy" / "policy.json").read_text())
    assert description["step"] == 6
    assert description["model"]["name"] == "tiny" and description["model"]["num_layers"] == 2
    # The weights have moved from their start, in which the last layer is zero.
    assert float(jnp.abs(checkpoint.load_policy(tmp_path).params["params"]["Dense_2"]["kernel"]).max()) > 0


@pytest.mark.parametrize("settings", [{"estimator": "ranker"}, {"reward": "contribution"}])
def test_learning_from_what_the_oracle_sees(tmp_path, experiment, lm, settings):
    learn = dataclasses.replace(experiment.learn, steps=2, **settings)
    loop.train(dataclasses.replace(experiment, learn=learn), tmp_path, lm=lm)
    for record in metrics.read(tmp_path):
        assert 0 < record["reward"] <= 1 and "kl" not in record and record["grad_norm"] > 0


def test_seeds_differ(tmp_path, experiment, lm):
    def names(seed):
        ours = distill.Learner(dataclasses.replace(experiment, seed=seed), tmp_path, lambda: lm)
        return [prompt.name for prompt in ours.block(1).prompts]

    assert names(0) == names(0) != names(1)
    assert [name.split(":")[0] for name in names(0)] == ["4", "5", "6", "7"]  # block 1 of 4 prompts each


def test_a_run_is_not_overwritten(tmp_path, experiment, lm):
    loop.train(experiment, tmp_path, lm=lm)
    before = (tmp_path / metrics.FILE).read_text()
    with pytest.raises(CheckpointError, match=r"holds a run already \(step 6\).*--resume.*another --workdir"):
        loop.train(experiment, tmp_path, lm=lm)
    for fields, name in (
        ({"seed": 5}, "seed"),
        ({"learn": dataclasses.replace(experiment.learn, steps=8)}, "learn.steps"),
        ({"policy": dataclasses.replace(experiment.policy, hidden=8)}, "policy.hidden"),
        ({"model": "smollm2"}, "model"),
    ):
        with pytest.raises(CheckpointError, match=f"differs in config.{name} "):
            loop.train(dataclasses.replace(experiment, **fields), tmp_path, resume=True)
    assert (tmp_path / metrics.FILE).read_text() == before
    # What does not decide the course of training may change.
    renamed = dataclasses.replace(experiment, checkpoint_every=1, name="new")
    assert not loop.train(renamed, tmp_path, resume=True).trained


def test_other_weights_or_text_under_the_same_name(tmp_path, monkeypatch, experiment, lm, texts):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1)
        loop.train(experiment, tmp_path, lm=lm)
    other = dataclasses.replace(lm, config=dataclasses.replace(lm.config, rope_theta=2e4))
    with pytest.raises(CheckpointError, match="differs in architecture.rope_theta"):
        loop.train(experiment, tmp_path, resume=True, lm=other)
    monkeypatch.setattr(learner, "training_prompts", lambda *a: (training_prompts(*a)[0], "0123"))
    with pytest.raises(CheckpointError, match=r"differs in training_text \('\w{16}' there, '0123' here\)"):
        loop.train(experiment, tmp_path, resume=True, lm=lm)


def test_a_number_that_is_not_finite_stops_the_run(tmp_path, experiment, lm):
    layers = lm.params["layers"] | {"down": lm.params["layers"]["down"].at[1].set(jnp.nan)}
    broken = dataclasses.replace(lm, params=lm.params | {"layers": layers})
    with pytest.raises(TrainingError, match="Step 1, prompt '0:.*': .*kl is nan.*reward is nan"):
        loop.train(experiment, tmp_path, lm=broken)
    assert metrics.read(tmp_path) == []
    assert checkpoint.latest_step(tmp_path / "checkpoints") == 0
    assert loop.train(experiment, tmp_path, resume=True, lm=lm).step == 6  # from the last good checkpoint


def test_a_later_step_that_is_not_finite(tmp_path, monkeypatch, experiment, lm):
    update = distill.Learner.update

    def with_infinity(self, state, *rest):
        infinite = int(state.step) == 4
        new, values = update(self, state, *rest)
        return new, values | ({"reward": jnp.float32(-jnp.inf)} if infinite else {})

    monkeypatch.setattr(distill.Learner, "update", with_infinity)
    with pytest.raises(TrainingError, match="Step 5, prompt '4:.*': reward is -inf"):
        loop.train(experiment, tmp_path, lm=lm)
    assert [record["step"] for record in metrics.read(tmp_path)] == [1, 2, 3, 4]
    assert checkpoint.latest_step(tmp_path / "checkpoints") == 4


def test_a_held_workdir(tmp_path, experiment, lm):
    with workdir.lock(tmp_path), pytest.raises(workdir.WorkdirError, match="held by another run"):
        loop.train(experiment, tmp_path, lm=lm)
    assert not (tmp_path / "checkpoints").exists()


def test_prompts_longer_than_the_context(tmp_path, experiment, lm):
    short = dataclasses.replace(lm, config=dataclasses.replace(lm.config, max_positions=390))
    with pytest.raises(ConfigError, match="384 tokens and a horizon of 8 exceed the 390 positions of 'tiny'"):
        loop.train(experiment, tmp_path, lm=short)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks


def prompt(tokens, kind, continuation, name="x"):
    return Prompt(np.array(tokens, np.int32), kind, np.array(continuation, np.int32), (), name, kind)


def test_blocks_are_padded_and_cut():
    prompts = [prompt([5, 6, 7], "retrieval", [8]), prompt([9, 9, 9, 9], "text", [1, 2, 3])]
    block = make_block(prompts, 4, 2, "mixed")
    np.testing.assert_array_equal(block.tokens, [[5, 6, 7, 0], [9, 9, 9, 9]])
    np.testing.assert_array_equal(block.length, [3, 4])
    np.testing.assert_array_equal(block.given, [[8, 0], [1, 2]])
    np.testing.assert_array_equal(block.given_length, [1, 2])
    np.testing.assert_array_equal(block.own, [True, False])
    np.testing.assert_array_equal(make_block(prompts, 4, 2, "teacher").own, [True, True])
    np.testing.assert_array_equal(make_block(prompts, 4, 2, "given").own, [False, False])


def test_blocks_with_hidden_questions():
    asking = dataclasses.replace(prompt([5, 6, 7, 1, 2], "retrieval", [8, 9, 9]), question=2)
    plain = prompt([9, 9, 9, 9], "text", [1, 2, 3])
    block = make_block([asking, plain], 5, 2, "given", 3)
    np.testing.assert_array_equal(block.tokens, [[5, 6, 0, 0, 0], [9, 9, 9, 9, 0]])
    np.testing.assert_array_equal(block.length, [2, 4])
    np.testing.assert_array_equal(block.given, [[7, 1, 2, 8, 9], [1, 2, 0, 0, 0]])
    np.testing.assert_array_equal(block.given_length, [5, 2])
    np.testing.assert_array_equal(block.asked, [True, False])
    for trajectory in ("mixed", "teacher"):  # the model cannot go on by itself where nothing is asked
        np.testing.assert_array_equal(make_block([asking, plain], 5, 2, trajectory, 3).own, [True, False])
    assert block.unseen == 3 and make_block([asking], 5, 2, "given").unseen == 0
    assert unseen_tokens([asking, plain]) == 16 and unseen_tokens([plain]) == 0
    assert unseen_tokens([dataclasses.replace(asking, question=17)]) == 32
    for bad, unseen, says in ((asking, 1, "its question 2"), (asking, 5, "fewer than all"),
                              (prompt([5, 6], "retrieval", []), 1, "does not say")):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            make_block([bad], 5, 2, "given", unseen)


@pytest.mark.parametrize("question", ["seen", "hidden", "both"])
def test_questions_are_hidden_block_by_block(tmp_path, experiment, lm, question):
    hiding = dataclasses.replace(experiment, learn=dataclasses.replace(experiment.learn, question=question))
    made = distill.Learner(hiding, tmp_path, lambda: lm)
    unseen = [made.block(number).unseen for number in range(4)]
    assert [x > 0 for x in unseen] == {"seen": [False] * 4, "hidden": [True] * 4, "both": [False, True] * 2}[question]


def test_a_run_with_hidden_questions(tmp_path, experiment, lm):
    hiding = dataclasses.replace(experiment.learn, question="both")
    assert loop.train(dataclasses.replace(experiment, learn=hiding), tmp_path, lm=lm).step == experiment.learn.steps


def test_a_list_of_prompts_is_seen_evenly():
    prompts = [prompt([i], "text", [], name=str(i)) for i in range(5)]
    stream = Shuffled(prompts, seed=1)
    passes = [[int(stream[step].tokens[0]) for step in range(5 * k, 5 * k + 5)] for k in range(4)]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in passes)
    assert len({tuple(order) for order in passes}) > 1
    assert stream[7].name.startswith("7:") and Shuffled(prompts, 1)[7].name == stream[7].name


def test_benchmark_prompts(tmp_path, lm):
    item = {"input": "who?", "context": "a b c. " * 60, "answers": ["x"], "all_classes": None}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "dataset2prompt.json").write_text(json.dumps({"2wikimqa": "{context} {input}"}))
    (tmp_path / "2wikimqa.jsonl").write_text(json.dumps(item) + "\n")
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "It is 2.\n#### 2"}) + "\n")
    config = smollm2.get_config("tiny")
    config.data.source = "longbench+gsm8k"
    data = from_config(config).data
    data = dataclasses.replace(data, longbench_dir=str(tmp_path), gsm8k_dir=str(tmp_path), length=128)
    stream, digest = training_prompts(data, lm.tokenizer, 8, seed=0)
    assert sorted(stream[i].task for i in range(2)) == ["2wikimqa", "gsm8k"]
    assert all(0 < len(stream[i].tokens) <= 128 for i in range(2))
    assert digest == training_prompts(data, lm.tokenizer, 8, seed=5)[1]
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "1+2?", "answer": "It is 3.\n#### 3"}) + "\n")
    assert digest != training_prompts(data, lm.tokenizer, 8, seed=0)[1]
