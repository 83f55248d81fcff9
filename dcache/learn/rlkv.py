"""RLKV's learning: reinforcement learning finds the heads that need the whole cache (arXiv 2510.08525).

One gate a per key/value head mixes full and local attention, `a * full + (1 - a) * local`; only the gates train. The gated
model answers questions with checkable answers, several times each at temperature 1; GRPO (without a KL term) raises the
probability of right answers, an L1 penalty closes the gates of heads that do not help, while the mean reward is high enough.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from dcache import model
from dcache.config import ModelConfig
from dcache.data.prompts import Prompt, is_correct
from dcache.errors import ConfigError
from dcache.experiment import BENCHMARKS, Experiment
from dcache.learn import learner
from dcache.learn import policy_gradient as pg
from dcache.learn.blocks import training_prompts
from dcache.learn.gated import answer_log_probs, sample
from dcache.learn.state import LearnConfig, TrainState, advance, start
from dcache.load import LanguageModel
from dcache.tokenizer import Tokenizer
from dcache.workdir import atomic_write

QUESTIONS = "questions.json"

_MOST_TRIES = 20  # candidates looked at for each question of the pool


@dataclasses.dataclass(frozen=True)
class RLKVConfig(LearnConfig):
    """The learning rule. Defaults are the paper's where it gives a value.

    Attributes:
      steps, learning_rate, warmup_steps, final_rate, weight_decay: AdamW at a constant rate; the paper gives no decay of the
        weights, and here the penalty alone closes gates.
      questions: per update. samples: A, answers drawn for each. horizon: T, most tokens of an answer.
      arithmetic: share of questions that are small sums, differences and products, the others are the prompts of
        `data.source`.
      pool: questions that the plain model answers right more often than `threshold`, found before the first step and then
        used in turn (the paper trains on problems that the model can solve); 0 for fresh questions at every step, solvable or
        not.
      sinks, recent: tokens that local attention sees while training.
      clip: of the probability ratio. There is one update per batch of samples, so the ratio is 1 there and nothing is clipped.
      penalty: of the sum of all gates, times exp(mean reward) - 1. threshold: of the mean reward, at or below which there is
        none.
    """

    steps: int = 185
    learning_rate: float = 0.01
    warmup_steps: int = 0
    final_rate: float = 1.0
    weight_decay: float = 0.0
    questions: int = 32
    samples: int = 4
    horizon: int = 12
    arithmetic: float = 0.0
    pool: int = 3000
    sinks: int = 128
    recent: int = 256
    clip: float = 0.2
    penalty: float = 1e-3
    threshold: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if self.samples < 2 or self.questions < 1 or self.horizon < 2:
            raise ConfigError(
                f"questions is {self.questions}, samples {self.samples} and horizon {self.horizon}; draw 2 or more answers of "
                "2 or more tokens to 1 or more questions."
            )
        if self.sinks < 0 or self.recent < 1:
            raise ConfigError(
                f"sinks is {self.sinks} and recent {self.recent}; local attention sees at least the token itself."
            )
        if self.pool < 0:
            raise ConfigError(f"pool is {self.pool}; give a number of questions, or 0 for fresh ones.")
        if not 0.0 <= self.arithmetic <= 1.0 or self.penalty < 0.0 or self.clip <= 0.0:
            raise ConfigError(
                f"arithmetic is {self.arithmetic}, penalty {self.penalty} and clip {self.clip}; give a share in [0, 1], 0 or "
                "more, and more than 0."
            )


Config = RLKVConfig


# ---------------------------------------------------------------------------------------------------------------------
# The learning rule


def counted(answers: np.ndarray, stop: Sequence[int]) -> np.ndarray:
    """f32[..., T]: 1 up to the first token of `stop` (which is drawn too), 0 after it, of answers int[..., T]."""
    ended = np.cumsum(np.isin(answers, stop), axis=-1)
    return (ended - np.isin(answers, stop) == 0).astype(np.float32)


def question_loss(
    weights: Any, params: model.Params, tokens: Array, length: Array, answers: Array, old: Array, weight: Array,
    rewards: Array, *, model_config: ModelConfig, config: RLKVConfig,
) -> Array:  # fmt: skip
    """GRPO's loss of one question.

    Args:
      weights: the policy's. tokens: int32[P]. length: int32 scalar. answers: int32[A, T], drawn.
      old: f32[A, T], log-probabilities of their tokens when they were drawn. weight: f32[A, T], tokens that count.
      rewards: f32[A].
    """
    local: dict[str, Any] = {"sinks": config.sinks, "recent": config.recent}
    log_probs = answer_log_probs(params, model_config, weights["gates"], tokens, length, answers, **local)
    objective = pg.clipped_surrogate(log_probs, old, pg.group_advantages(rewards)[:, None], config.clip)
    return -jnp.mean(jnp.sum(objective * weight, axis=1) / jnp.sum(weight, axis=1))


def penalty_weight(reward: Array, config: RLKVConfig) -> Array:
    """Weight of the L1 penalty for a mean reward f32[]: none while it is at or below the threshold, then rising with it."""
    return jnp.where(reward > config.threshold, config.penalty * (jnp.exp(reward) - 1.0), 0.0)


def finish_step(
    state: TrainState, grads: Any, loss: Array, reward: Array, taught: Array, *, config: RLKVConfig
) -> tuple[TrainState, dict[str, Array]]:
    """The penalty's gradient, one update, and the gates back into [0, 1].

    Args:
      state: donated. grads, loss: mean over the questions. reward: f32[], mean of all samples. taught: f32[], share of
        questions whose samples got different rewards.
    """
    weight = penalty_weight(reward, config)
    grads = jax.tree.map(lambda g: g + weight, grads)  # of the sum of |gate|: gates are not negative
    new = advance(state, grads, config)
    inside = functools.partial(jax.tree.map, lambda gates: jnp.clip(gates, 0.0, 1.0))
    new = dataclasses.replace(new, params=inside(new.params), average=inside(new.average))
    gates = new.params["gates"]
    return new, {
        "loss": loss, "reward": reward, "taught": taught, "penalty": weight, "grad_norm": optax.tree.norm(grads),
        "gate": jnp.mean(gates), "open": jnp.mean((gates > 0.5).astype(jnp.float32)),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Questions


def arithmetic_question(tokenizer: Tokenizer, rng: np.random.Generator, name: str) -> Prompt:
    """A small sum, difference or product as a chat message."""
    sign = str(rng.choice(["+", "-", "*"]))
    x, y = sorted((int(rng.integers(2, 10)) for _ in range(2)), reverse=True)
    answer = str({"+": x + y, "-": x - y, "*": x * y}[sign])
    tokens = np.asarray(tokenizer.chat(f"What is {x} {sign} {y}? Answer with the number only."), np.int32)
    continuation = np.asarray(tokenizer.encode(answer), np.int32)
    return Prompt(tokens, "retrieval", continuation, (answer,), f"{name}:{x}{sign}{y}", "arithmetic")


class Questions:
    """`questions[i]` is a function of the seed and i: arithmetic, or the stream's prompt i."""

    def __init__(self, stream: Any, tokenizer: Tokenizer, arithmetic: float, seed: int):
        self._stream, self._tokenizer, self._arithmetic, self._seed = stream, tokenizer, arithmetic, seed

    def __getitem__(self, i: int) -> Prompt:
        """Question i, 0 or larger."""
        rng = np.random.default_rng([self._seed, i, 0xA1])
        if rng.random() < self._arithmetic:
            return arithmetic_question(self._tokenizer, rng, str(i))
        return self._stream[i]


class Learner(learner.Learner):
    """RLKV in the training loop. Each step's questions are answered `teacher_batch` at a time.

    The weights are the gates, put back into [0, 1] after each update. The numbers of the questions that the plain model can
    answer are kept in the workdir, in `questions.json`.
    """

    def __init__(self, experiment: Experiment, workdir: Path, load: Callable[[], LanguageModel]):
        learn, data, lm = experiment.learn, experiment.data, load()
        experiment.policy.check_model(lm.config)
        if data.source != BENCHMARKS and data.retrieval != 1.0:
            raise ConfigError(f"data.retrieval is {data.retrieval}; plain text has no answer to check, set it to 1.")
        if learn.questions % experiment.teacher_batch:
            raise ConfigError(
                f"learn.questions is {learn.questions}, no multiple of teacher_batch = {experiment.teacher_batch}; change "
                "either."
            )
        if data.length + learn.horizon > lm.config.max_positions:
            raise ConfigError(
                f"Prompts of {data.length} tokens and answers of {learn.horizon} exceed the "
                f"{lm.config.max_positions} positions of {lm.name!r}; shorten data.length or learn.horizon."
            )
        stream, digest = training_prompts(data, lm.tokenizer, learn.horizon, experiment.seed)
        self.experiment, self.lm = experiment, lm
        self.questions = Questions(stream, lm.tokenizer, learn.arithmetic, experiment.seed)
        self.model_info = {"name": lm.name, **dataclasses.asdict(lm.config)}
        self.identity = {"architecture": self.model_info, "training_text": digest}
        self._sample = jax.jit(
            functools.partial(
                sample, config=lm.config, samples=learn.samples, horizon=learn.horizon, sinks=learn.sinks,
                recent=learn.recent,
            )
        )  # fmt: skip
        loss = functools.partial(question_loss, model_config=lm.config, config=learn)
        self._gradient = jax.jit(jax.value_and_grad(loss))
        self._finish = jax.jit(functools.partial(finish_step, config=learn), donate_argnums=0)
        self._pool = self._solvable(workdir / QUESTIONS) if learn.pool else []

    def init(self, key):
        """Every gate open."""
        return start(self.experiment.policy.init(key), self.experiment.learn)

    def _solvable(self, path: Path) -> list[int]:
        """The first `pool` questions that the plain model answers right more often than the threshold, by their number."""
        experiment, learn = self.experiment, self.experiment.learn
        # A run of other settings may have left its questions here before its first checkpoint.
        run = json.loads(json.dumps(self.identity | {"config": experiment.identity()}))
        if path.is_file() and (kept := json.loads(path.read_text()))["run"] == run:
            return kept["questions"]
        print(f"Looking for {learn.pool} questions that the model can answer ...", file=sys.stderr, flush=True)
        open_ = experiment.policy.init(jax.random.key(0))["gates"]
        found: list[int] = []
        for first in range(0, _MOST_TRIES * learn.pool, experiment.teacher_batch):
            numbers = range(first, first + experiment.teacher_batch)
            prompts = [self.questions[i] for i in numbers]
            *_, rewards = self._answer(open_, prompts, jax.random.fold_in(jax.random.key(experiment.seed), first))
            found += [i for i, got in zip(numbers, rewards, strict=True) if got.mean() > learn.threshold]
            if len(found) >= learn.pool:
                atomic_write(path, json.dumps({"questions": found[: learn.pool], "run": run}) + "\n")
                return found[: learn.pool]
        raise ConfigError(
            f"The model answers only {len(found)} of {_MOST_TRIES * learn.pool} questions; shorten data.length, or set "
            f"learn.pool to at most {len(found)}."
        )

    def prompt(self, i: int) -> Prompt:
        """The i-th question of the run; those of the pool come in an order of their own each time around."""
        if not self._pool:
            return self.questions[i]
        again, place = divmod(i, len(self._pool))
        order = np.random.default_rng([self.experiment.seed, again]).permutation(len(self._pool))
        return self.questions[self._pool[order[place]]]

    def work(self, step: int, stopped: Callable[[], bool]) -> Iterator[learner.Work]:
        """Each step's questions."""
        learn = self.experiment.learn
        while step < learn.steps and not stopped():
            prompts = [self.prompt(i) for i in range(step * learn.questions, (step + 1) * learn.questions)]
            read = sum(len(p.tokens) + learn.samples * learn.horizon for p in prompts)
            yield learner.Work(prompts[0].name, "questions", read, prompts)
            step += 1

    def _answer(self, gates: Array, prompts: Sequence[Prompt], key: Array) -> tuple[np.ndarray, ...]:
        """Draws and checks answers.

        Returns:
          The prompts int32[B, P] and their lengths int32[B], the answers int32[B, A, T], the log-probability of each token and
          whether it counts, both f32[B, A, T], and rewards f32[B, A].
        """
        tokens = np.zeros((len(prompts), self.experiment.data.length), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt.tokens)] = prompt.tokens
        length = np.asarray([len(prompt.tokens) for prompt in prompts], np.int32)
        sampled = self._sample(self.lm.params, gates=gates, tokens=tokens, length=length, key=key)
        drawn, old = map(np.asarray, sampled)
        weight = counted(drawn, self.lm.tokenizer.eos_ids)
        rewards = np.stack([self.reward(*of) for of in zip(prompts, drawn, weight, strict=True)])
        return tokens, length, drawn, old, weight, rewards

    def update(self, state, work, key):
        """Draws answers, checks them, and differentiates those of the questions that teach something."""
        learn, size = self.experiment.learn, self.experiment.teacher_batch
        key = jax.random.fold_in(key, state.step)
        grads, loss, every = jax.tree.map(jnp.zeros_like, state.params), jnp.float32(0.0), []
        for first in range(0, learn.questions, size):
            *rows, rewards = self._answer(
                state.params["gates"], work.data[first : first + size], jax.random.fold_in(key, first)
            )
            every.append(rewards)
            # Without a difference between the samples there is no advantage, and no gradient.
            for i in np.flatnonzero(rewards.min(axis=1) < rewards.max(axis=1)):
                tokens, length, drawn, old, weight = (x[i] for x in rows)
                value, gradient = self._gradient(
                    state.params, self.lm.params, tokens, length, drawn, old, weight, rewards[i]
                )
                loss += value / learn.questions
                grads = jax.tree.map(lambda total, new: total + new / learn.questions, grads, gradient)
        got = np.concatenate(every)
        taught = np.float32((got.min(axis=1) < got.max(axis=1)).mean())
        return self._finish(state, grads, loss, got.mean(dtype=np.float32), taught)

    def reward(self, prompt: Prompt, answers: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """f32[A]: 1 for an answer int32[A, T] that is right, 0 for others."""
        texts = [self.lm.tokenizer.decode(row[: int(w.sum())]) for row, w in zip(answers, weight, strict=True)]
        return np.asarray([is_correct(prompt, text) for text in texts], np.float32)
