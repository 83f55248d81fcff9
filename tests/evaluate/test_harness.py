import dataclasses
import json
import pathlib

import jax
import pytest

from configs import smollm2
from dcache.data import text
from dcache.errors import BudgetError, ConfigError
from dcache.evaluate import harness
from dcache.experiment import from_config
from dcache.load import load
from dcache.policies.base import Trained
from dcache.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def experiment():
    found = from_config(smollm2.get_config("tiny"))
    chosen = dataclasses.replace(found.eval, policies=("full", "random"), budgets=(0.25,), prompts=2)
    return dataclasses.replace(found, eval=chosen)


def changed(experiment, **fields):
    return dataclasses.replace(experiment, eval=dataclasses.replace(experiment.eval, **fields))


@pytest.fixture(scope="module")
def trained(experiment):
    return {"ours": Trained(experiment.policy, experiment.policy.init(jax.random.key(0)))}


def test_prompts_come_from_documents_that_training_never_sees(experiment):
    prompts = harness.held_out_prompts(changed(experiment, prompts=12), ByteTokenizer())
    assert [p.kind for p in prompts] == ["retrieval"] * 12 + ["text"] * 12
    train, _ = text.split_documents(text.installed_text(), experiment.data.held_out)
    training_names = {document.name for document in train}
    assert not training_names & {p.name.split("@")[0] for p in prompts}
    training_text = "\n".join(document.text for document in train).lower()
    for prompt in prompts[12:]:
        window = ByteTokenizer().decode(prompt.tokens).strip()
        assert window[40:120] not in training_text
        assert len(prompt.tokens) == experiment.data.length and len(prompt.continuation) == experiment.eval.horizon


def test_prompts_follow_the_seed(experiment):
    first, again, other = (
        [p.name for p in harness.held_out_prompts(changed(experiment, seed=seed), ByteTokenizer())]
        for seed in (1, 1, 2)
    )
    assert first == again and first != other


def test_settings(experiment):
    found = harness.settings_of(changed(experiment, horizon=16, evict_every=4, accuracy=False, seed=9))
    assert (found.length, found.horizon, found.evict_every, found.new_tokens, found.seed) == (384, 16, 4, 0, 9)
    assert harness.settings_of(experiment).new_tokens == harness.ANSWER_TOKENS


def test_check(experiment, trained):
    assert list(harness.check(experiment, trained)) == ["full", "random", "ours"]
    with pytest.raises(ConfigError, match="Unknown policy 'h3o'"):
        harness.check(changed(experiment, policies=("h3o",)), trained)
    with pytest.raises(BudgetError, match="streaming_llm always keeps 4"):
        harness.check(changed(experiment, policies=("streaming_llm",), budgets=(2,)), trained)
    with pytest.raises(ConfigError, match="Two policies are called random"):
        harness.check(experiment, {"random": trained["ours"]})
    with pytest.raises(ConfigError, match="not a multiple"):
        harness.check(changed(experiment, evict_every=3), trained)


def test_labels():
    assert harness.labelled(["a=runs/x", "runs/y/"]) == {"a": pathlib.Path("runs/x"), "y": pathlib.Path("runs/y")}
    for wrong in ("=runs/x", "a=", ""):
        with pytest.raises(ConfigError, match="names no policy"):
            harness.labelled([wrong])
    with pytest.raises(ConfigError, match="called 'x'"):
        harness.labelled(["runs/x", "x=elsewhere"])


def test_run_and_publish(experiment, trained, tmp_path):
    lm = load("tiny")
    header, records = harness.run(lm, experiment, harness.check(experiment, trained), tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "reward": -1.0, "surprise": 5.0}\n')
    markdown = harness.publish(
        header, records, experiment, tmp_path, title="T", commands=["python launch/eval.py"], metrics={"ours": metrics}
    )
    assert (tmp_path / "table.md").read_text() == markdown and "| ours" in markdown
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["config"]["name"] == "smollm2-tiny" and summary["commands"] == ["python launch/eval.py"]
    assert {cell["method"] for cell in summary["cells"]} == {"full", "random", "ours"}
    assert (tmp_path / "report.html").read_text().count("data:image/png;base64,") == 3
    assert {p.name for p in tmp_path.glob("*.png")} == {"kl.png", "retained.png", "training.png"}
