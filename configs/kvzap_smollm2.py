"""KVzap on SmolLM2-135M-Instruct: KVzip's score predicted from hidden states (arXiv 2601.07891).

    python launch/train.py --config=configs/kvzap_smollm2.py

regresses the logarithm of KVzip's score, head by head, on 300 prompts of 512 tokens (half with hidden facts and a question,
half plain text), each of which the frozen model reads three times: once, and once more as KVzip does. The network per layer
is the paper's (one hidden layer of D / 8 units).

Result (seed 0): 67% of the variance of the log score within a head explained, 86% of KVzip's tokens at 25% found again; on
held-out prompts of 1,024 tokens below KVzip's own KL with the question in sight (docs/table.md).
Cost: 26 CPU-minutes, about 15 minutes on 2 idle
cores.

Variants, after a colon:
  tiny    the real code on a random model of 2 layers, in seconds
  linear  no hidden layer
"""

import dataclasses

from ml_collections import ConfigDict

from configs import smollm2
from dcache.errors import ConfigError
from dcache.learn.kvzap import KVzapConfig
from dcache.policies.kvzap import KVzap

VARIANTS = ("tiny", "linear")


def get_config(variant: str = "") -> ConfigDict:
    if variant and variant not in VARIANTS:
        raise ConfigError(
            f"configs/kvzap_smollm2.py has no variant {variant!r}; use one of {', '.join(VARIANTS)}, or none."
        )
    config = smollm2.get_config("tiny" if variant == "tiny" else "")
    config.name = f"kvzap_smollm2-{variant}" if variant else "kvzap_smollm2"
    config.method = "kvzap"
    config.data.trajectory = "given"
    policy = KVzap(hidden=0) if variant == "linear" else KVzap()
    learn = KVzapConfig(steps=300, learning_rate=3e-3, warmup_steps=20, final_rate=0.1, average=0.95)
    if variant == "tiny":
        policy = KVzap(heads=(2, 2), width=32, hidden=8)
        learn = KVzapConfig(steps=6, learning_rate=3e-3, warmup_steps=1)
    config.policy = ConfigDict(dataclasses.asdict(policy))
    config.learn = ConfigDict(dataclasses.asdict(learn))
    config.eval.policies = ("full", "h2o", "snapkv", "kvzip")
    return config
