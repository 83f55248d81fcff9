"""Tasks in the format of lm-evaluation-harness: give `PATH` to its `TaskManager(include_path=...)` or `--include_path`.

What the tasks need to know comes through the harness's metadata; `dcache.tasks.documents.Request` lists the keys.
"""

import pathlib

PATH = str(pathlib.Path(__file__).parent)
"""The folder with the task files."""

WITHHELD = "\u241e"
"""Stands in a prompt where the part begins that the policy must not see: what follows is fed after the eviction."""
