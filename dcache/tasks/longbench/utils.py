"""What the task files of this folder name with `!function utils.<name>`."""

from dcache.tasks.documents import longbench, longbench_results

__all__ = ["longbench", "longbench_results"]
