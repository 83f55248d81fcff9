"""dcache: learned eviction of the key/value cache of large language models, in JAX.

import dcache
lm = dcache.load("smollm2")
dcache.generate(lm, ["..."], policy="distillcache", budget=0.25).texts
"""

from dcache.api import Fidelity, fidelity, generate, keep, logits, resolve, score
from dcache.errors import BudgetError, CheckpointError, ConfigError, DcacheError, LoadError, TrainingError
from dcache.generate import Generation
from dcache.load import LanguageModel, load
from dcache.policies import Policy, Trained, policies

__version__ = "0.1.0"

__all__ = [
    "BudgetError", "CheckpointError", "ConfigError", "DcacheError", "Fidelity", "Generation", "LanguageModel", "LoadError",
    "Policy", "Trained", "TrainingError", "fidelity", "generate", "keep", "load", "logits", "policies", "resolve", "score",
]  # fmt: skip
