"""The training loop of every learned method: updates, metrics, checkpoints and orderly stops.

What an update is, its `Learner` says (`dcache.learn.learner`). All randomness follows from the run's key and the step, and
the position in the data is the step itself: a run that goes on from a checkpoint takes the same steps, bit for bit.
"""

import collections
import contextlib
import dataclasses
import importlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from dcache import checkpoint, metrics
from dcache.errors import CheckpointError, DcacheError, TrainingError
from dcache.experiment import Experiment
from dcache.learn.learner import Learner, Work
from dcache.learn.state import TrainState
from dcache.load import LanguageModel, load
from dcache.sharding import anywhere, is_first_process, lost_another, mesh_of, on, replicated
from dcache.workdir import atomic_write, lock


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended.

    Attributes:
      step: updates done. steps: updates asked for; fewer were done if a signal stopped the run.
      trained: False if the run was finished already.
    """

    step: int
    steps: int
    trained: bool


def train(
    experiment: Experiment, workdir: str | os.PathLike[str], *, resume: bool = False, lm: LanguageModel | None = None
) -> Outcome:
    """Trains a policy, or goes on with a run.

    Args:
      experiment: see `dcache.experiment`. workdir: gets `checkpoints/`, `policy/` (see `checkpoint.load_policy`),
        `metrics.jsonl`, `tensorboard/` and `config.json`.
      resume: go on from the newest checkpoint; if there is none, start. A finished run is left as it is.
      lm: the language model, if it is loaded already.

    SIGTERM and SIGINT (once) let the current step finish and save. Of several processes (`experiment.distributed`), which
    see the same workdir, a signal to one stops all, and the first one writes.

    Raises:
      WorkdirError: another run holds the workdir, or it cannot be written.
      CheckpointError: the workdir holds a run and `resume` is not set, or its checkpoint is damaged or of another run.
      TrainingError: a metric is not a finite number, or another process has ended; the last checkpoint stays.
      ConfigError, LoadError: the model or the text does not fit or cannot be loaded.
    """
    steps, folder = experiment.learn.steps, Path(workdir) / "checkpoints"
    with _only_run(workdir), _stop_signals() as stopped, _others_alive(folder):
        start = checkpoint.latest_step(folder)
        if start is not None:
            if not resume:
                raise CheckpointError(
                    f"{str(workdir)!r} holds a run already (step {start}); go on with --resume, or choose another "
                    "--workdir."
                )
            checkpoint.check_identity(folder, checkpoint.describe(folder)["identity"], _configured(experiment))
            if start >= steps:
                return Outcome(start, steps, trained=False)
        if is_first_process():
            atomic_write(Path(workdir) / "config.json", json.dumps(dataclasses.asdict(experiment), indent=2) + "\n")
        module = importlib.import_module(experiment.policy.learner)
        mesh = lm.mesh if lm else mesh_of(experiment.sharding)
        with on(mesh):
            learner = module.Learner(
                experiment, Path(workdir), lambda: lm or load(experiment.model, experiment.dtype, experiment.sharding)
            )
            run = _Run(experiment, Path(workdir), learner, mesh)
            step = run.go(resumed=start is not None, stopped=stopped)
        return Outcome(step, steps, trained=True)


def _only_run(workdir: str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
    """The workdir's lock, which the first of several processes holds for all."""
    return lock(workdir) if is_first_process() else contextlib.nullcontext()


@contextlib.contextmanager
def _others_alive(folder: Path) -> Iterator[None]:
    """Says what has happened where a step fails because another process has gone."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DcacheError) or not lost_another(error):
            raise
        last = checkpoint.latest_step(folder)
        reason = (str(error).strip() or repr(error)).splitlines()[0][:200]
        raise TrainingError(
            f"Process {jax.process_index()} of {jax.process_count()} has lost another one, which has ended or cannot be "
            f"reached ({reason}). Start all of them again with --resume: the run goes on "
            f"from {'its start' if last is None else f'the checkpoint of step {last}'}."
        ) from error


def _configured(experiment: Experiment) -> dict[str, Any]:
    return {"config": experiment.identity()}


class _Run:
    """The parts of a run: the learner and where results go."""

    def __init__(self, experiment: Experiment, workdir: Path, learner: Learner, mesh: Mesh | None):
        self.experiment, self.workdir, self.learner = experiment, workdir, learner
        self.place = jax.sharding.SingleDeviceSharding(jax.devices()[0]) if mesh is None else replicated(mesh)
        self.identity = _configured(experiment) | learner.identity

    def go(self, *, resumed: bool, stopped: "_Stop") -> int:
        """Trains to the end or until stopped; returns the number of updates done."""
        experiment, learner = self.experiment, self.learner
        weights_key, key = jax.jit(
            lambda: tuple(jax.random.split(jax.random.key(experiment.seed))), out_shardings=self.place
        )()
        start = jax.jit(learner.init, out_shardings=self.place)
        if resumed:
            template = jax.eval_shape(start, weights_key)
            state, key = checkpoint.restore(self.workdir / "checkpoints", template, self.identity, self.place)
        else:
            state = start(weights_key)
            self.save(state, key)  # a full disk shows before any work is lost
        step = int(state.step)
        pending: tuple[int, Work, Mapping[str, jax.Array]] | None = None
        writer = metrics.Writer(self.workdir, step) if is_first_process() else None
        with (
            contextlib.closing(writer) if writer else contextlib.nullcontext(),
            _bar(step, experiment.learn.steps) as bar,
        ):
            log = _Log(writer, bar, experiment)
            for work in learner.work(step, lambda: jax.process_count() == 1 and stopped.requested):
                if anywhere(stopped.requested):
                    break
                state, values = learner.update(state, work, key)
                step += 1
                # The device works on this step while the host waits for the numbers of the one before.
                if pending is not None:
                    log(*pending)
                pending = (step, work, values)
                if step % experiment.checkpoint_every == 0 or step == experiment.learn.steps:
                    log(*pending)
                    pending = None
                    log.keep()
                    self.save(state, key)
            if pending is not None:
                log(*pending)
                log.keep()
                self.save(state, key)
        return step

    def save(self, state: TrainState, key: jax.Array) -> None:
        """Writes policy and checkpoint, the policy first: where the last checkpoint is there, its policy is too."""
        experiment, step = self.experiment, int(state.step)
        meta = {"experiment": experiment.name, "seed": experiment.seed, "step": step, "model": self.learner.model_info}
        if is_first_process():
            checkpoint.save_policy(self.workdir / "policy", experiment.policy, state.average, meta)
        folder = self.workdir / "checkpoints"
        checkpoint.save(folder, step, state, key, self.identity, experiment.keep_checkpoints)


class _Log:
    """Writes each step's numbers, and stops the run if one of them is not finite."""

    def __init__(self, writer: metrics.Writer | None, bar: Any, experiment: Experiment):
        self._writer, self._bar = writer, bar
        self._last, self._compiling = time.monotonic(), True
        # As many steps as there are in a block, so that each window holds one pass of a teacher.
        self._window: collections.deque[tuple[int, float]] = collections.deque(maxlen=experiment.teacher_batch)

    def keep(self) -> None:
        """Makes sure that what was written stays, whatever happens to this process."""
        if self._writer is not None:
            self._writer.keep()

    def __call__(self, step: int, work: Work, values: Mapping[str, jax.Array]) -> None:
        numbers = {name: float(value) for name, value in jax.device_get(dict(values)).items()}
        wrong = [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]
        if wrong:
            raise TrainingError(
                f"Step {step}, prompt {work.name!r}: {', '.join(wrong)}; look at this prompt and the model's "
                "weights, or lower learn.learning_rate. The last checkpoint is from before this step."
            )
        now = time.monotonic()
        self._window.append((work.tokens, now - self._last))
        read, seconds = (sum(column) for column in zip(*self._window, strict=True))
        shown = {name: f"{numbers[name]:.3f}" for name in ("loss", "kl", "reward") if name in numbers}
        if {"kl", "ratio"} <= numbers.keys():
            numbers[f"kl@{numbers['ratio']:g}"] = numbers["kl"]
        numbers |= {"tokens_per_second": read / max(seconds, 1e-9), "seconds": now - self._last}
        self._last = now
        if self._writer is not None:
            self._writer.write(step, {**numbers, "kind": work.kind, "prompt": work.name})
        self._bar.set_postfix(shown, refresh=False)
        if self._compiling:  # the first step's time says nothing about the others'
            self._compiling = False
            self._bar.reset()
            self._bar.initial = self._bar.n = self._bar.last_print_n = step
            self._bar.set_description("train")
        else:
            self._bar.update()


def _bar(step: int, steps: int) -> Any:
    """A progress bar; where it is not a terminal that shows it, it is drawn rarely."""
    from tqdm import tqdm

    interval = 0.2 if sys.stderr.isatty() else 30.0
    return tqdm(
        total=steps, initial=step, desc="compiling", unit="step", mininterval=interval, smoothing=0.0,
        disable=not is_first_process(),
    )  # fmt: skip


class _Stop:
    """Whether a signal asked the run to stop."""

    requested = False


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stop]:
    """Turns the first SIGTERM or SIGINT into a request; a second one acts as usual."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may set handlers
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def request(number: int, frame: Any) -> None:
        stop.requested = True
        restore()
        print("\nStopping after this step ...", file=sys.stderr, flush=True)

    for number in before:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        restore()
