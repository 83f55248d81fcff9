"""Shows what methods evict from a prompt: `python launch/view.py --prompt="..." --policies=snapkv,h2o --out=view.html`.

    --prompt=TEXT        the user's message; or --prompt_file=FILE
    --policies=A,B,...   names or descriptions of policies (docs/composing.md), or folders of trained ones
    --budget=B           share of the cache that is kept (0.25), or a number of tokens (512)
    --model=NAME         what `dcache.load` takes (default: smollm2)
    --out=FILE           one HTML page that needs no server and no network

The full-cache model continues the prompt; each method is fed the same tokens, with its own evictions.
"""

from pathlib import Path

import common
from absl import flags

_PROMPT = flags.DEFINE_string("prompt", None, "The user's message.")
_PROMPT_FILE = flags.DEFINE_string("prompt_file", None, "A text file with the user's message.")
_POLICIES = flags.DEFINE_string("policies", "snapkv,h2o,distillcache", "Policies, separated by commas.")
_BUDGET = flags.DEFINE_string("budget", "0.25", "Share of the cache that is kept, or a number of tokens.")
_MODEL = flags.DEFINE_string("model", "smollm2", "The language model.")
_NEW = flags.DEFINE_integer("new_tokens", 32, "Continuation tokens, a multiple of --evict_every.")
_EVERY = flags.DEFINE_integer("evict_every", 8, "Tokens between evictions while decoding; 0: only after the prompt.")
_OUT = flags.DEFINE_string("out", "view.html", "Where the page goes.")


def _names(text: str) -> list[str]:
    """Splits at commas outside parentheses: "h2o,protected(snapkv, first=4)" has two parts."""
    found: list[str] = []
    for part in text.split(","):
        if found and found[-1].count("(") > found[-1].count(")"):
            found[-1] += "," + part
        else:
            found.append(part)
    return [name.strip() for name in found]


def main(argv: list[str]) -> None:
    import dcache
    from dcache.budget import check
    from dcache.errors import ConfigError
    from dcache.evaluate import tracing, viewer
    from dcache.workdir import atomic_write

    if len(argv) > 1:
        raise ConfigError(f"Unknown argument {argv[1]!r}; options begin with --, see --help.")
    common.use_compilation_cache()
    prompt, budget = common.read_prompt(_PROMPT.value, _PROMPT_FILE.value), check(common.read_budget(_BUDGET.value))
    if not prompt.strip():
        raise ConfigError("The prompt is an empty text; give at least one word.")
    methods = {}
    for name in _names(_POLICIES.value):
        label = Path(name).name if Path(name).exists() else name
        if label in methods:
            raise ConfigError(f"--policies names {label!r} twice; give each policy once.")
        methods[label] = dcache.resolve(name)
    lm = dcache.load(_MODEL.value)
    trace = tracing.trace(
        lm, lm.tokenizer.chat(prompt), methods, budget, new_tokens=_NEW.value, evict_every=_EVERY.value
    )
    page = viewer.page(trace, lm.tokenizer, f"What {len(methods)} methods evict from one prompt")
    atomic_write(_OUT.value, page)
    for label, found in trace.methods.items():
        kept = (found.evicted_at[..., : len(trace.tokens)] != 0).mean()
        print(f"{label:<28} keeps {100 * kept:5.1f}% of the prompt   mean KL {found.kl.mean():.4f} nats")
    print(f"{_OUT.value}: {len(page) / 1e6:.1f} MB; open it in a browser.")


if __name__ == "__main__":
    common.run(main)
