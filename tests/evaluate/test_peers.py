"""Other software's answers: scored with the tasks' metrics, refused if they are to other prompts, and the script itself."""

import dataclasses
import hashlib
import json
import os
import pathlib
import subprocess

import pytest

import dcache
from dcache.errors import CheckpointError, ConfigError
from dcache.evaluate import benchmark, benchmark_tables, peers
from dcache.evaluate.fidelity import heuristic, make_arms
from dcache.load import find_directory

ROOT = pathlib.Path(__file__).resolve().parents[2]
TORCH = os.environ.get("DCACHE_TORCH_PYTHON")


@pytest.fixture(scope="module")
def tiny():
    """The small model with a short context, to which the prompts are cut."""
    lm = dcache.load("tiny")
    return dataclasses.replace(lm, config=dataclasses.replace(lm.config, max_positions=256))


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Two items of GSM8K, whose answers are 6 and 8."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "gsm8k").mkdir()
    rows = [{"question": f"{n} and {n}: how many?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(3, 12)]
    for split in ("train", "test"):
        (folder / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return benchmark.Settings(tasks=("gsm8k_cot",), count=2, data_dir=str(folder), most_new=6)


@pytest.fixture(scope="module")
def run(tiny, settings, tmp_path_factory):
    path = tmp_path_factory.mktemp("out") / "results.jsonl"
    arms = make_arms({"knorm": heuristic("knorm")}, [0.25, 0.5], 128)
    return *benchmark.run(tiny, settings, arms, path), path.parent / benchmark.PROMPTS


def table(full, pruned):
    given = {"answer_tokens": 9, "ended": True, "seconds": 1.5}
    return {"k-full": {"100%": given | {"answer": full}}, "k-snapkv": {"25%": given | {"answer": pruned}}}


ANSWERS = {
    "gsm8k_cot@0": table("The answer is 6.", "The answer is 7."),
    "gsm8k_cot@1": table("The answer is 8.", "It is 8"),
}


def test_the_tasks_own_metrics(tiny, settings, run):
    header, records = peers.score_answers(tiny, settings, ANSWERS)
    assert [(arm["method"], arm["budget"]) for arm in header["arms"]] == [("k-full", "100%"), ("k-snapkv", "25%")]
    first, second = (record["arms"] for record in records)
    assert first["k-full"]["100%"]["score"] == 1.0 and first["k-snapkv"]["25%"]["score"] == 0.0
    metrics = second["k-snapkv"]["25%"]["metrics"]  # only the words "The answer is" count for the strict one
    assert metrics == {"exact_match,strict-match": 0.0, "exact_match,flexible-extract": 1.0}
    for record, mine in zip(records, run[1], strict=True):
        assert set(record) == set(mine) and record["length"] == mine["length"]
        result = record["arms"]["k-snapkv"]["25%"]
        assert set(result) == set(mine["arms"]["knorm"]["25%"])
        assert result["kl"] is None and result["top1"] is None and result["nll"] is None
        assert result["kept"] == pytest.approx(int(0.25 * mine["length"]) / mine["length"], abs=1e-6)


def test_one_table(tiny, settings, run):
    header, records = peers.beside(*run[:2], *peers.score_answers(tiny, settings, ANSWERS))
    text = benchmark_tables.of_one_run(header, records)
    heads, values = (
        [c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line[:4] in ("| ta", "| gs")
    )
    assert heads == ["task", "n", "remarks", "full", "knorm", "k-full", "k-snapkv"]
    assert "at 25%" in text and "at 50%" not in text  # the others have no answers under 50%
    assert values[:2] == ["gsm8k_cot", "2"] and values[5:7] == ["100.0 [100.0, 100.0]", "0.0 [0.0, 0.0]"]
    only = peers.score_answers(tiny, settings, {"gsm8k_cot@1": ANSWERS["gsm8k_cot@1"]})
    one = benchmark_tables.of_one_run(*peers.beside(*run[:2], *only))
    assert "| gsm8k_cot | 1 |" in one and "n=1 decides nothing" in one and "∞" not in one


def test_what_does_not_fit_is_refused(tiny, settings, run):
    with pytest.raises(ConfigError, match="gsm8k_cot@9"):
        peers.score_answers(tiny, settings, {"gsm8k_cot@9": table("", "")})
    uneven = ANSWERS | {"gsm8k_cot@1": {"k-full": ANSWERS["gsm8k_cot@1"]["k-full"]}}
    with pytest.raises(ConfigError, match="answers to gsm8k_cot@1 have other methods"):
        peers.score_answers(tiny, settings, uneven)
    header, records = run[:2]
    with pytest.raises(ConfigError, match="different names"):
        peers.beside(header, records, header, records)
    with pytest.raises(ConfigError, match="no example 'other@0'"):
        peers.beside(header, records, header, [records[0] | {"name": "other@0"}])


def write(path, prompts, digests):
    names = [json.loads(line)["name"] for line in prompts.read_bytes().splitlines()]
    lines = [{"settings": {}, "arms": {}}]
    lines += [{"name": n, "prompt": d, "arms": ANSWERS[n]} for n, d in zip(names, digests, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_answers_to_other_prompts_are_refused(run, tmp_path):
    prompts, path = run[2], tmp_path / "answers.jsonl"
    digests = [hashlib.sha256(line).hexdigest()[:16] for line in prompts.read_bytes().splitlines()]
    write(path, prompts, digests)
    assert peers.read_answers(path, prompts) == ANSWERS
    write(path, prompts, [digests[0], "0" * 16])
    with pytest.raises(ConfigError, match=r"1 answers .* \(gsm8k_cot@1"):
        peers.read_answers(path, prompts)
    path.write_text("")
    with pytest.raises(CheckpointError, match="holds no answers"):
        peers.read_answers(path, prompts)


@pytest.mark.slow
@pytest.mark.skipif(
    not TORCH, reason="DCACHE_TORCH_PYTHON does not name a Python interpreter that has torch and kvpress"
)
def test_kvpress_answers_alike(settings, tmp_path):
    """The full cache answers as dcache's; a run that was stopped goes on and ends alike."""
    lm = dcache.load("smollm2")
    arms = make_arms({"knorm": heuristic("knorm")}, [0.25], 128)
    header, records = benchmark.run(lm, settings, arms, tmp_path / "results.jsonl")
    prompts, out = tmp_path / benchmark.PROMPTS, tmp_path / "answers.jsonl"
    command = [
        TORCH, "benchmarks/peers/kvpress_answers.py", f"--model={find_directory('smollm2')}", f"--prompts={prompts}",
        "--presses=knorm,observed_attention", "--budgets=0.25", "--threads=1", f"--out={out}",
    ]  # fmt: skip

    def answers():
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stderr
        return peers.read_answers(out, prompts)

    whole = answers()
    for record in records:
        mine, theirs = record["arms"], whole[record["name"]]
        assert theirs["kvpress-full"]["100%"]["answer"] == mine["full"]["100%"]["answer"]
        assert theirs["kvpress-knorm"]["25%"]["answer"] == mine["knorm"]["25%"]["answer"]
    out.write_bytes(out.read_bytes()[:-50])  # killed while it wrote the last line
    again = answers()
    assert list(again) == list(whole)
    assert [t["kvpress-knorm"]["25%"]["answer"] for t in again.values()] == [
        t["kvpress-knorm"]["25%"]["answer"] for t in whole.values()
    ]
    found = peers.beside(header, records, *peers.score_answers(lm, settings, whole))
    assert "kvpress-observed_attention" in benchmark_tables.of_one_run(*found)
