"""What the task files of this folder name with `!function utils.<name>`."""

from dcache.tasks.documents import (
    conversations,
    longbench_results,
    rolling_results,
    wikitext,
    withheld,
    xquad,
    xquad_results,
)

__all__ = ["conversations", "longbench_results", "rolling_results", "wikitext", "withheld", "xquad", "xquad_results"]
