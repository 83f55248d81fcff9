import importlib
import pathlib

import pytest

from dcache.evaluate import paper, paper_report
from dcache.evaluate.quantities import QUANTITIES

FOLDER = pathlib.Path(__file__).parents[2] / "configs" / "paper"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "base")


def test_a_file_for_each():
    assert set(NAMES) == {*paper.TABLES, "all"}


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_loads(name):
    module = importlib.import_module(f"configs.paper.{name}")
    config = module.get_config()
    for part in (f"python launch/report.py --config=configs/paper/{name}.py", "Cost:"):
        assert part in module.__doc__
    if name == "all":
        assert set(config.parts) == set(paper.TABLES)
        return
    assert "Expected:" in module.__doc__
    plan = paper_report.make_plan(config.to_dict())
    assert plan.name == name and plan.seeds[0] == 0 and all(0 < budget < 1 for budget in plan.budgets)
    table = paper.TABLES[name]
    assert paper.same_model(plan.model.replace("Meta-", ""), table.model)
    assert set(table.rows) <= set(plan.methods) or not table.columns
    for column in table.columns:
        assert column.quantity not in QUANTITIES or plan.tasks[column.tasks]
        assert any(f"{100 * budget:g}%" == column.budget for budget in plan.budgets)
