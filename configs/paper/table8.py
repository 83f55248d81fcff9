"""Table 8: repetitive, incorrect and overlength answers, and the length of answers, at 25%.

    python launch/report.py --config=configs/paper/table8.py
    python launch/report.py --config=configs/paper/table8.py --config.model=smollm2

The modes are defined in dcache/evaluate/answers.py. Expected: the paper has DistillCache at 0.8, 3.5 and 1.5%, with
answers 1.03 times as long as the full cache's. Cost: the evaluation needs Mistral-7B-Instruct-v0.3 and an accelerator
(days, with five seeds); the report itself takes seconds to minutes. The second command shows what was measured on the
default model, beside the paper's numbers and never as a reproduction of them.
"""

from ml_collections import ConfigDict

from configs.paper import base


def get_config() -> ConfigDict:
    methods = {label: method for label, method in base.METHODS.items() if method != "full"}
    tasks = {"Answers": (*base.TASKS["LongBench"], *base.REASONING)}
    commands = (base.evaluation("dcache_longbench,gsm8k_cot,bbh_fewshot"),)
    return base.make("table8", methods=methods, tasks=tasks, commands=commands)
