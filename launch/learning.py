"""The learning experiment: does a trained policy beat the heuristics? `python launch/learning.py` (or `make learning`).

Trains three seeds of configs/smollm2.py and one of configs/smollm2.py:sequential, then evaluates all of them and the
heuristics at 25%, evicted once, on 200 held-out retrieval prompts and 200 windows of plain text. Writes the verdict on
each bar and all numbers to <workdir>/table.md. Takes about 90 minutes on 2 cores; what is done already is not done again.

    --workdir=DIR  where everything goes (default: runs/learning)
    --prompts=N    held-out prompts of each kind (default: 200)
    --tiny         the same commands on the tiny random model, in a minute or two, to see them work
"""

import dataclasses
import importlib
import pathlib
import subprocess
import sys

import common
from absl import flags

_WORKDIR = flags.DEFINE_string("workdir", "runs/learning", "Where everything goes.")
_PROMPTS = flags.DEFINE_integer("prompts", 200, "Held-out prompts of each kind.")
_TINY = flags.DEFINE_bool("tiny", False, "Use the tiny random model.")

_BUDGET = 0.25
_HEURISTICS = (
    "random", "streaming_llm", "h2o", "snapkv", "tova", "keydiff", "h2o@sequence", "snapkv@sequence",
)  # fmt: skip


def main(argv: list[str]) -> int:
    from dcache import metrics, workdir
    from dcache.checkpoint import load_policy
    from dcache.errors import ConfigError
    from dcache.evaluate import fidelity, harness, learning
    from dcache.experiment import from_config
    from dcache.load import load

    if len(argv) > 1:
        raise ConfigError(f"Unknown argument {argv[1]!r}; options begin with --, see --help.")
    common.use_compilation_cache()
    folder = pathlib.Path(_WORKDIR.value)
    variant = ":tiny" if _TINY.value else ""
    runs = {f"seed{seed}": (f"configs/smollm2.py{variant}", seed) for seed in range(3)}
    runs["sequential"] = (f"configs/smollm2.py{variant or ':sequential'}", 0)
    commands = []
    for name, (config, seed) in runs.items():
        options = [f"--config={config}", f"--config.seed={seed}", f"--workdir={folder / name}", "--resume"]
        commands.append(["launch/train.py", *options])
        status = subprocess.run([sys.executable, *commands[-1]], cwd=common.ROOT).returncode
        if status:
            return status

    trained = {name: load_policy(folder / name) for name in runs}
    experiment = from_config(importlib.import_module("configs.smollm2").get_config(variant.removeprefix(":")))
    chosen = dataclasses.replace(
        experiment.eval, policies=_HEURISTICS, budgets=(_BUDGET,), prompts=_PROMPTS.value, evict_every=0, accuracy=True
    )
    experiment = dataclasses.replace(experiment, eval=chosen)
    methods = harness.check(experiment, trained)
    with workdir.lock(folder):
        header, records = harness.run(
            load(experiment.model, experiment.dtype, experiment.sharding), experiment, methods, folder
        )
        harness.publish(
            header, records, experiment, folder, title="The learning experiment",
            commands=["python launch/learning.py", *(f"python {' '.join(c)}" for c in commands)],
            metrics={name: folder / name / metrics.FILE for name in runs},
        )  # fmt: skip
        text = learning.markdown(header, records, fidelity.budget_name(_BUDGET))
        workdir.atomic_write(folder / "table.md", text)
    print(text)
    print(f"Table: {folder / 'table.md'}, report: {folder / 'report.html'}")
    return 0


if __name__ == "__main__":
    common.run(main)
