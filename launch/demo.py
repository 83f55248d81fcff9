"""The whole story in one command: `python launch/demo.py` (or `make demo`).

Trains a policy on a real language model, compares it with the heuristics on prompts that it never saw, and writes a
report. Takes about ten minutes on 2 processors; what is done already is not done again.

    --workdir=DIR  where everything goes (default: runs/demo)
    --config=FILE  what is trained (default: configs/smollm2.py:demo)
"""

import pathlib
import subprocess
import sys

import common
from absl import flags

_WORKDIR = flags.DEFINE_string("workdir", "runs/demo", "Where everything goes.")
_CONFIG = flags.DEFINE_string("config", "configs/smollm2.py:demo", "Configuration to train and evaluate.")

_STORY = """\
1. Training: a small network learns which cached tokens of a 512-token prompt may go (75% do), by trial and error: the
   reward is how little the language model's predictions change.                                      about 6 minutes
2. Evaluation on held-out prompts, against the heuristics at the same budget (25% of the tokens kept):  about 3 minutes
3. A table here, and a report with pictures in {report}.
An interrupted demo goes on where it stopped when you run the command again.
"""


def main(argv: list[str]) -> int:
    from dcache.errors import ConfigError

    if len(argv) > 1:
        raise ConfigError(f"Unknown argument {argv[1]!r}; options begin with --, see --help.")
    workdir = pathlib.Path(_WORKDIR.value)
    print(_STORY.format(report=workdir / "eval" / "report.html"), flush=True)
    shared = [f"--config={_CONFIG.value}", f"--workdir={workdir}"]
    # Processes of their own, so that the memory of the training is free again when the evaluation begins.
    for script, options in (("train.py", ["--resume"]), ("eval.py", ["--config.eval.budgets=(0.25,)"])):
        command = [sys.executable, str(common.ROOT / "launch" / script), *shared, *options]
        status = subprocess.run(command, cwd=common.ROOT).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    common.run(main)
