"""Measures what training and eviction cost: `python launch/bench.py`.

    --model=smollm2   which model       --policy=distillcache   name or folder of a trained policy
    --out=bench.json  where the numbers go besides the terminal
    --latency=h2o,...  policies ([LABEL=]NAME or FOLDER) whose time per component is measured at 25%; empty for none

Runs for about ten minutes on 2 cores. Nothing else should be running.
"""

import json
from typing import Any

import common
from absl import flags

_MODEL = flags.DEFINE_string("model", "smollm2", "Name, directory, .gguf file or hub id.")
_POLICY = flags.DEFINE_string("policy", "distillcache", "Name or folder of a trained policy.")
_OUT = flags.DEFINE_string("out", "bench.json", "File for the numbers.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Repeats of each measurement; the median counts.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", 2000, "Cache slots of the decoding measurement.", lower_bound=64)
_LATENCY = flags.DEFINE_list(
    "latency",
    ["h2o", "snapkv", "foresightkv", "rlkv", "distillcache"],
    "[LABEL=]NAME or FOLDER of policies, timed per component.",
)
_LATENCY_PROMPT = flags.DEFINE_integer(
    "latency_prompt", 2000, "Tokens of the prompt of that measurement.", lower_bound=64
)
_PROMPT = flags.DEFINE_integer("prompt", 7900, "Tokens of the long prompt.", lower_bound=64)


def main(argv: list[str]) -> None:
    import dcache
    from dcache import bench, latency
    from dcache.errors import ConfigError
    from dcache.evaluate.harness import labelled
    from dcache.workdir import atomic_write

    if len(argv) > 1:
        raise ConfigError(f"Unknown argument {argv[1]!r}; options begin with --, see --help.")
    common.use_compilation_cache()
    trained = dcache.resolve(_POLICY.value)
    lm = dcache.load(_MODEL.value)
    methods = {label: dcache.resolve(str(place)) for label, place in labelled(_LATENCY.value).items()}
    latency.check(lm, methods)
    numbers: dict[str, Any] = {}
    parts = {
        "training step": lambda: bench.training_step(lm, trained, repeats=_REPEATS.value),
        "eviction overhead, batch 1": lambda: bench.eviction_overhead(
            lm, trained, batch=1, slots=_SLOTS.value, repeats=_REPEATS.value
        ),
        "eviction overhead, batch 8": lambda: bench.eviction_overhead(
            lm, trained, batch=8, slots=_SLOTS.value, repeats=_REPEATS.value
        ),
        "prefill memory": lambda: bench.prefill_memory(lm),
        "generation": lambda: bench.generation_bytes(lm, trained, _PROMPT.value),
    }
    for name, part in parts.items():
        print(f"{name} ...", flush=True)
        measured = part()
        for key, value in measured.items():
            print(f"  {key:<44} {value:,.4g}", flush=True)
        numbers |= measured
    if methods:
        print("latency per component ...", flush=True)
        found = latency.measure(lm, methods, prompt=_LATENCY_PROMPT.value, repeats=_REPEATS.value)
        print(latency.text(found), flush=True)
        numbers |= {"latency": found, "latency_of": latency.describe(lm, prompt=_LATENCY_PROMPT.value)}
    atomic_write(_OUT.value, json.dumps(numbers, indent=2) + "\n")
    print(f"Written to {_OUT.value}.")


if __name__ == "__main__":
    common.run(main)
