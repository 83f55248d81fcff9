"""Benchmark results that nothing produced, in the format of a benchmark run's folder."""

import html.parser
import json

import numpy as np

TASKS = (
    "dcache_longbench_triviaqa", "dcache_longbench_qasper", "dcache_ruler_niah_single_1", "gsm8k_cot", "bbh_fewshot_snarks",
    "dcache_oasst_4k",
)  # fmt: skip
METHODS = {"h2o": None, "snapkv": None, "distillcache": "abc"}
_LOSS = {"full": 0.0, "h2o": 0.5, "snapkv": 0.35, "distillcache": 0.15}
_SHARE = {"100%": 1.0, "50%": 0.5, "25%": 0.25, "12.5%": 0.125}


def results(*, model="smollm2", seed=0, tasks=TASKS, prompts=12, methods=METHODS, budgets=("50%", "25%", "12.5%")):
    """Header and records; the full cache is right on most items, but always wrong in GSM8K."""
    chosen = {"full": None, **methods}
    arms = [
        {"method": m, "budget": b, "policy": f"{m}()", "granularity": "head", "weights": w}
        for m, w in chosen.items()
        for b in (("100%",) if m == "full" else budgets)
    ]
    header = {
        "model": model,
        "architecture": {},
        "settings": {"seed": seed, "batch": 1},
        "tasks": list(tasks),
        "arms": arms,
    }
    records = []
    for task in tasks:
        rng = np.random.default_rng([seed, TASKS.index(task)])
        for i in range(prompts):
            luck, cells = np.random.default_rng([i, TASKS.index(task)]).random(), {}
            for arm in arms:
                method, budget = arm["method"], arm["budget"]
                lost = _LOSS[method] * (1 - _SHARE[budget])
                right = luck > 0.2 + lost + 0.1 * rng.random() if task != "gsm8k_cot" else False
                perplexity = task == "dcache_oasst_4k"
                looped = method == "h2o" and not right and i % 2
                cells.setdefault(method, {})[budget] = {
                    "score": None if perplexity else float(right),
                    "metrics": {},
                    "answer": "" if perplexity else ("so it goes " * 12 if looped else f"answer {i}"),
                    "answer_tokens": 0 if perplexity else (36 if looped else 4),
                    "ended": not looped,
                    "kl": lost * (0.5 + luck),
                    "top1": 1 - lost / 3,
                    "nll": 2.0 + lost * luck if perplexity else None,
                    "tokens": 100 if perplexity else 0,
                    "kept": _SHARE[budget],
                    "retained": np.linspace(1.0, _SHARE[budget], 20).tolist(),
                    "seconds": 0.5 + 0.5 * _SHARE[budget],
                }
            ruler = task.startswith("dcache_ruler")
            records.append(
                {
                    "name": f"{task}@{i}", "task": task, "length": (900, 1900, 3600)[i % 3],
                    "doc_length": (1024, 2048, 4096)[i % 3] if ruler else None, "evicted": "after the prefill", "arms": cells,
                }
            )  # fmt: skip
    return header, records


def write(folder, header, records):
    """Writes results as a benchmark run does; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(line) for line in (header, *records)]
    (folder / "results.jsonl").write_text("\n".join(lines) + "\n")
    return folder


class Tags(html.parser.HTMLParser):
    """All tags with their attributes; checks that every tag that is opened is closed in order."""

    void = {"meta", "img", "br"}

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
