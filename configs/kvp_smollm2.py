"""KVP (arXiv 2602.10238) on SmolLM2-135M-Instruct.

    python launch/train.py --config=configs/kvp_smollm2.py

makes 300 traces of 1,024 tokens (half questions about facts hidden in real text, half plain text), then trains 90 agents,
one for each key/value head: 64 hidden units instead of the paper's 256, a higher learning rate and fewer steps, and the
moving average of the weights as the trained policy. Cost on 2 cores: about 8 CPU seconds per trace (40 CPU minutes in all,
once: another seed may use them with --config.learn.folder=<traces of that run>; 8 GB of disk), then 0.45 CPU seconds per
step for prefixes of up to 512 tokens and 0.9 for longer ones, so 17 CPU minutes of training
(docs/experiments.md, 17: 21 minutes on one shared core).

Variants, after a colon (`--config=configs/kvp_smollm2.py:tiny`):
  tiny        the real code on a random model of 2 layers, in seconds
  paper       the paper's 256 hidden units, learning rate and 4,000 steps
"""

import dataclasses

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from dcache.errors import ConfigError
from dcache.learn.kvp import KvpConfig
from dcache.policies.kvp import KVP

VARIANTS = ("tiny", "paper")


def get_config(variant: str = "") -> ConfigDict:
    if variant and variant not in VARIANTS:
        raise ConfigError(
            f"configs/kvp_smollm2.py has no variant {variant!r}; use one of {', '.join(VARIANTS)}, or none."
        )

    config = ConfigDict()
    config.name = f"kvp_smollm2-{variant}" if variant else "kvp_smollm2"
    config.method = "kvp"
    config.model = "smollm2"
    config.dtype = "float32"
    config.seed = 0
    config.teacher_batch = 1
    config.checkpoint_every = 100
    config.keep_checkpoints = 2
    config.sharding = "none"
    config.data = ConfigDict(dict(source="installed", length=1024, retrieval=0.5, held_out=0.3, trajectory="given"))
    config.policy = ConfigDict(dataclasses.asdict(KVP(heads=(30, 3), width=64, hidden=64)))
    config.learn = ConfigDict(
        dataclasses.asdict(KvpConfig(steps=1500, learning_rate=1e-3, final_rate=0.02, samples=8, average=0.99))
    )
    config.eval = ConfigDict(
        dict(
            policies=("full", "random", "streaming_llm", "h2o", "snapkv", "keydiff"),
            budgets=(0.5, 0.25, 0.125), prompts=32, horizon=12, evict_every=0, seed=1, accuracy=True, hide_question=False,
            tasks="", data_dir=placeholder(str), length=placeholder(int), ruler_lengths=(4096,), chat=False,
            most_new=placeholder(int), long_count=placeholder(int),
        )
    )  # fmt: skip

    if variant == "tiny":
        config.model = "tiny"
        config.checkpoint_every = 2
        config.data.length = 448  # its tokens are characters: shorter prompts have no room for facts and a question
        config.policy.update(heads=(2, 2), width=8, hidden=8)
        config.learn.update(steps=6, traces=3, warmup_steps=1, samples=4)
        config.eval.update(prompts=2, horizon=8)
    elif variant == "paper":
        config.policy.hidden = 256
        config.learn = ConfigDict(dataclasses.asdict(KvpConfig()))
    return config
