"""Compares policies on held-out prompts: `python launch/eval.py --config=configs/smollm2.py`.

    --workdir=DIR          the run to evaluate (default: that of launch/train.py)
    --policy=[LABEL=]PATH  evaluate this trained policy instead of the workdir's; may be given several times
    --config.FIELD=...     for instance --config.eval.prompts=100 or --config.eval.budgets='(0.25,)'

    --config.eval.tasks=gsm8k_cot,dcache_longbench,dcache_ruler,...
                           run benchmarks instead: tasks of lm-evaluation-harness or of this project (README, "Benchmarks"),
                           --config.eval.prompts items of each, data from --config.eval.data_dir or the hub; results go to
                           <workdir>/benchmarks/
    --answers=FILE         with tasks: a table of these results and other software's answers to the same prompts, as
                           benchmarks/peers/kvpress_answers.py writes them

Compared are the trained policy and the heuristics of config.eval.policies (names, or descriptions as in
docs/composing.md). Prints a table and writes <workdir>/eval/: results.jsonl (one line per prompt; an interrupted evaluation
goes on from it), summary.json, table.md, pictures and report.html.
"""

import pathlib
import shlex
import sys

import common
from absl import flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "The run to evaluate (default: runs/<configuration>[-seed<N>]).")
_POLICY = flags.DEFINE_multi_string("policy", None, "[LABEL=]PATH of a trained policy, instead of the workdir's.")
_ANSWERS = flags.DEFINE_string("answers", None, "Answers of other software to the tasks' prompts, for the same table.")
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> None:
    from dcache import metrics, workdir
    from dcache.checkpoint import load_policy
    from dcache.errors import ConfigError
    from dcache.evaluate import harness
    from dcache.experiment import from_config
    from dcache.load import load

    if len(argv) > 1:
        raise ConfigError(f"Unknown argument {argv[1]!r}; options begin with --, see --help.")
    common.use_compilation_cache()
    experiment = from_config(_CONFIG.value)
    folder = pathlib.Path(_WORKDIR.value or common.default_workdir(experiment))
    places = harness.labelled(_POLICY.value or [f"{experiment.method}={folder}"])
    methods = harness.check(experiment, {label: load_policy(place) for label, place in places.items()})
    if _ANSWERS.value and not experiment.eval.tasks:
        raise ConfigError("--answers is for benchmarks; give --config.eval.tasks, too.")
    if experiment.eval.tasks:
        _run_tasks(experiment, methods, folder / "benchmarks")
        return
    out = folder / "eval"
    with workdir.lock(out):
        header, records = harness.run(
            load(experiment.model, experiment.dtype, experiment.sharding), experiment, methods, out
        )
        drawn = {label: place / metrics.FILE for label, place in places.items() if (place / metrics.FILE).is_file()}
        command = f"python {shlex.join(sys.argv)}"
        title = f"Cache eviction: {experiment.name}"
        print(harness.publish(header, records, experiment, out, title=title, commands=[command], metrics=drawn))
    print(f"Report: {out / 'report.html'}")


def _run_tasks(experiment, methods, out: pathlib.Path) -> None:
    from dcache import workdir
    from dcache.evaluate import benchmark, fidelity, peers
    from dcache.load import load

    lm = load(experiment.model, experiment.dtype, experiment.sharding)
    arms = fidelity.make_arms(methods, experiment.eval.budgets, experiment.data.length)
    with workdir.lock(out):
        settings = benchmark.settings_of(experiment, lm)
        header, records = benchmark.run(lm, settings, arms, out / "results.jsonl")
        text = benchmark.markdown(header, records)
        workdir.atomic_write(out / "table.md", text)
        if _ANSWERS.value:
            given = peers.read_answers(_ANSWERS.value, out / benchmark.PROMPTS)
            text = benchmark.markdown(*peers.beside(header, records, *peers.score_answers(lm, settings, given)))
        print(text)
    print(f"Results: {out / 'results.jsonl'}")


if __name__ == "__main__":
    common.run(main)
