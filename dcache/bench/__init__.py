"""Costs and speed measured in one run, beside what the machine allows; `python launch/bench.py` runs it all.

Every time is the median of repeats after a warm-up call that compiles. Ratios are formed within one run, interleaving what
is compared, because machines are shared and noisy.
"""

from dcache.bench.costs import generation_bytes, prefill_memory, prefill_signals, rollout_cost, training_step
from dcache.bench.decoding import decode
from dcache.bench.first_token import first_token
from dcache.bench.timing import Numbers, interleaved, machine, random_prompt

__all__ = [
    "Numbers",
    "decode",
    "first_token",
    "generation_bytes",
    "interleaved",
    "machine",
    "prefill_memory",
    "prefill_signals",
    "random_prompt",
    "rollout_cost",
    "training_step",
]
