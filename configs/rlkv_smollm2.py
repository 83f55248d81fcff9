"""RLKV (arXiv 2510.08525) on SmolLM2-135M-Instruct: one gate per key/value head, trained by GRPO on questions.

    python launch/train.py --config=configs/rlkv_smollm2.py
    python launch/eval.py --config=configs/rlkv_smollm2.py

trains the 90 gates on questions about facts hidden in real text (192 tokens) and some small arithmetic, all of them
solvable: 48 that the model answers right at least 3 times of 4. `launch/compose.py` makes the hybrid with DistillCache of
the result.

As in the paper: gates that mix full and local attention, 4 samples per question at temperature 1, GRPO without a KL term, a
penalty only above a mean reward of 0.5, AdamW at a constant rate. Smaller than in the paper, for 2 cores: 75 steps of 8
short questions with answers of at most 12 tokens (185 of 32, long reasoning), and local attention of 16 + 32 tokens (128 +
256), since the prompts are short. The rate is 0.02 (0.01) because there are fewer steps. The penalty is 2.5e-3 (1e-3; the
authors give 2.5e-3 for one of their models): the policy gradient is about 8e-3 per gate, and a weaker one is lost in its
noise. These three numbers were not tuned.

Cost, measured on one core of a busy machine: 10 s to answer 8 questions, 2.7 s for the gradient of each that teaches
something (about half of them), so 20 s a step. The search for questions answers about 190, 4 minutes. Run: 59 of
75 steps in 52 minutes beside other work (docs/experiments.md, 17).

Variants, after a colon (`--config=configs/rlkv_smollm2.py:tiny`):
  tiny   the real code on a random model of 2 layers, in seconds
  paper  the paper's steps, questions, rate, penalty and local attention, on prompts of 512 tokens and the same short answers
"""

import dataclasses

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

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
    config.sharding = "none"
    config.data = ConfigDict(dict(source="installed", length=192, retrieval=1.0, held_out=0.3, trajectory="teacher"))
    config.policy = ConfigDict(dataclasses.asdict(RLKV()))
    learn = RLKVConfig(
        steps=75, learning_rate=0.02, questions=8, horizon=12, arithmetic=0.125, pool=48, sinks=16, recent=32,
        penalty=2.5e-3,
    )  # fmt: skip
    config.learn = ConfigDict(dataclasses.asdict(learn))
    config.eval = ConfigDict(
        dict(
            policies=("full", "random", "streaming_llm", "h2o", "snapkv"), budgets=(0.5, 0.25, 0.125), prompts=32,
            horizon=12, evict_every=0, seed=1, accuracy=True, hide_question=False,
            tasks="", data_dir=placeholder(str), length=placeholder(int), ruler_lengths=(4096,), chat=False,
            most_new=placeholder(int), long_count=placeholder(int),
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
        config.learn.update(
            steps=185, learning_rate=0.01, questions=32, pool=3000, sinks=128, recent=256, penalty=1e-3
        )  # fmt: skip
        config.data.length = 512
    return config
