"""Trains a policy: `python launch/train.py --config=configs/smollm2.py`.

    --workdir=DIR        where the run lives (default: runs/<configuration>[-seed<N>])
    --resume             go on from the workdir's newest checkpoint
    --config.FIELD=...   change a field, for instance --config.seed=1 or --config.learn.steps=500

The workdir gets checkpoints/, policy/ (the trained policy), metrics.jsonl, tensorboard/ and config.json. Ctrl-C or
SIGTERM finishes the current step and saves; the exit status is then 75, which tells job files to start the command again.
"""

import os
import shlex
import sys

import common
from absl import flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run lives (default: runs/<configuration>[-seed<N>]).")
_RESUME = flags.DEFINE_bool("resume", False, "Go on from the newest checkpoint of the workdir.")
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> int:
    import jax

    from dcache.errors import ConfigError
    from dcache.experiment import from_config
    from dcache.learn.loop import train
    from dcache.sharding import is_first_process, join_processes

    if len(argv) > 1:
        raise ConfigError(f"Unknown argument {argv[1]!r}; options begin with --, see --help.")
    common.use_compilation_cache()
    experiment = from_config(_CONFIG.value)
    if experiment.distributed:
        join_processes()
    workdir = _WORKDIR.value or common.default_workdir(experiment)
    steps = experiment.learn.steps
    shapes = jax.tree.leaves(jax.eval_shape(experiment.policy.init, jax.random.key(0)))
    weights = f"{sum(leaf.size for leaf in shapes):,} weights"
    if is_first_process():
        print(
            f"Training {experiment.name} ({weights}), seed {experiment.seed}, for {steps} steps in {workdir}",
            flush=True,
        )
    outcome = train(experiment, workdir, resume=_RESUME.value)
    # Any other status than 0 tells a scheduler that the job is not done.
    status = os.EX_OK if outcome.step == outcome.steps else os.EX_TEMPFAIL
    if not is_first_process():
        return status
    if status:
        again = [word for word in sys.argv if word not in ("--resume", "--noresume")]
        print(f"Stopped and saved after step {outcome.step} of {outcome.steps}. Go on with:")
        print(f"  python {shlex.join([*again, '--resume'])}")
    elif not outcome.trained:
        print(f"This run is finished: {outcome.step} steps. The trained policy is in {workdir}/policy.")
    else:
        print(f"Done: {outcome.step} steps. The trained policy is in {workdir}/policy.")
    return status


if __name__ == "__main__":
    common.run(main)
