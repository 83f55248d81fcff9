"""Table 3: milliseconds for attention, features and policy, and tokens per second, at 25%.

    python launch/report.py --config=configs/paper/table3.py
    python launch/report.py --config=configs/paper/table3.py --config.model=smollm2

Expected: the paper has 18.0 tokens per second with the full cache and 38.0 with DistillCache, on two RTX 4090. Cost:
launch/bench.py takes minutes; times of another machine reproduce nothing. The second command shows what was measured
on the default model, beside the paper's numbers and never as a reproduction of them.
"""

from ml_collections import ConfigDict

from configs.paper import base


def get_config() -> ConfigDict:
    tasks = {"All": ("*",)}
    commands = ("python launch/bench.py --model={model} --out=bench.json", base.evaluation("dcache_longbench"))
    return base.make("table3", tasks=tasks, seeds=(0,), commands=commands)
