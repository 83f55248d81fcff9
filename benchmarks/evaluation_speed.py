"""Time per benchmark example with an evicted cache over that with the full one, on the same prompts.

    python benchmarks/evaluation_speed.py --data_dir=DIR

One method at a time, as a model of the harness (`dcache.evaluate.lm.DCacheLM`), batch 1, 25% of the cache: short answers
(HotpotQA, 16 tokens) and long ones (GovReport, 192 tokens). Every prompt is answered once unmeasured, so that nothing
compiles while the clock runs. Prints seconds per example and the ratio.
"""

import time

from absl import app, flags

_DATA = flags.DEFINE_string("data_dir", None, "Folder with LongBench's files, see the README.", required=True)
_MODEL = flags.DEFINE_string("model", "smollm2", "The language model.")
_POLICIES = flags.DEFINE_list("policies", "snapkv,policies/smollm2-distillcache-head-equal", "Names or folders.")
_LENGTH = flags.DEFINE_integer("length", 1900, "Longest prompt in tokens.", lower_bound=64)
_COUNT = flags.DEFINE_integer("count", 2, "Prompts of each kind.", lower_bound=1)


def main(_: list[str]) -> None:
    from dcache.evaluate import benchmark
    from dcache.evaluate.lm import DCacheLM
    from dcache.load import load

    lm = load(_MODEL.value, "float32")
    models = {"full": DCacheLM(lm)} | {p: DCacheLM(lm, p, 0.25) for p in _POLICIES.value}
    for task, new in (("dcache_longbench_hotpotqa", 16), ("dcache_longbench_gov_report", 192)):
        settings = benchmark.Settings(
            (task,), count=_COUNT.value, data_dir=_DATA.value, length=_LENGTH.value, most_new=new
        )
        (loaded,) = benchmark.load_tasks(settings, lm).values()
        seconds = dict.fromkeys(models, 0.0)
        for example in benchmark.examples_of(lm, task, loaded, settings):
            request = example.requests[0]
            request.arguments = (request.args[0], request.args[1] | {"max_gen_toks": new})
            for name, model in models.items():
                model.generate_until([request], disable_tqdm=True)
                began = time.perf_counter()
                model.generate_until([request], disable_tqdm=True)
                seconds[name] += time.perf_counter() - began
        for name, total in seconds.items():
            print(f"{task}, {new} tokens: {name} {total / _COUNT.value:.2f} s, {total / seconds['full']:.2f} of full")


if __name__ == "__main__":
    app.run(main)
