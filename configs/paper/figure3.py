"""Figure 3: its contents are not at hand; the report shows this project's curves over the budgets.

    python launch/report.py --config=configs/paper/figure3.py
    python launch/report.py --config=configs/paper/figure3.py --config.model=smollm2

Expected: KL, score and perplexity against the budget. Cost: the evaluation needs Mistral-7B-Instruct-v0.3 and an
accelerator (days, with five seeds); the report itself takes seconds to minutes. The second command shows what was
measured on the default model, beside the paper's numbers and never as a reproduction of them.
"""

from ml_collections import ConfigDict

from configs.paper import base


def get_config() -> ConfigDict:
    commands = (base.evaluation("dcache_longbench", "(0.5,0.25,0.125)"),)
    return base.make("figure3", budgets=(0.5, 0.25, 0.125), commands=commands)
