import json
import math

import made_up
import numpy as np
import pytest

from dcache.errors import CheckpointError, ConfigError, LoadError
from dcache.evaluate import quantities, runs, statistics


def make(scores, label="a", settings=None, budget="25%"):
    """A run of h2o beside the full cache: task -> (prompt, full cache's score, h2o's score)."""
    arms = [{"method": "full", "budget": "100%", "weights": None}, {"method": "h2o", "budget": budget, "weights": None}]
    records = [
        {"name": f"{task}@{i}", "task": task, "length": 100,
         "arms": {"full": {"100%": {"score": full}}, "h2o": {budget: {"score": ours}}}}
        for task, rows in scores.items()
        for i, full, ours in rows
    ]  # fmt: skip
    return runs.Run(label, {"model": "m", "settings": settings or {"seed": 0}, "arms": arms}, records)


def test_tasks_count_the_same_and_bbh_counts_once():
    run = make({
        "dcache_longbench_qasper": [(0, 1.0, 1.0), (1, 1.0, 0.0), (2, 1.0, 0.0), (3, 1.0, 0.0)],
        "bbh_fewshot_a": [(0, 1.0, 1.0)],
        "bbh_fewshot_b": [(0, 0.0, 0.0), (1, 1.0, 1.0)],
    })  # fmt: skip
    found = quantities.measured([run], "score", "h2o", "25%", ["*"])
    assert found.estimate.value == pytest.approx((0.25 + 2 / 3) / 2) and found.estimate.n == 7
    assert found.tasks == ("bbh_fewshot_a", "bbh_fewshot_b", "dcache_longbench_qasper")
    assert found.seeds == (("a", found.estimate.value),) and found.spread is None
    kept = quantities.measured([run], "retention", "h2o", "25%", ["*"])
    assert kept.estimate.value == pytest.approx((0.25 + 2 / 3) / (1 + 2 / 3))
    assert quantities.measured([run], "score", "h2o", "25%", ["dcache_longbench_*"]).estimate.value == 0.25
    assert quantities.measured([run], "score", "h2o", "25%", ["gsm8k"]) is None
    assert quantities.measured([run], "score", "h2o", "50%", ["*"]) is None


def test_examples_that_bear_one_name_at_two_lengths_all_count():
    """RULER at 4,096 tokens numbers its examples from 0, as RULER at 1,024 does in another results file."""
    short, long = (make({"dcache_ruler_vt": [(0, 1.0, ours), (1, 1.0, ours)]}) for ours in (1.0, 0.0))
    records = [record | {"doc_length": n} for run, n in ((short, 1024), (long, 4096)) for record in run.records]
    together = runs.make("both", short.header, records)
    found = quantities.measured([together], "score", "h2o", "25%", ["*"])
    assert found.estimate.n == 4 and found.estimate.value == 0.5


def test_seeds_are_runs_of_their_own():
    first = make({"t": [(0, 1.0, 1.0), (1, 1.0, 0.0), (2, 1.0, 0.0)]}, "first")
    second = make({"t": [(1, 1.0, 1.0), (0, 1.0, 1.0)]}, "second")  # another order, and it stopped early
    found = quantities.measured([first, second], "score", "h2o", "25%", ["t"])
    assert found.estimate.n == 2 and found.estimate.value == 0.75  # prompt 0: 1, prompt 1: 1/2
    assert dict(found.seeds) == {"first": pytest.approx(1 / 3), "second": 1.0}
    assert found.spread == pytest.approx(np.std([1 / 3, 1.0], ddof=1))
    with pytest.raises(ConfigError, match="first and other share no prompt of t"):
        quantities.measured([first, make({"t": [(9, 1.0, 1.0)]}, "other")], "score", "h2o", "25%", ["t"])


def test_runs_of_different_tasks_make_one_average():
    parts = [make({"t": [(0, 1.0, 1.0), (1, 1.0, 1.0)]}, "a"), make({"u": [(0, 1.0, 0.0), (1, 1.0, 1.0)]}, "b")]
    found = quantities.measured(parts, "score", "h2o", "25%", ["*"])
    assert found.estimate.value == 0.75 and found.seeds == ()  # neither run has all of it


def test_difference_is_paired():
    run = make({"t": [(i, i / 10, i / 10 - 0.1) for i in range(8)]})
    found = quantities.difference([run], "score", ("h2o", "25%"), ("full", "100%"), ["t"])
    assert found.estimate.value == pytest.approx(-0.1) and found.estimate.high == pytest.approx(-0.1)


def test_perplexity_weighs_tokens():
    header, _ = made_up.results(tasks=("dcache_oasst_4k",), budgets=("25%",))
    cells = [(1.0, 2.0, 10), (3.0, 3.5, 30)]  # full cache's loss, ours, tokens
    records = [
        {"name": str(i), "task": "t", "length": 9, "arms": {
            "full": {"100%": {"nll": full, "tokens": n}}, "h2o": {"25%": {"nll": ours, "tokens": n}}}}
        for i, (full, ours, n) in enumerate(cells)
    ]  # fmt: skip
    run = runs.Run("a", header, records)
    loss, full = (2.0 * 10 + 3.5 * 30) / 40, (1.0 * 10 + 3.0 * 30) / 40
    found = quantities.measured([run], "perplexity", "h2o", "25%", ["*"])
    assert found.estimate.value == pytest.approx(math.exp(loss))
    rise = quantities.measured([run], "perplexity rise", "h2o", "25%", ["*"])
    assert rise.estimate.value == pytest.approx(math.exp(loss) - math.exp(full))
    assert quantities.measured([run], "perplexity rise", "full", "100%", ["*"]).estimate.high == 0.0


def test_ratio_of_mean_lengths():
    header, records = made_up.results(tasks=("dcache_longbench_qasper",), prompts=2)
    for record, (full, ours) in zip(records, ((1, 3), (9, 7)), strict=True):
        record["arms"]["full"]["100%"]["answer_tokens"] = full
        record["arms"]["h2o"]["25%"]["answer_tokens"] = ours
    found = quantities.measured([runs.Run("a", header, records)], "length ratio", "h2o", "25%", ["*"])
    assert found.estimate.value == 1.0  # 10 / 10, where the mean of the ratios is 1.9


def test_read_and_find(tmp_path):
    header, records = made_up.results(prompts=2)
    made_up.write(tmp_path / "a" / "one", header, records)
    made_up.write(tmp_path / "a" / "two", header, records)
    assert [path.name for path in runs.find(tmp_path / "a")] == ["one", "two"]
    assert runs.find(tmp_path / "a" / "one") == [tmp_path / "a" / "one"] and not runs.find(tmp_path / "b")
    run = runs.read(tmp_path / "a" / "one")
    assert len(run.records) == 12 and run.arms[0] == ("full", "100%") and ("h2o", "12.5%") in run.arms
    with pytest.raises(LoadError, match="holds no results.jsonl"):
        runs.read(tmp_path / "b")


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda r: r.pop("task"), "line 3: an example needs 'task'"),
        (lambda r: r.update(length="long"), "line 3: an example needs 'task' .* 'length'"),
        (lambda r: r.update(arms=[]), "line 3: an example needs 'arms'"),
        (lambda r: r["arms"].pop("full"), "line 3: the result of full at 100% is missing"),
        (lambda r: r["arms"]["h2o"].pop("25%"), "line 3: the result of h2o at 25% is missing"),
        (lambda r: r["arms"]["h2o"]["25%"].update(score="good"), "line 3: score of h2o at 25% is 'good', not a number"),
    ],
)
def test_malformed_examples_are_named(tmp_path, change, message):
    header, records = made_up.results(prompts=1)
    change(records[1])
    with pytest.raises(CheckpointError, match=message):
        runs.read(made_up.write(tmp_path, header, records))


def test_malformed_lines_are_named(tmp_path):
    header, records = made_up.results(prompts=1)
    made_up.write(tmp_path, header, records)
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    (tmp_path / "results.jsonl").write_text("\n".join([lines[0], lines[1][:50], *lines[2:]]) + "\n")
    with pytest.raises(CheckpointError, match="Line 2 of .* is damaged"):
        runs.read(tmp_path)
    (tmp_path / "results.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="is empty"):
        runs.read(tmp_path)
    (tmp_path / "results.jsonl").write_text(json.dumps({"a": 1}) + "\n")
    with pytest.raises(CheckpointError, match="does not hold evaluation results"):
        runs.read(tmp_path)


def test_what_can_stand_side_by_side():
    first = make({"t": [(0, 1.0, 1.0)]}, "first", {"seed": 0, "batch": 1})
    runs.check([first, make({"t": [(0, 1.0, 1.0)]}, "second", {"seed": 1, "batch": 1})])
    runs.check([first, make({"u": [(0, 1.0, 1.0)]}, "other", {"seed": 0, "batch": 8})])  # another task
    with pytest.raises(ConfigError, match=r"under different settings \(batch\)"):
        runs.check([first, make({"t": [(0, 1.0, 1.0)]}, "second", {"seed": 1, "batch": 8})])
    second = make({"t": []}, "second")
    second.header["model"] = "n"
    with pytest.raises(ConfigError, match="first is of the model 'm', second of 'n'"):
        runs.check([first, second])


def test_folders_of_different_tasks_are_pooled():
    found = [make({"t": [(0, 1.0, 1.0), (1, 0.0, 1.0)]}, "first"), make({"u": [(0, 1.0, 1.0)]}, "second")]
    pooled = runs.measure(found, ["*"], lambda r: [r["arms"]["full"]["100%"]["score"]], pooled=True)
    assert pooled.estimate.n == 3 and pooled.estimate.value == pytest.approx(2 / 3) and pooled.tasks == ("t", "u")
    assert pooled.seeds == () and pooled.estimate.bounded


def test_every_quantity_has_a_number():
    header, records = made_up.results(prompts=4)
    run = runs.Run("a", header, records)
    for name in quantities.QUANTITIES:
        assert isinstance(quantities.measured([run], name, "h2o", "25%", ["*"]).estimate, statistics.Estimate), name
