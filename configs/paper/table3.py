"""Table 3: milliseconds for attention, features and policy, and tokens per second, at 25%.

    python launch/report.py --config=configs/paper/table3.py
    python launch/report.py --config=configs/paper/table3.py --config.model=smollm2

Expected: the paper has 18.0 tokens per second with the full cache and 38.0 with DistillCache, on two RTX 4090. Cost:
launch/bench.py takes about ten minutes on 2 cores; times of another machine reproduce nothing. The second command
shows what was measured with the default model, beside the paper's numbers and never as a reproduction of them.
"""

from ml_collections import ConfigDict

from configs.paper import base


def get_config() -> ConfigDict:
    return base.make(
        "table3", tasks={}, seeds=(0,), commands=("python launch/bench.py --model={model} --out=bench.json",)
    )
