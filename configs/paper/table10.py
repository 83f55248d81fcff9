"""Table 10: fewer signals, a supervised ranker, no entropy bonus; LongBench at 25%.

    python launch/report.py --config=configs/paper/table10.py
    python launch/report.py --config=configs/paper/table10.py --config.model=smollm2

On the default model the recipe has no entropy bonus, so the whole method is the variant `bonus` there, and the
shipped policy is the row without. Expected: the paper has 36.5 (alpha), 37.4 (alpha and entropy), 37.8 (ranker), 38.1
(no bonus), 39.1 (all). Cost: the evaluation needs Mistral-7B-Instruct-v0.3 and an accelerator (days, with five
seeds); the report itself takes seconds to minutes. The second command shows what was measured on the default model,
beside the paper's numbers and never as a reproduction of them.
"""

from ml_collections import ConfigDict

from configs.paper import base


def get_config() -> ConfigDict:
    methods = {
        "Attention (alpha) only": "distillcache-alpha_only", "Alpha and entropy": "distillcache-alpha_entropy",
        "Supervised ranker, all signals": "distillcache-ranker", "No entropy bonus": "distillcache",
        "DistillCache": "distillcache-bonus",
    }  # fmt: skip
    variants = ("alpha_only", "alpha_entropy", "ranker", "bonus")
    trained = " ".join(f"--policy=distillcache-{v}=runs/smollm2-{v}" for v in variants)
    commands = (
        *(f"python launch/train.py --config=configs/smollm2.py:{v}" for v in variants),
        f"{base.evaluation('dcache_longbench')} {trained}",
    )
    return base.make("table10", methods=methods, tasks={"LongBench": base.TASKS["LongBench"]}, commands=commands)
