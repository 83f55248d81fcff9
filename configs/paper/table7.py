"""Table 7: the heads that RLKV's gates choose keep everything, DistillCache works in the others, at 25%.

    python launch/report.py --config=configs/paper/table7.py
    python launch/report.py --config=configs/paper/table7.py --config.model=smollm2

Expected: the paper has 39.8, and 37.7 for head gating alone. Cost: the evaluation needs Mistral-7B-Instruct-v0.3 and
an accelerator (days, with five seeds); the report itself takes seconds to minutes. The second command shows what was
measured on the default model, beside the paper's numbers and never as a reproduction of them.
"""

from ml_collections import ConfigDict

from configs.paper import base


def get_config() -> ConfigDict:
    methods = {"Head gating alone": "rlkv", "Hybrid": "hybrid"}
    commands = (
        "python launch/compose.py --gates=runs/rlkv_smollm2 --policy=policies/smollm2-distillcache --out=runs/hybrid",
        f"{base.evaluation('dcache_longbench')} --policy=hybrid=runs/hybrid",
    )
    return base.make("table7", methods=methods, tasks={"LongBench": base.TASKS["LongBench"]}, commands=commands)
