"""Task files of lm-evaluation-harness; see `dcache.tasks`."""
