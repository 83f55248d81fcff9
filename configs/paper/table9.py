"""Table 9: LongBench's six groups at 25%.

    python launch/report.py --config=configs/paper/table9.py
    python launch/report.py --config=configs/paper/table9.py --config.model=smollm2

Expected: the paper has DistillCache ahead on multi-document, summarisation, few-shot and synthetic tasks. Cost: the
evaluation needs Mistral-7B-Instruct-v0.3 and an accelerator (days, with five seeds); the report itself takes seconds
to minutes. The second command shows what was measured on the default model, beside the paper's numbers and never as a
reproduction of them.
"""

from ml_collections import ConfigDict

from configs.paper import base


def get_config() -> ConfigDict:
    methods = {label: method for label, method in base.METHODS.items() if method != "full"}
    return base.make("table9", methods=methods, tasks=base.LONGBENCH, commands=(base.evaluation("dcache_longbench"),))
