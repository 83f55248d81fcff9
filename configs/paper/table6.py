"""Table 6: three rewards for training, LongBench at 25%.

    python launch/report.py --config=configs/paper/table6.py
    python launch/report.py --config=configs/paper/table6.py --config.model=smollm2

Expected: the paper has 36.8 (contribution over 8 steps), 37.5 (ranking over all budgets), 39.1 (per-step KL). Cost:
the evaluation needs Mistral-7B-Instruct-v0.3 and an accelerator (days, with five seeds); the report itself takes
seconds to minutes. The second command shows what was measured on the default model, beside the paper's numbers and
never as a reproduction of them.
"""

from ml_collections import ConfigDict

from configs.paper import base


def get_config() -> ConfigDict:
    methods = {
        "Long-term contribution (8-step rollout)": "distillcache-contribution",
        "Ranking across all budgets": "distillcache-ranking", "Per-step KL": "distillcache",
    }  # fmt: skip
    trained = " ".join(f"--policy=distillcache-{v}=runs/smollm2-{v}" for v in ("contribution", "ranking"))
    commands = (
        "python launch/train.py --config=configs/smollm2.py:contribution",
        "python launch/train.py --config=configs/smollm2.py:ranking",
        f"{base.evaluation('dcache_longbench')} {trained}",
    )
    return base.make("table6", methods=methods, tasks={"LongBench": base.TASKS["LongBench"]}, commands=commands)
