"""Generates text with an evicted cache: `python launch/generate.py --config=configs/smollm2.py --prompt="..." --budget=0.25`.

    --prompt=TEXT        the user's message; or --prompt_file=FILE
    --budget=B           share of the cache that is kept (0.25), or a number of tokens (512)
    --policy=NAME|DIR    a policy's name or description (docs/composing.md) or the folder of a trained one (default: the
                         configuration's own run if it has been trained, else the trained policy that comes with the project)
    --nocompare          do not generate a second time with the full cache to compare speed and memory

Text appears as it is generated; speed and the bytes of the cache follow.
"""

import os
import sys
from pathlib import Path

import common
from absl import flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", "configs/smollm2.py", "Configuration file.", lock_config=True)
_PROMPT = flags.DEFINE_string("prompt", None, "The user's message.")
_PROMPT_FILE = flags.DEFINE_string("prompt_file", None, "A text file with the user's message.")
_POLICY = flags.DEFINE_string("policy", None, "Name or description of a policy, or folder of a trained one.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Run whose trained policy is used (default: runs/<configuration>).")
_BUDGET = flags.DEFINE_string("budget", "0.25", "Share of the cache that is kept, or a number of tokens.")
_NEW = flags.DEFINE_integer("max_new_tokens", 128, "Most tokens to generate.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 for the most likely token.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample from the smallest set of tokens with this mass.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the sampling.")
_EVERY = flags.DEFINE_integer("evict_every", 16, "Tokens between evictions while decoding; 0: only after the prompt.")
_COMPARE = flags.DEFINE_bool("compare", True, "Generate again with the full cache and report both.")


def main(argv: list[str]) -> None:
    import dcache
    from dcache.budget import check
    from dcache.errors import ConfigError
    from dcache.experiment import from_config
    from dcache.generate import stream_to

    if len(argv) > 1:
        raise ConfigError(f"Unknown argument {argv[1]!r}; options begin with --, see --help.")
    common.use_compilation_cache()
    experiment = from_config(_CONFIG.value)
    prompt, budget = common.read_prompt(_PROMPT.value, _PROMPT_FILE.value), check(common.read_budget(_BUDGET.value))
    trained = Path(_WORKDIR.value or common.default_workdir(experiment)) / "policy"
    # A run that was named must have a policy; the default one may not have been trained yet.
    shipped = not (_POLICY.value or _WORKDIR.value or trained.exists())
    name = _POLICY.value or ("distillcache" if shipped else str(trained))
    policy = dcache.resolve(name)
    if shipped and experiment.model != "smollm2":
        print(f"note: no policy was trained for {experiment.model!r} yet; using the one for 'smollm2'", file=sys.stderr)
    lm = dcache.load(experiment.model, experiment.dtype, experiment.sharding)

    def write(text: str) -> None:
        print(text, end="", flush=True)

    def generate(policy, budget, on_tokens=None):
        return dcache.generate(
            lm, [prompt], policy, budget, max_new_tokens=_NEW.value, temperature=_TEMPERATURE.value, top_p=_TOP_P.value,
            seed=_SEED.value, evict_every=_EVERY.value, on_tokens=on_tokens,
        )  # fmt: skip

    def report(label: str, result: dcache.Generation) -> None:
        print(
            f"{label:<24} {result.tokens_per_second:7.1f} tokens/s   cache {result.cache_bytes / 1e6:8.1f} MB "
            f"({100 * result.cache_bytes / result.full_cache_bytes:5.1f}% of full)   prompt {result.prompt_tokens} tokens in "
            f"{result.prefill_seconds:.1f} s",
            file=sys.stderr,
        )

    result = generate(policy, budget, stream_to(write, lm))
    print(flush=True)
    shown = Path(name).parent if Path(name).name == "policy" else Path(name)
    report(f"{shown.name if os.path.exists(name) else name}, budget {_BUDGET.value}", result)
    if _COMPARE.value and policy.policy.name != "full":
        full = generate("full", 1.0)
        report("full cache", full)
        same = "the same text" if full.texts == result.texts else f"another text: {full.texts[0]!r}"
        print(f"The full cache gives {same}.", file=sys.stderr)


if __name__ == "__main__":
    common.run(main)
