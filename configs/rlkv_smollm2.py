"""RLKV (arXiv 2510.08525) on SmolLM2-135M-Instruct: one gate per key/value head, trained by GRPO on questions.

    python launch/train.py --config=configs/rlkv_smollm2.py

Variants, after a colon (`--config=configs/rlkv_smollm2.py:tiny`):
  tiny   the real code on a random model of 2 layers, in seconds
  paper  the paper's settings
"""

import dataclasses

from ml_collections import ConfigDict

from dcache.errors import ConfigError
from dcache.learn.rlkv import RLKVConfig
from dcache.policies.rlkv import RLKV

VARIANTS = ("tiny", "paper")


def get_config(variant: str = "") -> ConfigDict:
    if variant and variant not in VARIANTS:
        raise ConfigError(
            f"configs/rlkv_smollm2.py has no variant {variant!r}; use one of {', '.join(VARIANTS)}, or none."
        )

    config = ConfigDict()
    config.name = f"rlkv_smollm2-{variant}" if variant else "rlkv_smollm2"
    config.method = "rlkv"
    config.model = "smollm2"
    config.dtype = "float32"
    config.seed = 0
    config.teacher_batch = 8
    config.checkpoint_every = 5
    config.keep_checkpoints = 2
    config.data = ConfigDict(dict(source="installed", length=192, retrieval=1.0, held_out=0.3, trajectory="teacher"))
    config.policy = ConfigDict(dataclasses.asdict(RLKV()))
    learn = RLKVConfig(
        steps=40, learning_rate=0.03, questions=8, horizon=12, arithmetic=0.125, pool=48, sinks=16, recent=32
    )
    config.learn = ConfigDict(dataclasses.asdict(learn))
    config.eval = ConfigDict(
        dict(
            policies=("full", "random", "streaming_llm", "h2o", "snapkv"), budgets=(0.5, 0.25, 0.125), prompts=32,
            horizon=12, evict_every=0, seed=1, accuracy=True,
        )
    )  # fmt: skip

    if variant == "tiny":
        config.model = "tiny"
        config.teacher_batch = 2
        config.checkpoint_every = 2
        config.data.length = 384  # its tokens are characters: shorter prompts have no room for facts and a question
        config.policy.heads = (2, 2)
        config.learn.update(steps=4, questions=4, horizon=4, arithmetic=0.5, pool=0)
    elif variant == "paper":
        config.learn.update(steps=185, learning_rate=0.01, questions=32, pool=3000, sinks=128, recent=256)
        config.data.length = 512
    return config
