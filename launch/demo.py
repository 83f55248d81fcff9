"""The whole story in one command: `python launch/demo.py` (or `make demo`).

Trains a policy on a real language model, compares it with the heuristics on prompts that it never saw, and writes a
report; then answers a question with a pruned cache. Takes about ten minutes on 2 processors; what is done already is not
done again.

    --workdir=DIR  where everything goes (default: runs/demo)
    --config=FILE  what is trained (default: configs/smollm2.py:demo)
"""

import pathlib
import subprocess
import sys
from pydoc_data.topics import topics

import common
from absl import flags

_WORKDIR = flags.DEFINE_string("workdir", "runs/demo", "Where everything goes.")
_CONFIG = flags.DEFINE_string("config", "configs/smollm2.py:demo", "Configuration to train and evaluate.")

_STORY = """\
1. Training: a small network learns which cached tokens of a 512-token prompt may go (75% do), by trial and error: the
   reward is how little the language model's predictions change.                                      about 6 minutes
2. Evaluation on held-out prompts, against the heuristics at the same budget (25% of the tokens kept):  about 3 minutes
3. A table here, and a report with pictures in {report}.
4. An answer about a fact that is hidden in two pages of text, with 25% of the cache and with all of it.
An interrupted demo goes on where it stopped when you run the command again.
"""


def _question() -> str:
    """A page of the Python language reference with a sentence that does not belong there, and a question about it."""
    page = topics["naming"]
    middle, end = page.index("\n\n", 1500), page.index("\n\n", 3500)
    fact = "\n\nThe favourite dish of Oskar Yarrow is plum cake."
    question = "\n\nAnswer from the text: what is the favourite dish of Oskar Yarrow?"
    return page[:middle] + fact + page[middle:end] + question


def main(argv: list[str]) -> int:
    from dcache.errors import ConfigError
    from dcache.workdir import atomic_write

    if len(argv) > 1:
        raise ConfigError(f"Unknown argument {argv[1]!r}; options begin with --, see --help.")
    workdir = pathlib.Path(_WORKDIR.value)
    print(_STORY.format(report=workdir / "eval" / "report.html"), flush=True)
    shared = [f"--config={_CONFIG.value}", f"--workdir={workdir}"]

    def start(script: str, *options: str) -> int:
        # A process of its own, so that the memory of the training is free again when the evaluation begins.
        command = [sys.executable, str(common.ROOT / "launch" / script), *shared, *options]
        return subprocess.run(command, cwd=common.ROOT).returncode

    status = start("train.py", "--resume") or start("eval.py", "--config.eval.budgets=(0.25,)")
    if status:
        return status
    example = workdir / "example.txt"
    atomic_write(example, _question())
    print(f"\nThe question after two pages of text in {example}, answered with 25% of the cache:", flush=True)
    return start("generate.py", f"--prompt_file={example}", "--max_new_tokens=32")


if __name__ == "__main__":
    common.run(main)
