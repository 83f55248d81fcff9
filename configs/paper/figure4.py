"""Figure 4: reward and policy entropy over training.

    python launch/report.py --config=configs/paper/figure4.py
    python launch/report.py --config=configs/paper/figure4.py --config.model=smollm2

Expected: curves of the training runs that lie in runs/; each seed is one line. Cost: reads metrics.jsonl of runs that
are there; a training takes about 15 minutes on 2 cores with configs/smollm2.py. The second command shows what was
measured on the default model, beside the paper's numbers and never as a reproduction of them.
"""

from ml_collections import ConfigDict

from configs.paper import base


def get_config() -> ConfigDict:
    runs = {f"seed {s}": "runs/smollm2" + (f"-seed{s}" if s else "") for s in range(5)}
    runs |= {f"seed {s} (Mistral)": "runs/mistral7b" + (f"-seed{s}" if s else "") for s in range(5)}
    commands = ("for s in 0 1 2 3 4; do python launch/train.py --config=configs/smollm2.py --config.seed=$s; done",)
    return base.make("figure4", training=runs, commands=commands)
