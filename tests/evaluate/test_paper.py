import pytest

from dcache.evaluate import paper
from dcache.evaluate.quantities import QUANTITIES
from dcache.evaluate.runs import Measured
from dcache.evaluate.statistics import Estimate

SCALES = {name: q.scale for name, q in QUANTITIES.items()}


def measured(value, low, high, n=200):
    return Measured(Estimate(value, low, high, n), (("a", value),), ("t",), 0.05)


def test_numbers_have_places():
    assert list(paper.TABLES) == [*(f"table{i}" for i in range(1, 11)), *(f"figure{i}" for i in range(1, 6))]
    for name, table in paper.TABLES.items():
        headings = [column.heading for column in table.columns]
        assert len(set(headings)) == len(headings), name
        for row, values in (*table.rows.items(), *table.deviations.items()):
            assert len(values) == len(headings), (name, row)
        assert set(table.deviations) <= set(table.rows)


def test_numbers_as_printed():
    def number(table, row, heading):
        found = paper.TABLES[table]
        return found.rows[row][[column.heading for column in found.columns].index(heading)]

    assert number("table1", "DistillCache", "LongBench 25%") == 39.1
    assert number("table1", "RLKV", "Reasoning 12.5%") == 38.9
    assert paper.TABLES["table1"].deviations["H2O"] == (1.2, 1.5, 2.1, 1.4, 1.7, 2.0)
    assert number("table2", "SnapKV", "8K") == 35.0
    assert (
        number("table3", "H2O", "features ms") is None and number("table3", "Full cache", "tokens per second") == 18.0
    )
    assert number("table4", "DistillCache (zero-shot)", "Reasoning") == 46.2
    assert number("table8", "RLKV", "overlength %") == 4.5 and number("table8", "ForesightKV", "length ratio") is None
    assert number("table9", "RLKV", "Code") == 36.8 and number("table9", "H2O", "Synthetic") == 37.0
    assert number("figure1", "ForesightKV", "perplexity rise") == 0.44


def compared(model, found, table="table2"):
    cells = paper.compare(paper.TABLES[table], model, found, SCALES)
    return {(cell.row, cell.column): cell for cell in cells}


def test_on_the_papers_model():
    number = measured(0.37, 0.34, 0.41)
    cells = compared("mistralai/Mistral-7B-Instruct-v0.3", {("H2O", "8K"): number, ("SnapKV", "8K"): "not run: why"})
    cell = cells["H2O", "8K"]
    assert (cell.paper, cell.ours, cell.other, cell.missing) == (34.1, number, None, "")
    assert cell.difference.value == pytest.approx(2.9) and cell.difference.low == pytest.approx(-0.1)
    assert cell.remarks == ("undecided (n=200)",)
    missing = cells["SnapKV", "8K"]
    assert (missing.ours, missing.other, missing.difference, missing.missing) == (None, None, None, "not run: why")
    assert cells["RLKV", "2K"].missing == "not run"


def test_on_another_model_nothing_is_reproduced():
    number = measured(0.37, 0.2, 0.5)
    cells = compared("smollm2", {("H2O", "8K"): number, ("SnapKV", "8K"): "not run: why"})
    cell = cells["H2O", "8K"]
    assert (cell.ours, cell.difference, cell.other) == (None, None, number)
    assert cell.missing == "not run: needs Mistral-7B-Instruct-v0.3" and cell.remarks == ("too wide to decide (n=200)",)
    assert cells["SnapKV", "8K"].other is None and cells["SnapKV", "8K"].remarks == ("smollm2: not run: why",)


def test_times_of_another_machine_reproduce_nothing():
    cells = compared("Mistral-7B-Instruct-v0.3", {("H2O", "tokens per second"): measured(30.0, 29.0, 31.0)}, "table3")
    cell = cells["H2O", "tokens per second"]
    assert cell.ours is None and cell.missing == "not run: needs Mistral-7B-Instruct-v0.3 on two RTX 4090"


def test_model_names():
    assert paper.same_model("mistralai/mistral-7b-instruct-v0.3", paper.MISTRAL)
    assert paper.same_model("models/Mistral-7B-Instruct-v0.3/", paper.MISTRAL)
    assert not paper.same_model("Mistral-7B-Instruct-v0.2", paper.MISTRAL)
