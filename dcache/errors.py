"""The project's errors. All are `ValueError`s; each message says what was given, what was expected and what to do."""


class DcacheError(ValueError):
    """Base of the errors that this package raises on purpose."""


class ConfigError(DcacheError):
    """A configuration field or an argument has a value that cannot be used."""


class BudgetError(DcacheError):
    """A budget is neither a ratio nor a count, or smaller than what a method must keep."""


class LoadError(DcacheError):
    """A model, tokenizer or data file cannot be found, reached or read."""


class CheckpointError(DcacheError):
    """A checkpoint is missing, corrupted, or belongs to another model, policy or run."""


class TrainingError(DcacheError):
    """Training cannot go on, for instance because a reward is not a finite number."""
