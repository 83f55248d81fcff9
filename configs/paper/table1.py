"""Table 1: LongBench and reasoning (GSM8K, BBH) at 50, 25 and 12.5%, six methods, five trainings.

    python launch/report.py --config=configs/paper/table1.py
    python launch/report.py --config=configs/paper/table1.py --config.model=smollm2

Expected: at 25% the paper has DistillCache at 39.1 (LongBench) and 45.0 (reasoning), full cache 41.5 and 52.0. Cost:
the evaluation needs Mistral-7B-Instruct-v0.3 and an accelerator (days, with five seeds); the report itself takes
seconds to minutes. The second command shows what was measured on the default model, beside the paper's numbers and
never as a reproduction of them.
"""

from ml_collections import ConfigDict

from configs.paper import base


def get_config() -> ConfigDict:
    budgets = (0.5, 0.25, 0.125)
    return base.make(
        "table1", budgets=budgets,
        commands=(base.evaluation("dcache_longbench,gsm8k_cot,bbh_fewshot", str(budgets)),),
    )  # fmt: skip
