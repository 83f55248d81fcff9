"""Proof by compilation: a configuration's steps, compiled for TPUs that are not here.

`libtpu` compiles for a described slice on any Linux machine. Nothing is allocated: weights, caches and prompts are shapes with
a place on the slice's mesh, and each step's arguments lie where the step before left them. What comes out is XLA's final
program, from which bytes, operations and collectives are counted (`dcache.hlo`) and held against the chip (`dcache.roofline`).

The steps: "teacher" (reads `teacher_batch` prompts and continues them), "students" (one update), "prefill" (reads prompts and
evicts) and "decode" (tokens after it, with one eviction). Attention runs as it would on the chip (`dcache.axes.platform`).
"""

import dataclasses
import functools
import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from dcache import cache as kv
from dcache import hlo, model
from dcache.axes import PRESETS as RULES
from dcache.axes import ShardingRules, parse, spec
from dcache.errors import ConfigError
from dcache.experiment import Experiment
from dcache.generate import PROGRAMS, make_plan
from dcache.learn.distill import DistillConfig, init_state, largest_budget, train_step
from dcache.load import LanguageModel, config_of
from dcache.rollout import teach
from dcache.roofline import Chip, roofline
from dcache.sharding import make_mesh, on, param_shardings, replicated
from dcache.tokenizer import ByteTokenizer

TRAINING = ("teacher", "students")
STEPS = (*TRAINING, "prefill", "decode")
_UNITS = {
    "teacher": "training steps", "students": "training step", "prefill": "prompts", "decode": "tokens of each prompt",
}  # fmt: skip
_BUDGET, _BATCH, _NEW, _EVERY = 0.25, 8, 64, 16  # of prefill and decode; training has its own

# What libtpu would otherwise ask the cloud's metadata server for, and a lock that only chips need.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Target:
    """A slice of TPU chips that is only described, and how a model lies on it."""

    topology: str
    rules: ShardingRules
    mesh: Mesh


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of one step, per chip.

    Attributes:
      name: of the step. units: training steps, prompts or tokens that one call stands for.
      weights, cache: bytes of the language model's weights (as often as the step is given them) and of keys, values and
        statistics among arguments and results. temporaries: bytes that XLA reserves while it runs. total: of all arguments,
        results, temporaries and the program. donated: bytes of arguments whose memory the results take over.
      donates: whether these are those of a cache that the step is given; None if it is given none.
      phases: what one call does. seconds: of compiling it.
    """

    name: str
    units: int
    weights: float
    cache: float
    temporaries: float
    total: float
    donated: float
    donates: bool | None
    phases: tuple[hlo.Work, ...]
    seconds: float

    @property
    def work(self) -> hlo.Work:
        """What one call does."""
        return hlo.total(self.phases)


def describe(topology: str, sharding: str = "none") -> Target:
    """The slice of a name such as "v5e:2x4"; sharding: as `axes.parse` reads it, "none" for the preset of the slice's size.

    Raises:
      ConfigError: there is no libtpu here, no such slice, or no preset for it.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            "Compiling for a TPU needs libtpu, which is not installed; make an environment of its own for it and run "
            "`python -m pip install -e '.[tpu]'` there (beside it JAX looks for a TPU unless JAX_PLATFORMS=cpu is set)."
        )
    from jax.experimental import topologies

    for name, value in _LIBTPU.items():
        os.environ.setdefault(name, value)
    try:
        devices = topologies.get_topology_desc(topology, platform="tpu").devices
    except Exception as error:  # libtpu's own errors have no common type
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(f"libtpu knows no slice {topology!r} ({reason}); give one such as 'v5e:2x4'.") from error
    # Google counts v5p slices in cores, two a chip.
    name = f"{topology.partition(':')[0]}-{len(devices) * (2 if topology.startswith('v5p') else 1)}"
    if sharding == "none" and name not in RULES:
        raise ConfigError(
            f"There is no sharding preset {name!r} for {topology!r}; set config.sharding, for instance to 'tensor=8'."
        )
    rules = parse(name if sharding == "none" else sharding)
    return Target(topology, rules, make_mesh(rules, devices))


def compile_steps(experiment: Experiment, target: Target) -> Iterator[Compiled]:
    """Compiles a DistillCache configuration's steps, one after the other.

    Raises:
      ConfigError: another method, an unknown model, or a step that does not fit into the chips' memory.
    """
    if not isinstance(experiment.learn, DistillConfig) or experiment.learn.estimator != "reinforce":
        raise ConfigError(
            f"The method is {experiment.method!r}; steps of DistillCache with learn.estimator 'reinforce' can be compiled here."
        )
    maker = _Maker(experiment, target)
    with on(target.mesh):
        for name in STEPS:
            yield getattr(maker, name)()


def training_seconds(compiled: Iterable[Compiled], chip: Chip) -> float:
    """Least seconds of one training step: the teacher's share of it, and the students."""
    return sum(roofline(step.phases, chip).seconds / step.units for step in compiled if step.name in TRAINING)


def lines_of(step: Compiled, chip: Chip) -> list[str]:
    """What is known of a step per chip, in lines for a terminal."""
    limits = roofline(step.phases, chip)
    sent = [f"{step.work.sent[kind] / 1e9:.3f} GB by {count:,} {kind}" for kind, count in step.work.calls.items()]
    cache = {None: "new", True: "donated", False: "given, not donated"}[step.donates]
    return [
        f"{step.name}: one call for {step.units} {_UNITS[step.name]}, compiled in {step.seconds:.0f} s",
        f"  memory    {step.total / 1e9:.2f} of {chip.memory / 1e9:.0f} GB: weights {step.weights / 1e9:.2f}, cache "
        f"{step.cache / 1e9:.2f} ({cache}), temporaries {step.temporaries / 1e9:.2f}",
        f"  work      {step.work.flops / 1e12:.3f} TFLOP, {step.work.bytes / 1e9:.2f} GB; sent: {', '.join(sent) or 'nothing'}",
        f"  roofline  {limits.seconds * 1e3:.2f} ms, bound by {limits.bound} (alone: "
        + ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in limits.alone.items())
        + ")",
        *(f"  not counted: {what}" for what in step.work.unknown),
    ]


class _Maker:
    """The steps of one configuration on one slice."""

    def __init__(self, experiment: Experiment, target: Target):
        self.experiment, self.target = experiment, target
        self.config = config_of(experiment.model, experiment.dtype)
        places = param_shardings(self.config, target.rules, target.mesh)
        self.params = jax.tree.map(
            lambda weight, place: jax.ShapeDtypeStruct(weight.shape, self.config.dtype, sharding=place),
            model.param_specs(self.config), places, is_leaf=lambda x: isinstance(x, model.TensorSpec),
        )  # fmt: skip
        self.state = self.everywhere(
            jax.eval_shape(lambda key: init_state(key, experiment.policy, experiment.learn), jax.random.key(0))
        )
        self.key = self.everywhere(jax.eval_shape(jax.random.key, 0))
        self.taught: Any = None  # trajectories, what the teacher gives the students
        self.started: Any = None  # plan, first token and cache, what a prefill gives a decoding loop

    def everywhere(self, tree: Any) -> Any:
        """Shapes of arrays of which each chip holds all."""
        place = replicated(self.target.mesh)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)

    def batch(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """The shape of an array with a leading axis B."""
        letters = "B" + "." * (len(shape) - 1)
        place = spec(letters, shape, ShardingRules.ACTIVATIONS, self.target.mesh.shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.target.mesh, place))

    def teacher(self) -> Compiled:
        """Reads the prompts of `teacher_batch` training steps and fixes what follows them."""
        e = self.experiment
        count, horizon = e.teacher_batch, e.learn.horizon
        function = functools.partial(teach, config=self.config, policies=(e.policy,), weights=((),), decode=True)
        arguments = dict(
            tokens=self.batch((count, e.data.length)), length=self.batch((count,)), given=self.batch((count, horizon)),
            given_length=self.batch((count,)), own=self.batch((count,), bool),
            stop=self.everywhere(jax.ShapeDtypeStruct((1,), jnp.int32)),
        )  # fmt: skip
        self.taught, compiled = self.compile(
            "teacher", jax.jit(function).lower, count, self.params, self.params, **arguments
        )
        return compiled

    def students(self) -> Compiled:
        """One update on one of the teacher's prompts."""
        e = self.experiment
        function = functools.partial(
            train_step, model_config=self.config, policy=e.policy, config=e.learn,
            most=largest_budget(e.learn, e.data.length),
        )  # fmt: skip
        index = self.everywhere(jax.ShapeDtypeStruct((), jnp.int32))
        step = jax.jit(function, donate_argnums=0).lower
        return self.compile("students", step, 1, self.state, self.params, self.taught, index, self.key)[1]

    def prefill(self) -> Compiled:
        """Reads a batch of prompts and evicts down to the budget, as `generate` does."""
        length, policy = self.experiment.data.length, self.experiment.policy
        lm = LanguageModel(self.config, self.params, ByteTokenizer(), self.experiment.model, self.target.mesh)
        plan = make_plan(lm, policy, _BUDGET, length, _NEW, _EVERY, True)
        prompts = (self.batch((_BATCH, length)), self.batch((_BATCH,)))
        step = functools.partial(PROGRAMS["start"].lower, plan)
        arguments = (self.params, self.state.params, *prompts, *self.settings())
        (token, cache), compiled = self.compile("prefill", step, _BATCH, *arguments)
        self.started = (plan, token, cache)
        return compiled

    def decode(self) -> Compiled:
        """One eviction and the tokens until the next, of a batch."""
        plan, token, cache = self.started
        step = functools.partial(PROGRAMS["decode"].lower, plan)
        fed = self.everywhere(jax.ShapeDtypeStruct((), jnp.int32))
        arguments = (self.params, self.state.params, cache, token, fed, *self.settings())
        return self.compile("decode", step, plan.chunk, *arguments)[1]

    def settings(self) -> tuple[Any, ...]:
        """Budget, temperature, top-p and key of a generation."""
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        return self.everywhere(scalar), (*self.everywhere((scalar, scalar)), self.key)

    def compile(
        self, name: str, lower: Callable[..., Any], units: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Compiled]:  # fmt: skip
        """Compiles one step; its results as shapes where they will lie, and what the compiler says.

        Raises:
          ConfigError: it does not fit.
        """
        began = time.perf_counter()
        lowered = lower(*args, **kwargs)
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = str(error).strip().split("\n")[0]
            raise ConfigError(
                f"The step {name!r} does not fit into a chip of {self.target.topology} laid out as {self.target.rules.text()}: "
                f"{reason} Use more chips, a larger tensor axis, or a smaller batch."
            ) from error
        seconds = time.perf_counter() - began
        results = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            lowered.out_info, compiled.output_shardings,
        )  # fmt: skip
        memory = compiled.memory_analysis()
        copies = sum(argument is self.params for argument in args)
        weights = copies * per_chip(self.params)
        donated = memory.alias_size_in_bytes
        total = (
            memory.argument_size_in_bytes + memory.output_size_in_bytes - donated + memory.temp_size_in_bytes
            + memory.generated_code_size_in_bytes
        )  # fmt: skip
        # What was marked as donated, and whether its memory was really taken over.
        marked = sum(
            per_chip(x)
            for x, info in zip(jax.tree.leaves((args, kwargs)), jax.tree.leaves(lowered.args_info), strict=True)
            if info.donated
        )
        given = _caches(lowered.args_info)
        donates = all(x.donated for x in jax.tree.leaves(given)) and donated >= marked
        return results, Compiled(
            name=name, units=units, weights=weights, temporaries=memory.temp_size_in_bytes, total=total, donated=donated,
            cache=max(map(per_chip, _caches((args, kwargs, results))), default=0.0), donates=donates if given else None,
            phases=hlo.phases(compiled.as_text()), seconds=seconds,
        )  # fmt: skip


def _caches(tree: Any) -> list[kv.Cache]:
    """The caches among arguments or results."""
    return [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kv.Cache)) if isinstance(x, kv.Cache)]


def per_chip(tree: Any) -> float:
    """Bytes that one chip holds of arrays that are given as shapes with their places."""
    leaves = jax.tree.leaves(tree)
    return float(sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves))
