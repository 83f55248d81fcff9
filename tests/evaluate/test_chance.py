import pytest

from dcache.evaluate.chance import at_chance, chance
from dcache.evaluate.statistics import Estimate


@pytest.mark.parametrize(
    "task,expected",
    [
        ("boolq", 0.62),
        ("bbh_fewshot_snarks", 1 / 2),
        ("bbh_fewshot_tracking_shuffled_objects_three_objects", 1 / 3),
        ("bbh_fewshot_logical_deduction_seven_objects", 1 / 7),
        ("bbh_cot_fewshot_ruin_names", 1 / 4),
        ("bbh_fewshot_word_sorting", 0.05),
        ("dcache_longbench_repobench-p", 0.25),
        ("dcache_longbench_gov_report", 0.15),
        ("gsm8k_cot", 0.05),
        ("dcache_ruler_niah_single_1", 0.05),
    ],
)
def test_chance(task, expected):
    assert chance(task) == expected


def test_at_chance():
    assert at_chance(Estimate(0.60, 0.50, 0.70, 100), 0.62)
    assert at_chance(Estimate(0.66, 0.63, 0.70, 100), 0.62)  # within the margin
    assert at_chance(Estimate(0.80, 0.55, 0.95, 8), 0.62)  # its interval reaches chance
    assert not at_chance(Estimate(0.80, 0.70, 0.90, 80), 0.62)
    assert at_chance(Estimate(0.09, 0.06, 0.12, 500), 0.05) and not at_chance(Estimate(0.11, 0.06, 0.2, 500), 0.05)
    assert at_chance(Estimate(1.0, -float("inf"), float("inf"), 1), 0.05)  # one prompt says nothing
