"""The learning seam: what a learned method gives to the training loop.

A learned policy's class names a module of `dcache.learn` (`Policy.learner`) that defines `Config`, a `LearnConfig` with the
method's own fields, and `Learner`, a subclass of the one below. `dcache.learn.loop` does the rest: checkpoints, resuming,
metrics, signals.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dcache.attention import StatsRequest
from dcache.data.prompts import Prompt
from dcache.errors import ConfigError
from dcache.experiment import Experiment
from dcache.learn.blocks import Block, make_block, training_prompts, unseen_tokens
from dcache.learn.state import TrainState, start
from dcache.load import LanguageModel
from dcache.rollout import Trajectories, teach


@dataclasses.dataclass(frozen=True)
class Work:
    """What one update is made from.

    Attributes:
      name, kind: of the prompt, for the log. tokens: read for it, for the log.
      data: arguments of `Learner.update`.
    """

    name: str
    kind: str
    tokens: int
    data: Any


class Learner(abc.ABC):
    """One learned method in one run.

    Attributes:
      identity: JSON values beside the configuration that decide the course of training (model, data).
      model_info: the language model's name and shape, kept with the trained policy.
    """

    identity: dict[str, Any]
    model_info: dict[str, Any]

    @abc.abstractmethod
    def __init__(self, experiment: Experiment, workdir: Path, load: Callable[[], LanguageModel]):
        """Sets up compiled functions and data.

        Args:
          workdir: of the run, for data that the method collects. load: gives the language model; a method that works from
            stored data need not keep it.
        """

    @abc.abstractmethod
    def init(self, key: Array) -> TrainState:
        """A fresh state: pure, compiled by the loop."""

    @abc.abstractmethod
    def work(self, step: int, stopped: Callable[[], bool]) -> Iterator[Work]:
        """The work of each step from `step` on; ends with the last one, or early once `stopped()` is true."""

    @abc.abstractmethod
    def update(self, state: TrainState, work: Work, key: Array) -> tuple[TrainState, Mapping[str, Array]]:
        """One update: state (donated) and the run's key -> the new state and metrics (f32 scalars)."""


class PromptLearner(Learner):
    """A method that learns from prompts as the frozen language model reads them, one update per prompt.

    The teacher reads `teacher_batch` prompts at once; each of them then gives one update. A subclass defines `step`.

    Attributes:
      step: the pure function of one update on one of the teacher's prompts: (state, model's params, trajectories, index int32,
        key, and as static keywords model_config, policy, config and those of `static`) -> (state, metrics).
      more: statistics that the method learns from, beside those of its observers.
    """

    step: Callable[..., tuple[TrainState, dict[str, Array]]]
    more = StatsRequest()

    def __init__(self, experiment, workdir, load):
        """Compiles nothing yet; checks that the prompts fit the model."""
        learn, data = experiment.learn, experiment.data
        self.experiment, self.lm = experiment, load()
        lm = self.lm
        experiment.policy.check_model(lm.config)
        if data.length + self.horizon > lm.config.max_positions:
            raise ConfigError(
                f"Prompts of {data.length} tokens and a horizon of {self.horizon} exceed the "
                f"{lm.config.max_positions} positions of {lm.name!r}; shorten data.length or learn.horizon."
            )
        self.stream, digest = training_prompts(data, lm.tokenizer, self.horizon, experiment.seed)
        self.model_info = {"name": lm.name, **dataclasses.asdict(lm.config)}
        self.identity = {"architecture": self.model_info, "training_text": digest}
        self.decode_params = lm.decode_params
        observers = tuple(policy.bind(lm.tokenizer) for policy in self.observers())
        self._teach = jax.jit(
            functools.partial(
                teach, config=lm.config, policies=observers, weights=((),) * len(observers), more=self.more
            ),
            static_argnames=("decode", "unseen"),
        )
        step = functools.partial(
            self.step, model_config=lm.config, policy=experiment.policy, config=learn, **self.static()
        )
        self.compiled = jax.jit(step, donate_argnums=0)

    @property
    def horizon(self) -> int:
        """Continuation tokens."""
        return self.experiment.learn.horizon

    def observers(self) -> tuple[Any, ...]:
        """Policies whose needs and own passes over the prompt the method learns from."""
        return (self.experiment.policy,)

    def static(self) -> dict[str, Any]:
        """Further static arguments of `step`."""
        return {}

    def init(self, key):
        """Fresh weights from the policy."""
        return start(self.experiment.policy.init(key), self.experiment.learn)

    def update(self, state, work, key):
        """One compiled step."""
        return self.compiled(state, self.lm.params, *work.data, key)

    def work(self, step, stopped):
        """Each step's prompt: its block's trajectories, and its place among them (int32 scalar)."""
        size, steps = self.experiment.teacher_batch, self.experiment.learn.steps
        while step < steps and not stopped():
            block = self.block(step // size)
            taught = self.read(block)
            for place in range(step % size, min(size, steps - step + step % size)):
                prompt = block.prompts[place]
                yield Work(prompt.name, prompt.kind, self.tokens_read(prompt), (taught, jnp.int32(place)))
            step += size - step % size

    def tokens_read(self, prompt: Prompt) -> int:
        """Tokens that a step reads, for the log: prompt and continuation."""
        return len(prompt.tokens) + self.horizon

    def hides(self, number: int) -> bool:
        """Whether the questions of block `number` are hidden from the policy: they then begin what follows the prompts."""
        del number
        return False

    def block(self, number: int) -> Block:
        """Block `number`: the prompts of `teacher_batch` successive steps."""
        size, data = self.experiment.teacher_batch, self.experiment.data
        prompts = [self.stream[i] for i in range(number * size, (number + 1) * size)]
        unseen = unseen_tokens(prompts) if self.hides(number) else 0
        return make_block(prompts, data.length, self.horizon, data.trajectory, unseen)

    def read(self, block: Block) -> Trajectories:
        """The teacher's pass over a block; it decodes only if a prompt needs its own continuation."""
        return self._teach(
            self.lm.params, self.decode_params, tokens=block.tokens, length=block.length, given=block.given,
            given_length=block.given_length, own=block.own, stop=jnp.asarray(self.lm.tokenizer.eos_ids, jnp.int32),
            decode=bool(block.own.any()), asked=block.asked, unseen=block.unseen,
        )  # fmt: skip
