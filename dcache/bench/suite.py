"""What `launch/bench.py` measures, the bars that issue and README set, and the table and picture of the results."""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from dcache.bench import peers
from dcache.bench.costs import generation_bytes, prefill_memory, prefill_signals, rollout_cost, training_step
from dcache.bench.decoding import decode
from dcache.bench.first_token import first_token
from dcache.bench.timing import Numbers, machine
from dcache.load import LanguageModel
from dcache.policies.base import Trained

Suite = Literal["quick", "all"]
Parts = dict[str, Callable[[], Numbers]]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the measurements are.

    Attributes:
      slots: cache sizes of the decoding measurements; the first one's also show what a policy adds. batches: of sequences.
      prompt: tokens of a prefill with and without signals. training_prompt: of a training step and a rollout.
      long_prompt: of the prefill whose memory is counted and of the generation. matrix, copied: see `timing.machine`.
    """

    slots: Sequence[int] = (2000, 8000)
    batches: Sequence[int] = (1, 8)
    prompt: int = 2000
    training_prompt: int = 512
    long_prompt: int = 8000
    matrix: int = 2048
    copied: int = 2**30


QUICK = Sizes(slots=(2000,), prompt=512)
ALL = Sizes()


def parts(
    models: Mapping[str, LanguageModel], trained: Trained, suite: Suite, sizes: Sizes, repeats: int, policy: str,
    peer: peers.Peer | None = None,
) -> Parts:  # fmt: skip
    """The measurements of a suite, by name, in order.

    Args:
      models: the same one by its dtype, float32 first. trained: the policy that evicts.
      policy: name or folder of that policy, for processes that load it themselves.
      suite: "quick", or "all": with larger caches, a decode step without statistics, the first token, training, and long
        prompts.
      peer: transformers and kvpress, to be measured beside dcache in float32, or None.
    """
    lm = models["float32"]

    def decoding(dtype: str, batch: int, slots: int) -> Callable[[], Numbers]:
        overheads = (1, 16) if dtype == "float32" and slots == sizes.slots[0] else ()
        return lambda: decode(
            models[dtype], trained, batch=batch, slots=slots, overheads=overheads, repeats=repeats, copied=sizes.copied,
            bare=suite == "all",
        )  # fmt: skip

    found: Parts = {"machine": lambda: machine(repeats, sizes.matrix, sizes.copied)}
    for slots in sizes.slots:
        for dtype in models:
            for batch in sizes.batches:
                found[f"decoding, batch {batch}, {slots} slots, {dtype}"] = decoding(dtype, batch, slots)
    found["prefill signals"] = lambda: prefill_signals(lm, sizes.prompt, repeats)
    found["rollout"] = lambda: rollout_cost(lm, trained, prompt=sizes.training_prompt, repeats=repeats)
    if suite == "all":
        found["first token"] = lambda: first_token(lm.name, policy, prompt=sizes.prompt)
        found["training step"] = lambda: training_step(lm, trained, prompt=sizes.training_prompt, repeats=repeats)
        found["prefill memory"] = lambda: prefill_memory(lm, sizes.long_prompt)
        found["generation"] = lambda: generation_bytes(lm, trained, sizes.long_prompt)
    if peer is not None:
        for slots in sizes.slots:
            for batch in sizes.batches:
                found[f"peers, decoding, batch {batch}, {slots} slots"] = functools.partial(
                    peers.decode, lm, peer, batch=batch, slots=slots, repeats=repeats
                )
        found["peers, prefill"] = lambda: peers.prefill(lm, peer, prompt=sizes.prompt, repeats=repeats)
    return found


def summary(numbers: Numbers) -> Numbers:
    """The worst of numbers that one bar is for: overhead over batches, share of the bandwidth over cache sizes."""
    patterns = {
        r"policy\.b\d+\.s\d+\.(every\d+)\.overhead_fraction": (r"policy.overhead_fraction.\1", max),
        r"decode\.(b\d+)\.s\d+\.bandwidth_fraction": (r"decode.\1.bandwidth_fraction", min),
        r"decode\.(b\d+)\.s\d+\.bf16\.bandwidth_fraction": (r"decode.\1.bf16.bandwidth_fraction", min),
    }
    found: Numbers = {}
    for pattern, (name, worst) in patterns.items():
        for key, value in numbers.items():
            if match := re.fullmatch(pattern, key):
                short = match.expand(name)
                found[short] = worst(found.get(short, value), value)
    return found


BARS: dict[str, tuple[Literal["at least", "at most"], float]] = {
    r"decode\.b8\.s8000\.speedup_share": ("at least", 0.9),
    r"decode\.b\d+\.(bf16\.)?bandwidth_fraction": ("at least", 0.6),
    r"policy\.overhead_fraction\.every16": ("at most", 0.03),
    r"policy\.overhead_fraction\.every1": ("at most", 0.10),
    r"prefill\.signals_ratio": ("at most", 1.25),
    r"rollout\.ratio": ("at most", 1.3),
    r"peers\.decode_ratio\.b1\.s\d+(\.quarter)?": ("at least", 1.0),
    r"peers\.decode_ratio\.b8\.s8000(\.quarter)?": ("at least", 1.5),
    r"peers\.prefill_ratio\.s\d+\.snapkv": ("at least", 1.0),
    r"train\.step_ratio": ("at most", 1.5),
    r"generate\.s\d+\.cache_fraction": ("at most", 0.26),
}
"""Pattern of a key -> bar."""


def table(numbers: Numbers) -> str:
    """A Markdown table of all numbers, with the bar and whether it is met where there is one."""
    lines = ["| what | measured | bar | met |", "|---|---|---|---|"]
    for key, value in numbers.items():
        bar, met = "", ""
        for pattern, (side, limit) in BARS.items():
            if re.fullmatch(pattern, key):
                bar, met = (
                    f"{side} {limit:g}",
                    "yes" if (value >= limit if side == "at least" else value <= limit) else "no",
                )
        lines.append(f"| {key} | {value:,.4g} | {bar} | {met} |")
    return "\n".join(lines) + "\n"


def picture(numbers: Numbers, path: str | os.PathLike[str]) -> None:
    """Speed with a quarter of the cache beside what the bytes allow, and the share of the memory bandwidth that is reached."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = [key.removesuffix(".speedup_25") for key in numbers if key.endswith(".speedup_25")]
    names = [label.removeprefix("decode.").replace(".", " ") for label in labels]
    style: Any = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "savefig.dpi": 144,
    }
    with plt.rc_context(style):
        figure, (speed, bandwidth) = plt.subplots(
            1, 2, figsize=(10, 1.6 + 0.4 * len(labels)), layout="constrained", sharey=True
        )
        rows = range(len(labels))
        speed.barh(
            rows,
            [numbers[f"{label}.speedup_25"] for label in labels],
            color="#0072B2",
            label="measured, with the policy",
        )
        limits = [numbers[f"{label}.speedup_bytes_limit"] for label in labels]
        speed.plot(limits, rows, "D", color="#D55E00", label="what the bytes allow")
        speed.axvline(1.0, color="#999999", linewidth=1)
        speed.set(
            title="Decoding with 25% of the cache", xlabel="speed, full cache = 1", yticks=list(rows), yticklabels=names
        )
        figure.legend(*speed.get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False)
        bandwidth.barh(rows, [numbers[f"{label}.bandwidth_fraction"] for label in labels], color="#009E73")
        bandwidth.axvline(0.6, color="#D55E00", linestyle="--")
        bandwidth.set(title="Decoding with the full cache", xlabel="share of the copy bandwidth (line: bar)")
        bandwidth.invert_yaxis()
        figure.savefig(path)
        plt.close(figure)
