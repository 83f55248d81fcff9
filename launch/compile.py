"""Compiles a configuration's steps for TPUs that are not here: `python launch/compile.py --config=configs/mistral7b.py`.

    --topology=v5e:2x4   the slice: v5e, v5p or v6e, a colon, and its shape
    --out=FILE           also write the numbers as JSON
    --config.sharding=.. how the model lies on the slice (default: the preset of its size, see dcache/axes.py)
    --config.model=..    another model; those with a preset need not be here (meta-llama/Meta-Llama-3-8B-Instruct)

Needs libtpu (`python -m pip install -e '.[tpu]'`, best in an environment of its own) and neither a TPU nor memory for the
model. Prints for each step, per chip: memory, operations and bytes with loops counted, collectives, and the least time that the
chip's limits allow. The four steps of a 7B model take about four minutes of CPU time.
"""

import dataclasses
import json
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported: beside libtpu it would look for a TPU

import common  # noqa: E402
from absl import flags  # noqa: E402
from ml_collections import config_flags  # noqa: E402

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
_TOPOLOGY = flags.DEFINE_string("topology", "v5e:2x4", "Slice of TPU chips.")
_OUT = flags.DEFINE_string("out", None, "File for the numbers.")
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> None:
    from dcache import compilation, roofline
    from dcache.errors import ConfigError
    from dcache.experiment import from_config
    from dcache.workdir import atomic_write

    if len(argv) > 1:
        raise ConfigError(f"Unknown argument {argv[1]!r}; options begin with --, see --help.")
    experiment, topology = from_config(_CONFIG.value), _TOPOLOGY.value
    chip = roofline.chip_of(topology)
    target = compilation.describe(topology, experiment.sharding)
    print(
        f"{experiment.model} on {topology}, chips: {target.mesh.size} as {target.rules.text()}. Each at best: "
        f"{chip.flops / 1e12:.0f} TFLOP/s, {chip.bandwidth / 1e9:.0f} GB/s, {chip.ring / 1e9:.0f} GB/s to its neighbours.",
        flush=True,
    )
    found = []
    for step in compilation.compile_steps(experiment, target):
        print("\n".join(compilation.lines_of(step, chip)), flush=True)
        found.append(step)
    seconds, steps = compilation.training_seconds(found, chip), experiment.learn.steps
    hours = roofline.chip_hours(seconds, steps, target.mesh.size)
    print(f"training: {steps:,} steps of {seconds * 1e3:.0f} ms at the roofline: {hours:.2f} chip-hours.")
    if _OUT.value:
        numbers = {step.name: dataclasses.asdict(step) | {"work": dataclasses.asdict(step.work)} for step in found} | {
            "chip_hours": hours
        }
        atomic_write(_OUT.value, json.dumps(numbers, indent=2) + "\n")
        print(f"Written to {_OUT.value}.")


if __name__ == "__main__":
    common.run(main)
