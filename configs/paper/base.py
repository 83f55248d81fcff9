"""What the configurations of the paper's tables share; not a table itself.

Each file beside this one names what one table or picture of the paper (DistillCache, arXiv 2608.08878v1) needs, and is given
to `launch/report.py`. Results are read from runs/<model>/benchmarks (runs/<model>-seed1/benchmarks ... for more seeds), which
`launch/eval.py` fills; methods are looked for by the labels they have there.
"""

from ml_collections import ConfigDict

MISTRAL = "mistralai/Mistral-7B-Instruct-v0.3"
LLAMA = "meta-llama/Meta-Llama-3-8B-Instruct"

GROUPS = {
    "Single-document": ("narrativeqa", "qasper", "multifieldqa_en"),
    "Multi-document": ("hotpotqa", "musique"),
    "Summarisation": ("gov_report", "qmsum", "multi_news"),
    "Few-shot": ("trec", "triviaqa", "samsum"),
    "Synthetic": ("passage_count", "passage_retrieval_en"),
    "Code": ("lcc", "repobench-p"),
}
"""LongBench's English tasks; 2wikimqa is left out, because the paper trains on it."""

LONGBENCH = {group: tuple(f"dcache_longbench_{task}" for task in tasks) for group, tasks in GROUPS.items()}
REASONING = ("gsm8k_cot", "bbh_*")
TASKS = {"LongBench": sum(LONGBENCH.values(), ()), "Reasoning": REASONING}

METHODS = {
    "Full cache": "full", "H2O": "h2o", "SnapKV": "snapkv", "ForesightKV": "foresightkv", "RLKV": "rlkv",
    "DistillCache": "distillcache",
}  # fmt: skip


def evaluation(tasks: str, budgets: str = "(0.25,)") -> str:
    """The command that runs the benchmarks; the report fills in "{model}", "{short}" and "{config}"."""
    return (
        f"python launch/eval.py --config=configs/{{config}}.py --config.model={{model}} --workdir=runs/{{short}} "
        f"--policy=distillcache=runs/{{config}} --config.eval.tasks={tasks} " + (f"--config.eval.budgets='{budgets}'")
    )


def make(
    name: str, *, model: str = MISTRAL, methods: dict[str, str] = METHODS, tasks: dict[str, tuple[str, ...]] = TASKS,
    budgets: tuple[float, ...] = (0.25,), seeds: tuple[int, ...] = (0, 1, 2, 3, 4), training: dict[str, str] | None = None,
    commands: tuple[str, ...] = (),
) -> ConfigDict:  # fmt: skip
    """A configuration with every field that `dcache.evaluate.paper_report.Plan` has."""
    config = ConfigDict()
    config.name = name
    config.model = model
    config.methods = ConfigDict(methods)
    config.budgets = budgets
    config.tasks = ConfigDict(tasks)
    config.seeds = seeds
    config.runs = ()
    config.training = ConfigDict(training or {})
    config.bench = "bench.json"
    config.viewer = ""
    config.commands = commands
    return config
