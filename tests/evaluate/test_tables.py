import json
import math

import numpy as np
import pytest

from dcache.evaluate import tables
from dcache.evaluate.statistics import Estimate


def find(cells, kind, method, budget):
    (cell,) = [c for c in cells if (c.kind, c.method, c.budget) == (kind, method, budget)]
    return cell


def test_cells(sample):
    header, records = sample
    cells = tables.cells(header, records)
    assert len(cells) == 2 * 9
    cell = find(cells, "retrieval", "h2o", "25%")
    kls = [r["arms"]["h2o"]["25%"]["kl"] for r in records if r["kind"] == "retrieval"]
    assert cell.kl.value == pytest.approx(np.mean(kls)) and cell.kl.n == 15 and cell.kept == pytest.approx(0.25)
    assert cell.kl.low < cell.kl.value < cell.kl.high
    assert cell.perplexity_rise.value == pytest.approx(math.exp(np.mean(kls)) - 1)  # the sample's nll rises by the KL
    assert cell.accuracy.value == pytest.approx(5 / 15)
    assert find(cells, "text", "h2o", "25%").accuracy is None
    full = find(cells, "text", "full", "100%")
    assert full.kl == Estimate(0.0, 0.0, 0.0, 15) and full.perplexity_rise == Estimate(0.0, 0.0, 0.0, 15)


def test_prompts_without_a_number_are_left_out(sample):
    header, records = sample
    for cell in (c for budgets in records[0]["arms"].values() for c in budgets.values()):
        cell["kl"] = cell["nll"] = None
    cells = tables.cells(header, records)
    assert find(cells, "retrieval", "h2o", "25%").kl.n == 14
    assert find(cells, "retrieval", "h2o", "25%").perplexity_rise.n == 14
    assert find(cells, "retrieval", "h2o", "25%").accuracy.n == 15


def test_comparisons_with_the_best_heuristic(sample):
    header, records = sample
    found = tables.comparisons(header, records)
    assert [(c.kind, c.method, c.budget, c.heuristic) for c in found] == [
        (kind, "ours", budget, "h2o") for kind in ("retrieval", "text") for budget in ("50%", "25%")
    ]
    for c in found:
        assert c.kl_ratio.value == pytest.approx(0.5) and c.kl_ratio.low == pytest.approx(0.5)
        assert c.decided and c.kl_difference.high < 0
        assert (c.accuracy_difference is None) == (c.kind == "text")
    assert found[0].accuracy_difference.value == pytest.approx(10 / 15)


def test_best_heuristic_follows_the_numbers(sample):
    header, records = sample
    for record in records:
        record["arms"]["random"]["25%"]["kl"] = 0.0
    assert tables.comparisons(header, records)[1].heuristic == "random"
    assert tables.best_heuristic(records, "text", "50%", ["random", "h2o"]) == "h2o"
    assert tables.best_heuristic(records, "text", "50%", []) is None


def test_the_oracle_is_no_heuristic(sample):
    _, records = sample
    for record in records:
        for name in ("oracle", "oracle@sequence", "protected(oracle, first=4)"):
            record["arms"][name] = {"50%": {**record["arms"]["h2o"]["50%"], "kl": 0.0}}
    assert tables.best_heuristic(records, "text", "50%", ["oracle", "h2o", "oracle@sequence", "random"]) == "h2o"
    assert tables.best_heuristic(records, "text", "50%", ["oracle", "protected(oracle, first=4)"]) is None


def test_too_few_prompts_are_flagged(sample):
    header, records = sample
    for i, record in enumerate(records):
        record["arms"]["ours"]["25%"]["kl"] = record["arms"]["h2o"]["25%"]["kl"] + (-1) ** (i // 2) * 0.1
    texts = [tables.sentence(c) for c in tables.comparisons(header, records)]
    assert ["too few prompts" in text for text in texts] == [False, True, False, True]


def test_markdown(sample):
    header, records = sample
    text = tables.markdown(header, records)
    assert text.index("### Retrieval prompts") < text.index("### Plain text")
    retrieval, plain = text.split("### Plain text")
    assert "accuracy %" in retrieval and "accuracy %" not in plain
    lines = [line for line in retrieval.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 9 and len({len(line) for line in lines}) == 1  # a grid that lines up
    row = next(line for line in lines if "ours" in line and "25%" in line)
    assert "100.0 [100.0, 100.0]" in row and row.endswith("| 15 |")
    assert "* ours at 25%: 0.50 [0.50, 0.50] times the KL of the best heuristic (h2o)" in retrieval


def test_number():
    assert tables.number(Estimate(0.12345, 0.1, 0.2, 3)) == "0.123 [0.100, 0.200]"
    assert tables.percent(Estimate(0.5, 0.25, 1.0, 3)) == "50.0 [25.0, 100.0]"
    assert tables.number(Estimate(-0.00001, -math.inf, math.inf, 1)) == "0.000"
    assert tables.number(Estimate(1.0, 0.5, math.inf, 2)) == "1.000 [0.500, ∞]"
    assert tables.number(None) == "n/a"


def test_grid_escapes():
    assert tables.grid(["a"], [["x|y"]]) == "| a    |\n|------|\n| x\\|y |"


def test_summary_is_json(sample):
    header, records = sample
    summary = tables.summary(header, records[:2])  # one prompt of each kind: infinite intervals
    parsed = json.loads(json.dumps(summary, allow_nan=False))
    assert parsed["cells"][0]["kl"] == {"value": 0.0, "low": None, "high": None, "n": 1}
    assert parsed["evaluation"] == header and len(parsed["comparisons"]) == 4
