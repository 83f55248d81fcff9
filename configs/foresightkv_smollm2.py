"""ForesightKV (arXiv 2602.03203) on SmolLM2-135M-Instruct: a scorer in every head, block by block.

    python launch/train.py --config=configs/foresightkv_smollm2.py
    python launch/train.py --config=configs/foresightkv_smollm2.py:grpo

The first command trains the ranking of the golden evictions, the second goes on from it with GRPO (the default workdir of
the first is where it looks; otherwise `--config.learn.start=FOLDER`). The data are those of configs/smollm2.py, so results
compare. The paper compresses traces of thousands of tokens to 1,024 every 256; here prompts have 512 tokens and a budget of
128 (25%), and blocks have 64. One prompt makes an update (the paper: 4, then 32).

Not trained to the end here (docs/experiments.md, 17): after 450 steps of the ranking 74% of the golden evictions agree (60% in
the first 25 steps); 40 steps of grpo. On 2 idle cores expect about 3 seconds a step, 6 with grpo.

Variants, after a colon:
  tiny        the real code on a random model of 2 layers, in seconds
  grpo        the second stage: rewards from the 80% most confident tokens of the continuation, 250 steps
"""

import dataclasses

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from dcache.errors import ConfigError
from dcache.learn.foresight import ForesightConfig
from dcache.policies.foresightkv import ForesightKV

VARIANTS = ("tiny", "grpo")


def get_config(variant: str = "") -> ConfigDict:
    if variant and variant not in VARIANTS:
        raise ConfigError(
            f"configs/foresightkv_smollm2.py has no variant {variant!r}; use one of {', '.join(VARIANTS)}, or none."
        )

    config = ConfigDict()
    config.name = f"foresightkv_smollm2-{variant}" if variant else "foresightkv_smollm2"
    config.method = "foresightkv"
    config.model = "smollm2"
    config.dtype = "float32"
    config.seed = 0
    config.teacher_batch = 4
    config.checkpoint_every = 20
    config.keep_checkpoints = 2
    config.sharding = "none"
    config.data = ConfigDict(dict(source="installed", length=512, retrieval=0.5, held_out=0.3, trajectory="mixed"))
    config.policy = ConfigDict(dataclasses.asdict(ForesightKV(block=64, shape=(30, 3, 3, 64))))
    config.learn = ConfigDict(dataclasses.asdict(ForesightConfig(horizon=32)))
    config.eval = ConfigDict(
        dict(
            policies=("full", "random", "streaming_llm", "h2o", "snapkv", "tova", "keydiff"),
            budgets=(0.5, 0.25, 0.125), prompts=32, horizon=12, evict_every=0, seed=1, accuracy=True, hide_question=False,
            tasks="", data_dir=placeholder(str), length=placeholder(int), ruler_lengths=(4096,), chat=False,
            most_new=placeholder(int), long_count=placeholder(int),
        )
    )  # fmt: skip

    if variant == "tiny":
        config.model = "tiny"
        config.checkpoint_every = 2
        config.data.length = 384  # its tokens are characters: shorter prompts have no room for facts and a question
        config.policy.shape = (2, 2, 2, 8)
        config.learn.update(steps=6, horizon=8, warmup_steps=1)
        config.eval.update(prompts=2, horizon=8)
    elif variant == "grpo":
        config.learn.update(
            stage="grpo", start="runs/foresightkv_smollm2/policy", steps=250, learning_rate=3e-4, final_rate=1.0
        )
    return config
