"""dcache beside transformers and kvpress: the same model, batch, cache and threads, measured in turn in one run.

The peers run in an environment of their own (`benchmarks/peers/`), as a process that is asked for one measurement at a time.
"""

import functools
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import jax
import jax.numpy as jnp
from jax import Array

from dcache import budget as budgets
from dcache import cache as kv
from dcache import model
from dcache.bench.decoding import RATIO, Decoding
from dcache.bench.timing import Numbers, interleaved, random_prompt
from dcache.config import ModelConfig
from dcache.errors import ConfigError
from dcache.generate import pad_prompts
from dcache.load import LanguageModel, find_directory
from dcache.policies import make
from dcache.policies.base import Policy, keep_set

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers" / "speed.py"


class Peer:
    """The process that measures transformers and kvpress (a context manager).

    Args:
      command: of the process; it answers lines of JSON with {"seconds": ...} (see `benchmarks/peers/speed.py`).
    """

    def __init__(self, command: Sequence[str]):
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise ConfigError(f"The peers' Python {command[0]} does not start ({error}); give its path.") from error

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def seconds(self, **request: float) -> float:
        """Seconds of what is asked for.

        Raises:
          ConfigError: the process has ended; its last words are on the terminal.
        """
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None and pipe_out is not None
        try:
            pipe_in.write(json.dumps(request) + "\n")
            pipe_in.flush()
        except BrokenPipeError:
            pass  # then there is no answer either
        line = pipe_out.readline()
        if not line:
            raise ConfigError(
                f"The peers' process ended (status {self._process.wait()}); what it printed says why. "
                "benchmarks/peers/README.md has its environment."
            )
        return float(json.loads(line)["seconds"])


def command(python: str, model_name: str) -> list[str]:
    """Of the peers' process: their Python, a model by the name that `dcache.load` takes, and a thread for each of our cores."""
    directory = str(find_directory(model_name))
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # not on macOS
    return [python, str(SCRIPT), f"--model={directory}", f"--threads={threads}"]


def decode(
    lm: LanguageModel, peer: Peer, *, batch: int, slots: int, steps: int = 16, repeats: int = 3
) -> Numbers:  # fmt: skip
    """Decoding with caches of `slots` tokens and with a quarter of them, kvpress's and dcache's, without decisions in between.

    `peers.decode_ratio...` is the peers' time over dcache's: above 1, dcache is faster.
    """
    numbers: Numbers = {}
    for name, kept in (
        (f"b{batch}.s{slots}", slots),
        (f"b{batch}.s{slots}.quarter", budgets.tokens_kept(RATIO, slots)),
    ):
        own = Decoding(lm, None, batch=batch, slots=kept + steps, steps=steps)
        theirs: list[float] = []
        mine = interleaved(
            {"dcache": own, "peers": functools.partial(_note, theirs, peer, decode=steps, batch=batch, slots=kept)},
            repeats,
        )["dcache"]
        found = statistics.median(theirs[1:])  # the first warms up
        numbers |= {
            f"peers.decode_seconds.{name}": found,
            f"peers.decode_seconds_dcache.{name}": mine / steps,
            f"peers.decode_ratio.{name}": found * steps / mine,
        }
    return numbers


def prefill(lm: LanguageModel, peer: Peer, *, prompt: int, repeats: int = 3) -> Numbers:
    """Reading a prompt up to the first token, without more and under SnapKV, of whose cache a quarter is left.

    `peers.prefill_ratio...` is the peers' time over dcache's.
    """
    tokens, length = pad_prompts([random_prompt(lm, prompt)], prompt)
    numbers: Numbers = {}
    for name, policy, share in (("plain", make("full"), {}), ("snapkv", make("snapkv"), {"press": RATIO})):
        kept = budgets.tokens_kept(RATIO, prompt) if share else prompt
        own = functools.partial(_read, lm.params, tokens, length, config=lm.config, policy=policy, kept=kept)
        theirs: list[float] = []
        ask = functools.partial(_note, theirs, peer, prefill=prompt, **share)
        mine = interleaved({"dcache": own, "peers": ask}, repeats)["dcache"]
        found = statistics.median(theirs[1:])
        numbers |= {
            f"peers.prefill_seconds.s{prompt}.{name}": found,
            f"peers.prefill_seconds_dcache.s{prompt}.{name}": mine,
            f"peers.prefill_ratio.s{prompt}.{name}": found / mine,
        }
    return numbers


@functools.partial(jax.jit, static_argnames=("config", "policy", "kept"))
def _read(
    params: model.Params, tokens: Array, length: Array, *, config: ModelConfig, policy: Policy, kept: int
) -> tuple[Array, kv.Cache]:
    """The first token of a prompt without padding, int32[1], and its cache of `kept` slots."""
    hidden, cache = model.prefill(params, config, tokens, length, policy.needs)
    first = jnp.argmax(model.unembed(params, hidden[:, -1], config), axis=-1).astype(jnp.int32)
    if kept < tokens.shape[1]:
        keep = keep_set(policy, (), cache, jnp.full_like(length, kept), jax.random.key(0))
        cache = kv.compact(cache, keep, kept, room=0)
    return first, cache


def _note(times: list[float], peer: Peer, **request: float) -> None:
    times.append(peer.seconds(**request))
