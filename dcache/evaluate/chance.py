"""What can be scored without having understood the prompt; at or below it, a retention means nothing.

If the full cache itself is at chance on a task, a pruned cache that "keeps 100%" of its score keeps 100% of nothing. So a
retention is given only where the full cache is above chance: its score is at least `MARGIN` above it, and so is the low end of
its 95% interval above chance itself.
"""

import re

from dcache.evaluate.statistics import Estimate

MARGIN = 0.05

FREE = 0.05
"""Tasks with free answers: a tenth right (with the margin), in an interval that stays above a twentieth."""

# The larger class of BoolQ's validation set; for choices, one over the number of options; for ROUGE-L, code similarity and
# class names, what the reference answer of *another* item of the same task scores (means over a sample of LongBench).
_CHANCE = {
    r"boolq\w*": 0.62,
    r"dcache_longbench_(gov_report|qmsum|multi_news)\w*|\w*govreport\w*": 0.15,
    r"dcache_longbench_samsum\w*": 0.10,
    r"dcache_longbench_(lcc|repobench_p)\w*": 0.25,
    r"dcache_longbench_trec\w*": 0.07,
    r"dcache_longbench_passage_count\w*": 0.09,
    r"bbh_\w*(boolean_expressions|causal_judgement|formal_fallacies|hyperbaton|navigate|snarks|sports_understanding|web_of_lies)":
        0.5,
    r"bbh_\w*(disambiguation_qa|three_objects)": 1 / 3,
    r"bbh_\w*(movie_recommendation|ruin_names|temporal_sequences)": 1 / 4,
    r"bbh_\w*(five_objects|penguins_in_a_table)": 1 / 5,
    r"bbh_\w*(date_understanding|salient_translation_error_detection)": 1 / 6,
    r"bbh_\w*seven_objects": 1 / 7,
    r"bbh_\w*geometric_shapes": 1 / 10,
    r"bbh_\w*reasoning_about_colored_objects": 1 / 18,
}  # fmt: skip


def chance(task: str) -> float:
    """The score that guessing reaches on a task; `FREE` for one with free answers."""
    name = task.replace("-", "_").lower()
    return next((value for pattern, value in _CHANCE.items() if re.fullmatch(pattern, name)), FREE)


def at_chance(full: Estimate, guessing: float) -> bool:
    """Whether the full cache's score is not clearly above what guessing reaches (its mean, for an average of tasks)."""
    return full.value < guessing + MARGIN or full.low <= guessing
