"""Local files in place of the harness tasks' datasets: gsm8k_cot, BBH and BoolQ through the harness itself."""

import json

import pytest
from lm_eval.tasks import TaskManager

from dcache.data.local import local_dataset, localise
from dcache.errors import LoadError


@pytest.fixture(scope="module")
def manager():
    return TaskManager()


@pytest.fixture
def data(tmp_path):
    question = {"question": "One plus one?", "answer": "It is <<1+1=2>>2.\n#### 2"}
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(json.dumps(question) + "\n")
    (tmp_path / "bbh" / "bbh").mkdir(parents=True)
    examples = {"canary": "...", "examples": [{"input": "Which?\nOptions:\n(A) x\n(B) y", "target": "(B)"}] * 2}
    (tmp_path / "bbh" / "bbh" / "snarks.json").write_text(json.dumps(examples))
    (tmp_path / "boolq").mkdir()
    rows = [{"question": f"is it {word}", "answer": word == "so", "passage": "It is so."} for word in ("so", "not so")]
    (tmp_path / "boolq" / "boolq.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def _load(manager, name, data):
    """As a runner does it: inside a group, the overrides join what the task's own file says."""
    overrides = localise(manager.task_index[name].cfg, data)
    (task,) = manager.load([{"group": "local", "task": [{"task": name, **overrides}]}])["tasks"].values()
    task.build_all_requests(limit=1)
    return task


def test_gsm8k(manager, data):
    task = _load(manager, "gsm8k_cot", data)
    context = task.instances[0].args[0]
    assert context.endswith("Q: One plus one?\nA:")
    assert context.count("Q: ") == 9  # eight worked examples of the harness, then the question
    assert task.doc_to_target(task.eval_docs[0]) == "2"


def test_bbh(manager, data):
    task = _load(manager, "bbh_fewshot_snarks", data)
    assert task.instances[0].args[0].endswith("(A) x\n(B) y\nA:") and len(task.eval_docs) == 2
    assert task.doc_to_target(task.eval_docs[0]) == "(B)"


def test_every_bbh_task_is_known(manager, data):
    names = [name for name in manager.all_tasks if name.startswith("bbh_fewshot_")]
    assert len(names) == 27
    for name in names:
        subtask = name.removeprefix("bbh_fewshot_")
        (data / "bbh" / "bbh" / f"{subtask}.json").write_text('{"examples": [{"input": "i", "target": "t"}]}')
        found = localise(manager.task_index[name].cfg, data)["custom_dataset"](version=2.0)
        assert found["test"][0] == {"input": "i", "target": "t"}


def test_boolq(manager, data):
    task = _load(manager, "boolq", data)
    assert {doc["question"]: task.doc_to_target(doc) for doc in task.eval_docs} == {"is it so": 1, "is it not so": 0}
    first = task.eval_docs[0]["question"]
    assert [instance.args for instance in task.instances] == [
        (f"It is so.\nQuestion: {first}?\nAnswer:", f" {choice}") for choice in ("no", "yes")
    ]
    rows = [{"question": f"q{i}", "answer": i < 300, "passage": "p"} for i in range(400)]  # sorted by the answer
    (data / "boolq" / "boolq.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = local_dataset("google/boolq", None, data)["validation"]["answer"]
    assert sum(answers) == 300 and 25 <= sum(answers[:40]) <= 35


def test_errors(manager, data):
    assert local_dataset("someone/else", None, data) is None
    config = {"task": "piqa", "dataset_path": "baber/piqa"}
    with pytest.raises(LoadError, match="'piqa' needs the dataset 'baber/piqa'.*hub.*Known: openai/gsm8k main"):
        localise(config, data)
    assert localise({"task": "x", "custom_dataset": list}, data) == {}
    (data / "gsm8k" / "train.jsonl").unlink()
    with pytest.raises(LoadError, match="no file .*train.jsonl"):
        local_dataset("openai/gsm8k", "main", data)
    with pytest.raises(LoadError, match="no file .*navigate.json"):
        local_dataset("SaylorTwift/bbh", "navigate", data)
    path = data / "bbh" / "bbh" / "snarks.json"
    for text in ("{", "[]", '{"examples": [{"input": "i"}]}', '{"examples": [{"input": 1, "target": "t"}]}'):
        path.write_text(text)
        with pytest.raises(LoadError, match="snarks.json"):
            local_dataset("SaylorTwift/bbh", "snarks", data)
    (data / "boolq" / "boolq.jsonl").write_text('\n{"question": "q", "passage": "p", "answer": 1}\n')
    with pytest.raises(LoadError, match="boolq.jsonl, line 2: the field 'answer'"):
        local_dataset("aps/super_glue", "boolq", data)
