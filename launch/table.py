"""All methods in one table: `python launch/table.py` (README, "All methods").

Evaluates every method at 50, 25 and 12.5% of the cache on held-out prompts of 1,024 tokens, with the question in sight and
with the question hidden while the cache is compressed, and prints one table with 95% intervals, the oracle on top. Settings
of the heuristics are first chosen on validation prompts, which are made from training documents. What is done already is not
done again: the groups of methods below have results of their own, and so has each set of trained policies.

    --workdir=DIR          where everything goes (default: runs/table)
    --prompts=N            held-out prompts of each kind (default: 48)
    --validation=N         validation prompts of each kind for the heuristics' settings (default: 12; 0 for the defaults)
    --policy=LABEL=PATH    a trained policy; may be given several times (default: all that lie in policies/); beside an rlkv
                           stands its control, LABEL-random, with its gates given to random heads
    --champion=LABEL       the method that is held against all others (default: distillcache-both)
    --hidden=false         leave out the evaluation with the question hidden
    --tiny                 the tiny random model and short prompts, to see it work
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import common
from absl import flags

if TYPE_CHECKING:
    from dcache.policies.base import Trained

_WORKDIR = flags.DEFINE_string("workdir", "runs/table", "Where everything goes.")
_PROMPTS = flags.DEFINE_integer("prompts", 48, "Held-out prompts of each kind.", lower_bound=1)
_VALIDATION = flags.DEFINE_integer("validation", 12, "Validation prompts of each kind.", lower_bound=0)
_POLICY = flags.DEFINE_multi_string("policy", None, "LABEL=PATH of a trained policy.")
_CHAMPION = flags.DEFINE_string("champion", "distillcache-both", "The method that is held against all others.")
_HIDDEN = flags.DEFINE_bool("hidden", True, "Evaluate with the question hidden, too.")
_TINY = flags.DEFINE_bool("tiny", False, "Use the tiny random model.")

_BUDGETS = (0.5, 0.25, 0.125)
_TUNED_AT = 0.25
# Family -> settings of which the best on validation prompts is taken; the first is the default.
_SETTINGS = {
    "streaming_llm": ("streaming_llm", "streaming_llm(sinks=16)"),
    "h2o": ("h2o", "h2o(recent_share=0.1)", "h2o(recent_share=0.25)"),
    "snapkv": ("snapkv", "snapkv(window=8)", "snapkv(window=16)", "snapkv(window=64)"),
    "pyramidkv": ("pyramidkv", "pyramidkv(window=8)", "pyramidkv(window=16)"),
}
# Evaluated together. "{snapkv}" is the chosen setting of that family.
_GROUPS = {
    "attention": (
        "random",
        "{streaming_llm}",
        "{h2o}",
        "observed_attention",
        "{snapkv}",
        "{pyramidkv}",
        "tova",
        "cake",
    ),
    "keys": (
        "keydiff",
        "knorm",
        "lagkv",
        "expected_attention",
        "adakv({snapkv})",
        "criticalkv({snapkv})",
        "rkv",
        "kvzip",
    ),
    "oracles": ("oracle", "oracle@layer", "oracle@sequence"),
}


def main(argv: list[str]) -> None:
    import jax

    from configs import smollm2
    from dcache import checkpoint, workdir
    from dcache.errors import ConfigError
    from dcache.evaluate import comparison, fidelity, harness
    from dcache.experiment import from_config
    from dcache.load import load
    from dcache.policies import rlkv

    if len(argv) > 1:
        raise ConfigError(f"Unknown argument {argv[1]!r}; options begin with --, see --help.")
    common.use_compilation_cache()
    config = smollm2.get_config("tiny" if _TINY.value else "")
    if not _TINY.value:
        config.data.length = 1024
    config.eval.update(budgets=_BUDGETS, prompts=_PROMPTS.value, seed=11)
    experiment = from_config(config)
    found = sorted((common.ROOT / "policies").glob("smollm2-*"))
    default = [] if _TINY.value else [f"{path.name.removeprefix('smollm2-')}={path}" for path in found]
    places = harness.labelled(_POLICY.value or default)
    trained = {label: checkpoint.load_policy(place) for label, place in places.items()}
    for label in [label for label, found in trained.items() if found.policy.name == "rlkv"]:
        trained[f"{label}-random"] = rlkv.shuffled(trained[label], jax.random.key(0))
    folder = pathlib.Path(_WORKDIR.value)
    lm = load(experiment.model, experiment.dtype, experiment.sharding)

    with workdir.lock(folder):
        chosen = {family: settings[0] for family, settings in _SETTINGS.items()}
        if _VALIDATION.value:
            quick = dataclasses.replace(
                experiment.eval, budgets=(_TUNED_AT,), prompts=_VALIDATION.value, seed=5, accuracy=False
            )
            every = [name for settings in _SETTINGS.values() for name in settings]
            header, records = harness.run(
                lm, dataclasses.replace(experiment, eval=quick), {name: fidelity.heuristic(name) for name in every},
                folder / "validation", validation=True,
            )  # fmt: skip
            at = fidelity.budget_name(_TUNED_AT)
            chosen = {f: comparison.best_setting(header, records, names, at) for f, names in _SETTINGS.items()}
        groups = {
            group: {_label(name): fidelity.heuristic(name.format(**chosen)) for name in names}
            for group, names in _GROUPS.items()
        }
        for together in _compatible(trained):
            groups["-".join(["trained", *together])] = together
        results = {}
        for source in ("aware", "agnostic") if _HIDDEN.value else ("aware",):
            settings = dataclasses.replace(experiment.eval, hide_question=source == "agnostic")
            part = dataclasses.replace(experiment, eval=settings)
            runs = [harness.run(lm, part, methods, folder / source / group) for group, methods in groups.items()]
            results[source] = comparison.merge(runs)
        names = [fidelity.budget_name(budget) for budget in _BUDGETS]
        champion = _CHAMPION.value if _CHAMPION.value in trained else ""
        text = comparison.markdown(results, names, champion, chosen if _VALIDATION.value else {})
        workdir.atomic_write(folder / "table.md", text)
        summary = {source: {"evaluation": header} for source, (header, _) in results.items()}
        workdir.atomic_write(folder / "summary.json", json.dumps(summary | {"settings": chosen}, indent=2) + "\n")
    print(text)
    print(f"Table: {folder / 'table.md'}")


def _compatible(trained: Mapping[str, "Trained"]) -> list[dict[str, "Trained"]]:
    """Groups that can be evaluated together: of each kind that looks at the prompt with its weights one in each."""
    groups: list[dict[str, Trained]] = []
    for label, found in trained.items():
        kinds = [{other.policy.name for other in group.values() if other.policy.looks} for group in groups]
        free = [i for i, names in enumerate(kinds) if not found.policy.looks or found.policy.name not in names]
        if not free:
            groups.append({})
        groups[free[0] if free else -1][label] = found
    return groups


def _label(name: str) -> str:
    """The family stands for the setting that was chosen: {snapkv} -> snapkv, adakv({snapkv}) -> adakv."""
    return name.removeprefix("{").partition("(")[0].removesuffix("}")


if __name__ == "__main__":
    common.run(main)
