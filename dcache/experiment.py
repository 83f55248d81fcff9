"""A configuration file's ConfigDict as frozen dataclasses, checked field by field before any work is done."""

import dataclasses
import importlib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from dcache import budget
from dcache.axes import parse
from dcache.errors import ConfigError
from dcache.policies import REGISTRY

Trajectory = Literal["mixed", "teacher", "given"]
BENCHMARKS = "longbench+gsm8k"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where prompts come from.

    Attributes:
      source: "installed" (English text that every installation has), a directory of .txt files, or "longbench+gsm8k"
        (LongBench 2wikimqa and GSM8K train, the paper's prompts).
      length: tokens of a prompt, at most. retrieval: share of retrieval prompts, the others are plain text.
      held_out: share of the text that training never sees.
      trajectory: what follows a prompt: "teacher" (the model's own greedy continuation), "given" (the document's own
        text, the answer), or "mixed" (the model's own for retrieval prompts, the document's for plain text).
      longbench_dir, gsm8k_dir: local directories of the benchmarks; None for the hub.
    """

    source: str = "installed"
    length: int = 512
    retrieval: float = 0.5
    held_out: float = 0.3
    trajectory: Trajectory = "mixed"
    longbench_dir: str | None = None
    gsm8k_dir: str | None = None

    def __post_init__(self):
        if self.length < 32:
            raise ConfigError(f"data.length is {self.length}; prompts need at least 32 tokens.")
        if not 0.0 <= self.retrieval <= 1.0 or not 0.0 < self.held_out < 1.0:
            raise ConfigError(
                f"data.retrieval is {self.retrieval} and data.held_out {self.held_out}; give a share in [0, 1] and one "
                "between 0 and 1."
            )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """What `launch/eval.py` compares.

    Attributes:
      policies: names or descriptions (`policies.parse`) of the policies to compare with the trained one.
      budgets: ratios or numbers of tokens.
      prompts: number of held-out prompts of each kind. horizon: continuation tokens. evict_every: tokens between
        evictions, 0 for once after the prefill. seed: of the prompts. accuracy: answer the retrieval prompts too.
      hide_question: query-agnostic compression: a policy sees a retrieval prompt without its question, which is fed after the
        eviction.
      tasks: names of benchmark tasks (of lm-evaluation-harness or of `dcache.tasks`), separated by commas: these are run in
        place of the held-out prompts, `prompts` items of each. The other fields are theirs (`evaluate.benchmark.Settings`).
    """

    policies: tuple[str, ...]
    budgets: tuple[float | int, ...]
    prompts: int
    horizon: int
    evict_every: int
    seed: int
    accuracy: bool
    hide_question: bool = False
    tasks: str = ""
    data_dir: str | None = None
    length: int | None = None
    ruler_lengths: tuple[int, ...] = (4096,)
    chat: bool = False
    most_new: int | None = None
    long_count: int | None = None

    def __post_init__(self):
        for value in self.budgets:
            budget.check(value)

    def task_names(self) -> tuple[str, ...]:
        """`tasks`, one by one."""
        return tuple(name.strip() for name in self.tasks.split(",") if name.strip())


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that a training run and its evaluation depend on.

    Attributes:
      name: of the run's default folder. method: name of the learned policy; `policy` and `learn` have its fields.
      model, dtype: see `dcache.load.load`. seed: of weights, keep-sets and prompts.
      teacher_batch: prompts that the teacher reads at once. checkpoint_every: steps between checkpoints.
      keep_checkpoints: how many of the newest stay. data, policy, learn, eval: see their classes.
      sharding: how the model and its prompts are spread over all devices, see `dcache.load.load`.
    """

    name: str
    method: str
    model: str
    dtype: str
    seed: int
    teacher_batch: int
    checkpoint_every: int
    keep_checkpoints: int
    data: DataConfig
    policy: Any
    learn: Any
    eval: EvalConfig
    sharding: str = "none"

    def __post_init__(self):
        for field in ("teacher_batch", "checkpoint_every", "keep_checkpoints"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} is {getattr(self, field)}; give 1 or more.")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed is {self.seed}; give a number from 0 to {2**32 - 1}.")
        parse(self.sharding)
        self.learn.check(self.policy)

    def identity(self) -> dict[str, Any]:
        """What decides the course of training, as plain values: a checkpoint of one identity fits no other."""
        fields = dataclasses.asdict(self)
        # Another mesh changes nothing but rounding.
        for name in ("name", "checkpoint_every", "keep_checkpoints", "eval", "sharding"):
            del fields[name]
        return fields


def from_config(config: Mapping[str, Any] | Any) -> Experiment:
    """The experiment that a configuration (ml_collections ConfigDict or nested mapping) describes.

    Raises:
      ConfigError: an unknown or missing field, or a value of the wrong type or outside its range; the message names it.
    """
    plain = config.to_dict() if hasattr(config, "to_dict") else config
    method = plain.get("method") if isinstance(plain, Mapping) else None
    learned = {name: cls for name, cls in REGISTRY.items() if cls.learner}
    if method not in learned:
        raise ConfigError(f"config.method is {method!r}; use a learned policy's name: {', '.join(sorted(learned))}.")
    rule = importlib.import_module(learned[method].learner).Config
    return _build(Experiment, plain, "config", policy=learned[method], learn=rule)


def _build(cls: type, values: Any, where: str, **types_of: type) -> Any:
    """A dataclass from a mapping, nested dataclasses included; `types_of` says what fields without a type of their own are."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} is {values!r}; give a group of fields.")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ConfigError(f"{where} has no field {', '.join(unknown)}; its fields are {', '.join(fields)}.")
    missing = [name for name, field in fields.items() if name not in values and field.default is dataclasses.MISSING]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}; see the files in configs/ for an example.")
    hints = typing.get_type_hints(cls) | types_of
    return cls(**{name: _convert(value, hints[name], f"{where}.{name}") for name, value in values.items()})


def _convert(value: Any, hint: Any, where: str) -> Any:
    """The value as its field's type asks for it: lists become tuples, whole numbers floats; nothing else is changed."""
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, where)
    options = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is Literal:
        if value in options:
            return value
        raise ConfigError(f"{where} is {value!r}; use one of {', '.join(map(repr, options))}.")
    if origin is tuple:
        if isinstance(value, tuple | list):
            return tuple(_convert(item, options[0], f"{where}[{i}]") for i, item in enumerate(value))
        raise ConfigError(f"{where} is {value!r} ({type(value).__name__}); give a tuple.")
    allowed = options if origin in (typing.Union, types.UnionType) else (hint,)
    if type(value) in allowed:
        return value
    if float in allowed and type(value) is int:
        return float(value)
    names = " or ".join("None" if option is type(None) else option.__name__ for option in allowed)
    raise ConfigError(f"{where} is {value!r} ({type(value).__name__}); give {names}.")
