"""The project's harness tasks on small files in each benchmark's format, through the harness's own task manager."""

import json
import logging
import math

import pytest
from lm_eval.tasks import TaskManager

from dcache.data.benchmarks import NO_CHAT
from dcache.errors import ConfigError, LoadError
from dcache.evaluate.longbench import GROUPS, TASKS
from dcache.tasks import PATH, WITHHELD, documents
from dcache.tasks.request import Request
from dcache.tokenizer import ByteTokenizer

TEMPLATE = "do this.\n\ntext:\n{context}\n\nnow do this: {input}\nanswer:"


def _item(number, words=5, **fields):
    return {
        "input": f"who is {number}?",
        "context": " ".join(f"w{i}" for i in range(words)) + " {input}",
        "answers": [f"man {number}", "he"],
        "length": words,
        "all_classes": None,
        "_id": f"id{number}",
    } | fields


def _write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "longbench"
    for task in TASKS:
        if task != "musique":
            classes = ["man 0", "he"] if task == "trec" else None
            _write(
                folder / f"{task}{'_e' if task == 'hotpotqa' else ''}.jsonl",
                _item(0, all_classes=classes),
                _item(1, 100),
            )
    _write(folder / "config" / "dataset2prompt.json", dict.fromkeys(TASKS, TEMPLATE))
    mini = tmp_path / "minilongbench" / "MiniLongBench_musique.json"
    mini.parent.mkdir()
    mini.write_text(json.dumps([{"prompt": "a ready prompt", "answers": ["x", "y"]}]))
    return tmp_path


def _load(name, data, **metadata):
    manager = TaskManager(
        include_path=PATH, include_defaults=False, metadata={"tokenizer": "tiny", "data_dir": str(data), **metadata}
    )
    tasks = manager.load([name])["tasks"]
    for task in tasks.values():
        task.build_all_requests()
    return tasks


def test_groups_hold_every_task_with_its_settings(data):
    tasks = _load("dcache_longbench", data)
    assert set(tasks) == {f"dcache_longbench_{task}" for task in TASKS}
    for task in TASKS:
        config = tasks[f"dcache_longbench_{task}"].config
        assert config.metadata["dataset"] == task and config.metadata["chat"] == (task not in NO_CHAT)
        assert config.generation_kwargs["until"] == (["\n"] if task == "samsum" else [])
    assert tasks["dcache_longbench_gov_report"].config.generation_kwargs["max_gen_toks"] == 512
    assert tasks["dcache_longbench_2wikimqa"].config.generation_kwargs["max_gen_toks"] == 32
    every = TaskManager(include_path=PATH, include_defaults=False).all_groups
    groups = [name for name in every if name.startswith("dcache_longbench")]
    assert len(groups) == 1 + len(GROUPS)
    members = _load("dcache_longbench_single", data)
    assert list(members) == [f"dcache_longbench_{task}" for task in GROUPS["single-document"]]


def test_longbench_prompts_and_scores(data, caplog):
    with caplog.at_level(logging.WARNING):
        (task,) = _load("dcache_longbench_hotpotqa", data, length=200).values()
    short, long = task.eval_docs
    assert short["prompt"] == TEMPLATE.replace("{input}", "who is 0?").replace("{context}", _item(0)["context"])
    assert (short["cut"], long["cut"], short["length"], short["_id"]) == (False, True, 5, "id0")
    assert len(ByteTokenizer().chat(long["prompt"])) == 200  # the template's token is counted
    assert long["prompt"].startswith("do this.\n\ntext:\nw0") and long["prompt"].endswith(
        "now do this: who is 1?\nanswer:"
    )
    assert "1 of 2 prompts are longer than 200 tokens" in caplog.text
    assert task.instances[0].args[0] == short["prompt"] and task.doc_to_target(short) == "man 0"
    assert task.process_results(short, ["He, man"]) == {"score": 1.0 * 2 / 3, "rouge_l": pytest.approx(0.5)}


def test_trec_is_scored_against_its_classes(data):
    (task,) = _load("dcache_longbench_trec", data, count=1).values()
    (doc,) = task.eval_docs
    assert task.process_results(doc, ["man 0\nhe"])["score"] == 1.0


def test_minilongbench_stands_in(data):
    (task,) = _load("dcache_longbench_musique", data).values()
    (doc,) = task.eval_docs
    assert doc["prompt"] == "a ready prompt" and doc["answers"] == ["x", "y"] and doc["length"] == 3
    nested = [{"prompt": "p", "answers": [{"answers": ["a"], "all_classes": ["a", "b"]}]}]
    path = data / "minilongbench" / "MiniLongBench_trec.json"
    path.write_text(json.dumps(nested))
    (data / "longbench" / "trec.jsonl").unlink()
    (doc,) = documents.longbench(dataset="trec", chat=False, data_dir=data)["test"]
    assert doc["answers"] == ["a"] and doc["all_classes"] == ["a", "b"]
    for text, problem in (("[", "not JSON"), ("{}", "no list"), ('[{"prompt": 1, "answers": ["a"]}]', "item 1")):
        path.write_text(text)
        with pytest.raises(LoadError, match=f"trec.json.*{problem}"):
            documents.longbench(dataset="trec", chat=False, data_dir=data)


def test_missing_and_malformed_files(data):
    path = data / "longbench" / "lcc.jsonl"
    with path.open("a") as file:
        file.write('{"input": \n')
    with pytest.raises(LoadError, match="lcc.jsonl, line 3: not JSON"):
        documents.longbench(dataset="lcc", chat=False, data_dir=data)
    # Whoever asks for the items before the bad line gets them.
    assert len(documents.longbench(dataset="lcc", chat=False, data_dir=data, count=2)["test"]) == 2
    path.unlink()
    with pytest.raises(LoadError, match="holds no lcc.jsonl or lcc_e.jsonl"):
        documents.longbench(dataset="lcc", chat=False, data_dir=data)
    with pytest.raises(LoadError, match="no directory .*longbench"):
        documents.withheld(dataset="gov_report", chat=True, data_dir=data / "minilongbench")
    with pytest.raises(LoadError, match="no file .*xquad.en.json"):
        documents.xquad(chat=True, data_dir=data)


@pytest.mark.parametrize("name", ["dcache_govreport_withheld", "dcache_passage_retrieval_withheld"])
def test_the_question_stands_behind_the_mark(data, name):
    dataset = "gov_report" if "gov" in name else "passage_retrieval_en"
    _write(data / "longbench" / f"{dataset}.jsonl", _item(0, context=f"a {WITHHELD} b"), _item(1, 100))
    (task,) = _load(name, data, length=150).values()
    short, long = task.eval_docs
    assert short["prompt"] == f"text:\na   b{WITHHELD}\n\nnow do this: who is 0?\nanswer:"
    shown, hidden = long["prompt"].split(WITHHELD)
    assert shown.startswith("text:\nw0") and hidden == "\n\nnow do this: who is 1?\nanswer:"
    assert long["cut"] and len(ByteTokenizer().chat(shown + hidden)) == 150
    assert "tail" not in long and not short["cut"]


def _squad(*questions):
    qas = [
        {"id": str(i), "question": q, "answers": [{"text": a, "answer_start": 0}]} for i, (q, a) in enumerate(questions)
    ]
    return {"data": [{"title": "t", "paragraphs": [{"context": "The cat sat on the mat. " * 9, "qas": qas}]}]}


def test_xquad(data):
    path = data / "ruler" / "xquad.en.json"
    _write(path, _squad(("Who sat?", "The cat"), ("Where?", "on the mat")))
    (task,) = _load("dcache_xquad", data, length=150).values()
    doc = task.eval_docs[1]
    assert doc["cut"] and doc["prompt"].endswith("\nQuestion: Where?\nAnswer:") and len(doc["prompt"]) == 149
    assert task.instances[0].args[1]["max_gen_toks"] == 32 and task.config.metadata["chat"]
    assert task.process_results(doc, ["the mat"]) == {"contains": 0.0, "f1": pytest.approx(2 / 3), "exact_match": 0.0}
    assert task.process_results(doc, ["On mat!"]) == {"contains": 1.0, "f1": 1.0, "exact_match": 1.0}
    sentence = task.process_results(doc, ["It sat on the mat."])  # two of four words
    assert sentence == {"contains": 1.0, "f1": pytest.approx(2 / 3), "exact_match": 0.0}
    assert task.process_results(doc, ["On matting."])["contains"] == 0.0  # whole words
    path.write_text('{"data": [{"paragraphs": [{"context": "c", "qas": [{"id": 1}]}]}]}')
    with pytest.raises(LoadError, match="xquad.en.json, question 1: not in SQuAD's format"):
        documents.xquad(chat=True, data_dir=data)


def _turns(*turns, **fields):
    text = "".join(f"### {'Assistant' if i % 2 else 'Human'}: {turn} " for i, turn in enumerate(turns))
    return {"input": text + "### Assistant:", "output": "fine", **fields}


def test_conversations_are_english_and_joined(data):
    _write(
        data / "oasst" / "oa_questions.jsonl",
        _turns("hi", lang="en"),  # a single turn
        _turns("one", "two", "three", lang="en"),
        _turns("one", "two", "three", "four", "five", lang="en"),  # goes on with the one before
        _turns("uno", "dos", "tres", lang="es"),
        _turns("six", "seven", "eight"),  # no mark: by its characters
        _turns("шесть", "семь", "восемь"),
        _turns("x" * 200, "seven", "eight", lang="en"),
    )
    (task,) = _load("dcache_oasst_4k", data, length=130).values()
    first, second = task.eval_docs
    expected = (
        "### human: one ### assistant: two ### human: three ### assistant: four ### human: five ### assistant: fine\n\n"
    )
    assert first["text"] == (expected + "### human: six ### assistant: seven")[:130] and first["tokens"] == 130
    assert second["text"] == "### human: " + "x" * 119
    assert task.instances[0].args == (first["text"],) and "OASST1" in task.config.metadata["data"]
    with pytest.raises(LoadError, match="no text of 4096 tokens"):
        _load("dcache_oasst_4k", data)


def test_wikitext_and_perplexity(data):
    (data / "wikitext2").mkdir()
    (data / "wikitext2" / "valid.txt").write_text("ab cd\n" * 5)
    (task,) = _load("dcache_wikitext", data, length=12).values()
    assert [doc["text"] for doc in task.eval_docs] == ["ab cd\nab cd\n"] * 2
    assert task.instances[1].args == ("ab cd\nab cd\n",)
    found = task.process_results(task.eval_docs[0], [-24.0])
    assert found == {"perplexity": (-24.0, 12), "word_perplexity": (-24.0, 4), "bits_per_byte": (-24.0, 12)}
    mean = {name: function([found[name]]) for name, function in task.aggregation().items()}
    assert mean["perplexity"] == pytest.approx(math.exp(2)) and mean["word_perplexity"] == pytest.approx(math.exp(6))
    assert mean["bits_per_byte"] == pytest.approx(2 / math.log(2))
    with pytest.raises(ConfigError, match="'tokenizer' and 'length'"):
        documents.wikitext(data_dir=data)
    with pytest.raises(LoadError, match="'data_dir'"):
        documents.wikitext(tokenizer="tiny", length=12)


def test_requests(data):
    tokenizer = ByteTokenizer()
    assert Request.of({"tokenizer": tokenizer, "version": 1.0}) == Request(tokenizer)
    assert isinstance(Request.of({"pretrained": "tiny"}).tokenizer, ByteTokenizer)
    for metadata in ({"length": 0}, {"count": True}, {"count": "3"}, {"length": 5}):
        with pytest.raises(ConfigError, match=next(iter(metadata))):
            Request.of(metadata)
    with pytest.raises(LoadError, match="data_dir"):
        Request.of({"data_dir": str(data / "nowhere")})
