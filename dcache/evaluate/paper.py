"""The numbers of the DistillCache paper (Althoubi, arXiv 2608.08878v1), and a comparison that invents none.

Means over five trainings; Table 1 alone has standard deviations. Table 5 and Figures 2 to 5 have no number here: the pictures
print none, and what this project knows of the paper has nothing of Table 5.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from dcache.evaluate.runs import Measured
from dcache.evaluate.statistics import Estimate, too_wide, undecided

MISTRAL = "Mistral-7B-Instruct-v0.3"
LLAMA = "Llama-3-8B-Instruct"


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of the paper's table and what measures it here.

    Attributes:
      quantity: a key of `quantities.QUANTITIES`, or a field of `bench.json`'s "latency". tasks: name of a group of tasks in the
        configuration. bin: only prompts of that length.
    """

    heading: str
    quantity: str
    tasks: str
    budget: str = "25%"
    bin: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table or picture of the paper.

    Attributes:
      model: the one that the numbers are of. rows: method -> one number per column, None where the paper has none.
      deviations: standard deviations over trainings, in the same places. machine: what the numbers need besides the model;
        then nothing measured elsewhere is a reproduction. note: how to read it.
    """

    title: str
    model: str
    columns: tuple[Column, ...] = ()
    rows: Mapping[str, tuple[float | None, ...]] = dataclasses.field(default_factory=dict)
    deviations: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    machine: str = ""
    note: str = ""


METHODS = ("H2O", "SnapKV", "ForesightKV", "RLKV", "DistillCache")
FULL = "Full cache"
_BUDGETS = ("50%", "25%", "12.5%")


def _by_method(*columns: Sequence[float]) -> dict[str, tuple[float | None, ...]]:
    """Columns in the order of `METHODS` as rows."""
    return {method: tuple(column[i] for column in columns) for i, method in enumerate(METHODS)}


_ROUGE = "The paper scores all LongBench tasks by ROUGE-L; this project by the official metrics."

TABLES = {
    "table1": Table(
        "Table 1. LongBench and reasoning under three budgets",
        MISTRAL,
        tuple(Column(f"{name} {b}", "score", name, b) for name in ("LongBench", "Reasoning") for b in _BUDGETS),
        {
            FULL: (41.5, 41.5, 41.5, 52.0, 52.0, 52.0),
            "H2O": (39.2, 36.4, 29.8, 46.6, 41.4, 32.4),
            "SnapKV": (39.6, 37.0, 31.0, 47.3, 42.7, 34.3),
            "ForesightKV": (40.3, 38.2, 34.4, 48.4, 44.7, 38.1),
            "RLKV": (40.0, 37.7, 33.5, 48.9, 45.7, 38.9),
            "DistillCache": (40.5, 39.1, 36.6, 48.6, 45.0, 39.9),
        },
        {
            "H2O": (1.2, 1.5, 2.1, 1.4, 1.7, 2.0),
            "SnapKV": (1.1, 1.3, 1.8, 1.2, 1.5, 1.9),
            "ForesightKV": (1.0, 1.2, 1.6, 1.2, 1.3, 1.7),
            "RLKV": (1.3, 1.4, 1.9, 1.1, 1.3, 1.8),
            "DistillCache": (0.9, 1.1, 1.5, 1.0, 1.2, 1.6),
        },
        note=f"{_ROUGE} Reasoning is the mean of GSM8K and BBH. The full cache has one number, whatever the budget.",
    ),
    "table2": Table(
        "Table 2. LongBench by context length at 25%",
        MISTRAL,
        tuple(Column(bin, "score", "LongBench", bin=bin) for bin in ("2K", "4K", "8K")),
        _by_method((40.2, 40.4, 40.8, 40.7, 40.5), (38.5, 39.0, 39.8, 39.5, 40.2), (34.1, 35.0, 37.0, 36.4, 38.1)),
        note=f"{_ROUGE} Here a length is the power of two nearest to the prompt's.",
    ),
    "table3": Table(
        "Table 3. Latency per component and throughput at 25%",
        MISTRAL,
        (
            Column("attention ms", "attention_ms", ""),
            Column("features ms", "features_ms", ""),
            Column("policy ms", "policy_ms", ""),
            Column("tokens per second", "tokens_per_second", ""),
        ),
        {
            FULL: (42.1, None, None, 18.0),
            "H2O": (18.5, None, None, 42.8),
            "SnapKV": (18.7, 0.2, None, 41.5),
            "ForesightKV": (18.6, 0.5, 0.7, 38.2),
            "RLKV": (18.5, 0.3, 0.6, 39.5),
            "DistillCache": (18.5, 0.9, 0.5, 38.0),
        },
        machine="two RTX 4090",
        note="The paper does not say how often its policy decides. Here attention is that of one new token, features and "
        "policy are the time of one decision (dcache/latency.py); a time below zero is smaller than the noise.",
    ),
    "table4": Table(
        "Table 4. Transfer to another model at 25%",
        LLAMA,
        (Column("LongBench", "score", "LongBench"), Column("Reasoning", "score", "Reasoning")),
        {
            FULL: (42.8, 56.4),
            "H2O": (37.2, 44.0),
            "SnapKV": (37.9, 45.6),
            "ForesightKV (retrained)": (39.5, 48.2),
            "RLKV (retrained)": (39.1, 49.5),
            "DistillCache (zero-shot)": (38.4, 46.2),
        },
        note=f"{_ROUGE} Zero-shot: the policy was trained on {MISTRAL}.",
    ),
    "table5": Table("Table 5", MISTRAL, note="The numbers of the paper's Table 5 are not at hand, so none is shown."),
    "table6": Table(
        "Table 6. Rewards, LongBench at 25%",
        MISTRAL,
        (Column("LongBench", "score", "LongBench"),),
        {
            "Long-term contribution (8-step rollout)": (36.8,),
            "Ranking across all budgets": (37.5,),
            "Per-step KL": (39.1,),
        },
        note=_ROUGE,
    ),
    "table7": Table(
        "Table 7. Hybrid of head gates and DistillCache, LongBench at 25%",
        MISTRAL,
        (Column("LongBench", "score", "LongBench"),),
        {"Head gating alone": (37.7,), "Hybrid": (39.8,)},
        note=_ROUGE,
    ),
    "table8": Table(
        "Table 8. Errors among the items that the full cache gets right, and length of the answers, at 25%",
        MISTRAL,
        (
            *(Column(f"{mode} %", mode, "Answers") for mode in ("repetitive", "incorrect", "overlength")),
            Column("length ratio", "length ratio", "Answers"),
        ),
        {
            "H2O": (4.8, 6.8, 1.0, 0.87),
            "SnapKV": (3.8, 5.5, 1.8, 0.91),
            "ForesightKV": (2.1, 3.7, 2.5, None),
            "RLKV": (1.6, 3.4, 4.5, 1.08),
            "DistillCache": (0.8, 3.5, 1.5, 1.03),
        },
        note="The length ratios are the paper's too, from outside its Table 8. Here: the mean length over the full cache's.",
    ),
    "table9": Table(
        "Table 9. LongBench by group at 25%",
        MISTRAL,
        tuple(
            Column(name, "score", name)
            for name in ("Single-document", "Multi-document", "Summarisation", "Few-shot", "Synthetic", "Code")
        ),
        _by_method(
            (38.1, 39.2, 41.0, 39.8, 40.5),
            (33.5, 34.8, 36.2, 35.4, 37.6),
            (40.2, 41.0, 42.1, 41.5, 43.0),
            (35.8, 36.5, 37.4, 37.0, 38.2),
            (37.0, 37.8, 38.5, 38.1, 39.4),
            (34.2, 34.9, 36.0, 36.8, 36.1),
        ),
        note=_ROUGE,
    ),
    "table10": Table(
        "Table 10. Ablation, LongBench at 25%",
        MISTRAL,
        (Column("LongBench", "score", "LongBench"),),
        {
            "Attention (alpha) only": (36.5,),
            "Alpha and entropy": (37.4,),
            "Supervised ranker, all signals": (37.8,),
            "No entropy bonus": (38.1,),
            "DistillCache": (39.1,),
        },
        note=_ROUGE,
    ),
    "figure1": Table(
        "Figure 1. Rise of the perplexity at 25%",
        MISTRAL,
        (Column("perplexity rise", "perplexity rise", "Perplexity"),),
        _by_method((0.62, 0.55, 0.44, 0.47, 0.35)),
        note="The paper does not say how its perplexity is counted; here: over all tokens, the rise in perplexity itself.",
    ),
    "figure2": Table("Figure 2. Which tokens of a sentence each method keeps", MISTRAL),
    "figure3": Table("Figure 3", MISTRAL, note="What the paper's Figure 3 shows is not at hand; here: curves over budgets."),
    "figure4": Table("Figure 4. Reward and policy entropy over training", MISTRAL),
    "figure5": Table("Figure 5. Share of the tokens kept by position", MISTRAL),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cell:
    """One number of the paper beside this project's.

    Attributes:
      paper, deviation: the paper's. ours: measured on the paper's model. difference: ours minus the paper's; its interval is
        that of this project's prompts alone. other: measured on another model, which reproduces nothing.
      missing: why there is no reproduction, or "". remarks: warnings about the numbers.
    """

    column: str
    row: str
    paper: float | None
    deviation: float | None
    ours: Measured | None
    difference: Estimate | None
    other: Measured | None
    missing: str
    remarks: tuple[str, ...]


def same_model(name: str, wanted: str) -> bool:
    """Whether a name, hub id or folder is that model: the last part counts, whatever its case."""
    return name.rstrip("/").rpartition("/")[2].lower() == wanted.lower()


def compare(
    table: Table, model: str, found: Mapping[tuple[str, str], Measured | str], scales: Mapping[str, float]
) -> list[Cell]:
    """Every cell of a table, column by column.

    Args:
      model: that was run. found: (row, column's heading) -> the number measured on it, or why there is none.
      scales: quantity -> factor to the paper's unit.
    """
    cells = []
    reproduces = same_model(model, table.model) and not table.machine
    needs = f"not run: needs {table.model}" + (f" on {table.machine}" if table.machine else "")
    for i, column in enumerate(table.columns):
        for row, values in table.rows.items():
            here = found.get((row, column.heading), "not run")
            number = here if isinstance(here, Measured) else None
            printed = values[i]
            difference = None
            if reproduces and number and printed is not None:
                difference = _minus(number.estimate, printed, scales.get(column.quantity, 1.0))
            missing = needs if not reproduces else (here if isinstance(here, str) else "")
            remarks = [] if number or reproduces else [f"{model}: {here}"]
            if number and column.quantity == "score":
                remarks.append(too_wide(number.estimate))
            if difference is not None:
                remarks.append(undecided(difference))
            cells.append(
                Cell(
                    column.heading, row, printed, table.deviations[row][i] if row in table.deviations else None,
                    number if reproduces else None, difference, None if reproduces else number, missing,
                    tuple(remark for remark in remarks if remark),
                )
            )  # fmt: skip
    return cells


def _minus(estimate: Estimate, printed: float, scale: float) -> Estimate:
    return estimate.map(lambda x: x * scale - printed)
