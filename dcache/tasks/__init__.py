"""Tasks in the format of lm-evaluation-harness: give `PATH` to its `TaskManager(include_path=...)` or `--include_path`."""

import pathlib

PATH = str(pathlib.Path(__file__).parent)
"""The folder with the task files."""
