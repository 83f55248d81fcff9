"""Measures what training, decoding and eviction cost: `python launch/bench.py`.

    --suite=all       or quick: decoding with 2,000-token caches, prefill and rollout in float32, in three minutes
    --model=smollm2   which model       --policy=distillcache   name or folder of a trained policy
    --out=bench.json  where the numbers go besides the terminal; a table (.md) and a picture (.png) lie beside it
    --latency=h2o,...  with the suite "all": policies ([LABEL=]NAME or FOLDER) whose time per component is measured at 25%;
                      empty for none
    --peers=PYTHON    Python of an environment with transformers and kvpress (benchmarks/peers/README.md), measured too

Nothing else should be running.
"""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import common
from absl import flags

_SUITE = flags.DEFINE_enum("suite", "all", ["quick", "all"], "What is measured.")
_MODEL = flags.DEFINE_string("model", "smollm2", "Name, directory, .gguf file or hub id.")
_POLICY = flags.DEFINE_string("policy", "distillcache", "Name or folder of a trained policy.")
_OUT = flags.DEFINE_string("out", "bench.json", "File for the numbers.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Repeats of each measurement; the median counts.", lower_bound=1)
_LATENCY = flags.DEFINE_list(
    "latency",
    ["h2o", "snapkv", "foresightkv", "rlkv", "distillcache"],
    "[LABEL=]NAME or FOLDER of policies, timed per component.",
)
_LATENCY_PROMPT = flags.DEFINE_integer(
    "latency_prompt", 2000, "Tokens of the prompt of that measurement.", lower_bound=64
)
_PEERS = flags.DEFINE_string("peers", None, "Python of the peers' environment; without it they are not measured.")


def main(argv: list[str]) -> None:
    import dcache
    from dcache import latency
    from dcache.bench import peers, suite
    from dcache.errors import ConfigError
    from dcache.evaluate.harness import labelled
    from dcache.workdir import atomic_write

    if len(argv) > 1:
        raise ConfigError(f"Unknown argument {argv[1]!r}; options begin with --, see --help.")
    common.use_compilation_cache()
    trained = dcache.resolve(_POLICY.value)
    dtypes = ("float32",) if _SUITE.value == "quick" else ("float32", "bfloat16")
    models = {dtype: dcache.load(_MODEL.value, dtype) for dtype in dtypes}
    sizes = suite.QUICK if _SUITE.value == "quick" else suite.ALL
    chosen = labelled(_LATENCY.value) if _SUITE.value == "all" else {}
    methods = {label: dcache.resolve(str(place)) for label, place in chosen.items()}
    latency.check(models["float32"], methods)
    numbers: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        peer = None
        if _PEERS.value is not None:
            peer = stack.enter_context(peers.Peer(peers.command(_PEERS.value, _MODEL.value)))
            peer.seconds(prefill=16)  # so that what is missing there shows now
        for name, part in suite.parts(
            models, trained, _SUITE.value, sizes, _REPEATS.value, _POLICY.value, peer
        ).items():
            print(f"{name} ...", flush=True)
            began = time.perf_counter()
            measured = part()
            for key, value in measured.items():
                print(f"  {key:<44} {value:,.4g}", flush=True)
            print(f"  ({time.perf_counter() - began:.0f} s)", flush=True)
            numbers |= measured
    numbers |= suite.summary(numbers)
    table = suite.table(numbers)
    if methods:
        print("latency per component ...", flush=True)
        found = latency.measure(models["float32"], methods, prompt=_LATENCY_PROMPT.value, repeats=_REPEATS.value)
        print(latency.text(found), flush=True)
        table += "\n" + latency.text(found) + "\n"
        numbers |= {"latency": found, "latency_of": latency.describe(models["float32"], prompt=_LATENCY_PROMPT.value)}
    out = Path(_OUT.value)
    atomic_write(out, json.dumps(numbers, indent=2) + "\n")
    atomic_write(out.with_suffix(".md"), table)
    suite.picture(numbers, out.with_suffix(".png"))
    print(f"Written to {out}, {out.with_suffix('.md').name} and {out.with_suffix('.png').name}.")


if __name__ == "__main__":
    common.run(main)
