"""Figure 1: how much the perplexity rises at 25%.

    python launch/report.py --config=configs/paper/figure1.py
    python launch/report.py --config=configs/paper/figure1.py --config.model=smollm2

Expected: the paper has 0.62 (H2O), 0.55 (SnapKV), 0.44 (ForesightKV), 0.47 (RLKV), 0.35 (DistillCache). Cost: the
evaluation needs Mistral-7B-Instruct-v0.3 and an accelerator (days, with five seeds); the report itself takes seconds
to minutes. The second command shows what was measured on the default model, beside the paper's numbers and never as a
reproduction of them.
"""

from ml_collections import ConfigDict

from configs.paper import base


def get_config() -> ConfigDict:
    methods = {label: method for label, method in base.METHODS.items() if method != "full"}
    tasks = {"Perplexity": ("*",)}
    return base.make("figure1", methods=methods, tasks=tasks, commands=(base.evaluation("dcache_oasst_4k"),))
