"""Benchmarks with the harness's own tasks and this project's, on small local files in each benchmark's format."""

import dataclasses
import json
import logging
import re
import shutil

import pytest
from lm_eval.api.instance import Instance

import dcache
from dcache.errors import ConfigError, LoadError
from dcache.evaluate import benchmark, benchmark_tables, longbench, runs
from dcache.evaluate.fidelity import heuristic, make_arms
from dcache.tasks import WITHHELD

TASKS = ("gsm8k_cot", "boolq", "dcache_longbench_trec")


@pytest.fixture(scope="module")
def tiny():
    return dcache.load("tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")

    def write(name, rows):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    solved = {"question": "Two cats and three dogs: how many animals?", "answer": "2+3=5\n#### 5"}
    write("gsm8k/train.jsonl", [solved] * 9)
    write("gsm8k/test.jsonl", [solved | {"question": f"{i} and {i}: how many?"} for i in range(3)])
    write("boolq/boolq.jsonl", [{"passage": "Cats sleep a lot.", "question": f"do {i} cats sleep", "answer": True}
                                for i in range(3)])  # fmt: skip
    trec = {"input": "Question: What is a cat?\nType:", "context": "Question: Who?\nType: Person\n" * 20,
            "answers": ["Animal"], "all_classes": ["Animal", "Person"], "length": 40, "dataset": "trec",
            "language": "en", "_id": "a"}  # fmt: skip
    write("longbench/trec.jsonl", [trec | {"_id": str(i)} for i in range(2)])
    config = folder / "longbench" / "config"
    config.mkdir()
    (config / "dataset2prompt.json").write_text(json.dumps({"trec": "Name the type.\n\n{context}\n{input}"}))
    (config / "dataset2maxlen.json").write_text(json.dumps({"trec": 64}))
    return folder


def settings_of(data, **changes):
    chosen = benchmark.Settings(tasks=TASKS, count=2, data_dir=str(data), length=300, most_new=6)
    return dataclasses.replace(chosen, **changes)


def arms_of(*names):
    return make_arms({name: heuristic(name) for name in names}, [0.25], 128)


@pytest.fixture(scope="module")
def found(tiny, data, tmp_path_factory):
    path = tmp_path_factory.mktemp("out") / "results.jsonl"
    return *benchmark.run(tiny, settings_of(data), arms_of("h2o"), path), path


def test_three_tasks(found):
    header, records, _ = found
    assert [record["task"] for record in records] == [task for task in TASKS for _ in range(2)]
    assert header["tasks"] == sorted(TASKS) and [arm["method"] for arm in header["arms"]] == ["full", "h2o"]
    for record in records:
        full, h2o = record["arms"]["full"]["100%"], record["arms"]["h2o"]["25%"]
        assert 0.0 <= full["score"] <= 1.0 and full["kl"] == pytest.approx(0.0, abs=1e-6)
        assert full["kept"] == 1.0 and h2o["kept"] < 0.8  # no budget is below 32 tokens
        assert len(h2o["retained"]) == 20
        assert record["evicted"] == "after the prefill"
    gsm8k, choice, trec = records[0], records[2], records[4]
    assert set(gsm8k["arms"]["full"]["100%"]["metrics"]) == {"exact_match,strict-match", "exact_match,flexible-extract"}
    assert choice["arms"]["full"]["100%"]["answer"] in ("yes", "no")
    assert set(trec["arms"]["h2o"]["25%"]["metrics"]) == {"score", "rouge_l"}
    for results in (trec["arms"]["full"]["100%"], trec["arms"]["h2o"]["25%"]):
        assert results["score"] == longbench.score("trec", results["answer"], ["Animal"], ["Animal", "Person"])
    for results in (choice["arms"]["full"]["100%"], choice["arms"]["h2o"]["25%"]):
        assert results["score"] == float(results["answer"] == "yes")  # all are true
    assert trec["cut"] and trec["length"] == 300 and trec["doc_length"] == 40
    text = benchmark_tables.of_one_run(header, records)
    assert (
        re.search(r"^\| task +\| n \| remarks +\| full +\| h2o +\|", text, re.M)
        and "## Scores in percent at 25%" in text
    )
    assert re.search(r"^\| gsm8k_cot +\| 2 \| .* \| 0.0 \[0.0, 0.0\] +\| 0.0 \[0.0, 0.0\]; \d\.\d{3} +\|", text, re.M)


def test_a_killed_run_goes_on_and_ends_alike(tiny, data, found, tmp_path):
    _, records, path = found
    lines = path.read_bytes().splitlines(keepends=True)
    again = tmp_path / "results.jsonl"
    again.write_bytes(b"".join(lines[:3]) + lines[3][:40])  # killed while it wrote the third example
    _, repeated = benchmark.run(tiny, settings_of(data), arms_of("h2o"), again)
    assert repeated == records
    assert again.read_bytes() == path.read_bytes()


def test_an_arm_does_not_depend_on_the_others(tiny, data, found, tmp_path):
    _, records, _ = found
    _, beside = benchmark.run(
        tiny, settings_of(data, tasks=("boolq",)), arms_of("random", "h2o", "snapkv"), tmp_path / "r.jsonl"
    )
    for record, alone in zip(beside, records[2:4], strict=True):
        a, b = record["arms"]["h2o"]["25%"], alone["arms"]["h2o"]["25%"]
        assert a["kl"] == pytest.approx(b["kl"], abs=1e-6) and a["answer"] == b["answer"]


def test_results_of_other_settings_are_refused(tiny, data, found):
    with pytest.raises(ConfigError, match="another evaluation"):
        benchmark.run(tiny, settings_of(data, count=1), arms_of("h2o"), found[2])


def test_results_of_other_data_are_refused(tiny, data, found, tmp_path):
    moved = tmp_path / "data"
    shutil.copytree(data, moved)
    _, same = benchmark.run(tiny, settings_of(moved), arms_of("h2o"), found[2])  # the place itself does not matter
    assert same == found[1]
    path = moved / "boolq" / "boolq.jsonl"
    path.write_text(path.read_text().replace("Cats", "Dogs"))
    with pytest.raises(ConfigError, match="requests_digest"):
        benchmark.run(tiny, settings_of(moved), arms_of("h2o"), found[2])


def test_an_answer_longer_than_the_context_is_a_reported_skip(tiny, data, tmp_path, caplog):
    small = dataclasses.replace(tiny, config=dataclasses.replace(tiny.config, max_positions=64))
    with caplog.at_level(logging.WARNING):
        header, records = benchmark.run(
            small,
            settings_of(data, tasks=("dcache_longbench_trec",), most_new=None, length=60),
            arms_of("h2o"),
            tmp_path / runs.FILE,
        )
    assert all(record["arms"] == {} for record in records)
    assert "2 examples skipped" in caplog.text
    assert "2 examples were skipped" in benchmark_tables.of_one_run(header, records)
    assert runs.read(tmp_path).skipped == 2 and runs.read(tmp_path).records == []  # the report leaves them out


def test_prompts_are_written_for_other_software(found):
    _, records, path = found
    lines = [json.loads(line) for line in (path.parent / benchmark.PROMPTS).read_text().splitlines()]
    written = [record for record in records if record["task"] != "boolq"]  # multiple choice writes no answer
    assert [line["name"] for line in lines] == [record["name"] for record in written]
    for line, record in zip(lines, written, strict=True):
        assert set(line) == {"name", "task", "tokens", "withheld", "new_tokens", "stop"}
        assert len(line["tokens"]) == record["length"] and line["new_tokens"] == 6 and line["withheld"] == 0
    assert "Q:" in lines[0]["stop"]


def test_prompts_are_rewritten_alike(tiny, data, found):
    path = found[2].parent / benchmark.PROMPTS
    before = path.read_bytes()
    path.write_text("old")
    benchmark.run(tiny, settings_of(data), arms_of("h2o"), found[2])
    assert path.read_bytes() == before


def test_withheld_prompts_say_what_is_really_hidden(tiny):
    example = benchmark._Example(
        "a@0", "a", None, {}, (Instance("generate_until", {}, ("x" * 40 + WITHHELD + "y" * 17, {"until": "\n"}), 0),)
    )
    prompt = benchmark.prompt_of(tiny, example, benchmark.Settings(tasks=("a",), most_new=3))
    # The opening token and 57 letters; 17 hidden ones become two times 16.
    assert (len(prompt.tokens), prompt.withheld, prompt.new_tokens, prompt.stop) == (58, 32, 3, ["\n"])


def test_unknown_tasks_and_missing_data(tiny, data, tmp_path):
    with pytest.raises(ConfigError, match="gsm8k_cot"):
        benchmark.load_tasks(settings_of(data, tasks=("gsm8k_co",)), tiny)
    with pytest.raises(LoadError, match="gov_report"):
        benchmark.load_tasks(settings_of(data, tasks=("dcache_longbench_gov_report",)), tiny)
    with pytest.raises(LoadError, match="hub"):
        benchmark.load_tasks(settings_of(data, tasks=("hellaswag",)), tiny)
    with pytest.raises(ConfigError, match="no tasks"):
        benchmark.Settings(tasks=())
    with pytest.raises(ConfigError, match="count is 0"):
        benchmark.Settings(tasks=("boolq",), count=0)


def test_groups_and_tags_stand_for_their_tasks():
    manager = benchmark._manager()
    assert benchmark._leaves(manager, "dcache_longbench_code") == [
        "dcache_longbench_lcc",
        "dcache_longbench_repobench-p",
    ]
    assert len(benchmark._leaves(manager, "bbh_fewshot")) == 27


def test_every_length_of_ruler_has_its_items(tiny, tmp_path):
    settings = benchmark.Settings(
        tasks=("dcache_ruler_niah_single_1",), count=2, ruler_lengths=(1500, 2000), most_new=2
    )
    header, records = benchmark.run(tiny, settings, arms_of("streaming_llm"), tmp_path / "results.jsonl")
    assert [record["doc_length"] for record in records] == [1500, 1500, 2000, 2000]
    assert all(0.85 * r["doc_length"] < r["length"] <= r["doc_length"] for r in records)
    table = benchmark_tables.of_one_run(header, records)
    assert "| dcache_ruler_niah_single_1 at 1500 | 2 |" in table and "at 2000 | 2 |" in table


def test_results_say_whether_eviction_came_during_the_prefill(tiny, tmp_path):
    settings = benchmark.Settings(
        tasks=("dcache_ruler_niah_single_1",), count=1, ruler_lengths=(1500,), most_new=2, prefill_chunk=512
    )
    _, (record,) = benchmark.run(tiny, settings, arms_of("h2o"), tmp_path / "results.jsonl")
    assert record["evicted"] == "during the prefill" and set(record["arms"]["h2o"]["25%"]) >= {"kl", "kept", "answer"}
    assert "during" not in record["arms"]["h2o"]["25%"]
    whole = dataclasses.replace(settings, prefill_chunk=2000)
    _, (record,) = benchmark.run(tiny, whole, arms_of("h2o"), tmp_path / "whole.jsonl")
    assert record["evicted"] == "after the prefill"
    with pytest.raises(ConfigError, match="prefill_chunk is 512 and evict_every 8"):
        dataclasses.replace(settings, evict_every=8)
