"""Time to the first token, from a command that has yet to start to a process that has answered before.

The model is loaded and its programs are compiled in processes of their own, as they are when a user starts
`launch/generate.py`: once with an empty folder of compiled programs, and once more with what the first one left there. The
weights' file is in the system's cache of files in both, since the process that measures has read it.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from dcache.bench.timing import Numbers
from dcache.errors import ConfigError

ROOT = Path(__file__).parents[2]
BUDGET = 0.25


def first_token(model: str, policy: str, *, prompt: int = 2000) -> Numbers:
    """Seconds to the first token of a prompt of `prompt` tokens, of whose cache a quarter is left by then.

    Keys begin with `first_token.s<prompt>`:

      cold_seconds: from the start of Python, nothing compiled before. restarted_seconds: the same, with the programs that an
        earlier process compiled. warm_seconds: in a process that has answered a prompt of another length before.

    Args:
      model, policy: as `dcache.load` and `dcache.generate` take them.

    Raises:
      ConfigError: the process that measures ended with an error, which is on the terminal.
    """
    with tempfile.TemporaryDirectory() as folder:
        cold, _ = _in_new_process(model, policy, prompt, folder)
        restarted, warm = _in_new_process(model, policy, prompt, folder)
    label = f"first_token.s{prompt}"
    return {
        f"{label}.cold_seconds": cold, f"{label}.restarted_seconds": restarted, f"{label}.warm_seconds": warm
    }  # fmt: skip


def _in_new_process(model: str, policy: str, prompt: int, programs: str) -> tuple[float, float]:
    """Seconds to the first token from the start of the process, and those of a second prompt from when it was given."""
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": programs}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    command = [sys.executable, "-c", _CHILD, model, policy, str(prompt), repr(time.time())]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ConfigError(f"Timing the first token failed (status {done.returncode}); what was printed above says why.")
    first, second = json.loads(done.stdout.splitlines()[-1])
    return first, second


_CHILD = "import sys; from dcache.bench.first_token import answer_twice; answer_twice(*sys.argv[1:])"


def answer_twice(model: str, policy: str, prompt: str, started: str) -> None:
    """What the new process does: prints both seconds as JSON. started: `time.time()` before this process was."""
    import dcache
    from dcache.bench.timing import random_prompt
    from dcache.generate import generate

    lm, trained, moments = dcache.load(model), dcache.resolve(policy), list[float]()

    def note(tokens: np.ndarray) -> None:
        moments.append(time.time())

    answer = functools.partial(
        generate, lm, trained=trained, budget=BUDGET, max_new_tokens=2, temperature=0.0, top_p=1.0, seed=0,
        evict_every=16, on_tokens=note,
    )  # fmt: skip
    answer([random_prompt(lm, int(prompt))])
    first, given = moments[0], time.time()
    moments.clear()
    answer([random_prompt(lm, int(prompt) - 3, seed=1)])  # of the same bucket, unless that is a multiple of 128
    print(json.dumps([first - float(started), moments[0] - given]))
