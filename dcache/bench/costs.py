"""Costs of training and of prompts: a training step, its students, a prefill's time and memory, allocated bytes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dcache import budget as budgets
from dcache import cache as kv
from dcache import model, rollout
from dcache.attention import StatsRequest
from dcache.bench.decoding import Decoding, filled
from dcache.bench.timing import Numbers, interleaved, random_prompt
from dcache.errors import ConfigError
from dcache.generate import generate, pad_prompts
from dcache.learn.distill import DistillConfig, init_state, train_step
from dcache.load import LanguageModel
from dcache.policies.base import Trained
from dcache.policies.distillcache import DistillCache
from dcache.signals import PAPER_SIGNALS, SIGNALS, needs


def distilled(trained: Trained) -> DistillCache:
    """The policy, if it is one that samples keep-sets.

    Raises:
      ConfigError: it is another one.
    """
    policy = trained.policy
    if not isinstance(policy, DistillCache) or policy.granularity != "sequence":
        raise ConfigError(
            f"A training step needs a distillcache policy with one keep-set for all heads; {policy.name!r} is none."
        )
    return policy


def training_step(
    lm: LanguageModel, trained: Trained, *, prompt: int = 512, samples: int = 8, horizon: int = 32, evict_every: int = 8,
    teacher_batch: int = 8, repeats: int = 5,
) -> Numbers:  # fmt: skip
    """A training step beside the teacher's prefill of its prompt and `horizon` single-sequence decode steps.

    The step is the whole of it: the teacher reads the prompt, continues it greedily, and K students follow. As in the
    training loop the teacher works on `teacher_batch` prompts at once, and a step costs one share of that; `..._alone` is
    the same with a teacher that reads one prompt at a time.
    """
    policy = distilled(trained)
    config = DistillConfig(
        steps=100, horizon=horizon, evict_every=evict_every, samples=samples, ratios=(0.25,), warmup_steps=1
    )
    state = init_state(jax.random.key(0), policy, config)
    teach = jax.jit(functools.partial(rollout.teach, config=lm.config, policies=(policy,), weights=((),), decode=True))
    most = budgets.tokens_kept(0.25, prompt + horizon)
    update = jax.jit(functools.partial(train_step, model_config=lm.config, policy=policy, config=config, most=most))
    prefill = jax.jit(functools.partial(model.prefill, config=lm.config, request=StatsRequest()))
    unrolled = isinstance(lm.decode_params["layers"], tuple)

    @jax.jit
    def decode(params, cache, token):
        room = kv.grow(kv.restrict(cache, StatsRequest()), horizon + 1)
        return rollout.greedy_continuation(
            params, lm.config, token, kv.unstack(room) if unrolled else room, horizon + 1
        )

    def read(count: int):
        tokens, length = pad_prompts([random_prompt(lm, prompt, seed) for seed in range(count)], prompt)
        return teach(
            lm.params, lm.decode_params, tokens=tokens, length=length, given=jnp.zeros((count, horizon), jnp.int32),
            given_length=jnp.zeros(count, jnp.int32), own=jnp.ones(count, bool), stop=jnp.asarray([0], jnp.int32),
        )  # fmt: skip

    trajectories = read(1)
    tokens, length = pad_prompts([random_prompt(lm, prompt)], prompt)
    _, cache = prefill(lm.params, tokens=tokens, length=length)
    seconds = interleaved(
        {
            "teach": lambda: read(teacher_batch),
            "teach_alone": lambda: read(1),
            "update": lambda: update(state, lm.params, trajectories, jnp.int32(0), jax.random.key(1)),
            "prefill": lambda: prefill(lm.params, tokens=tokens, length=length),
            "decode": lambda: decode(lm.decode_params, cache, tokens[:, 0]),
        },
        repeats,
    )
    unit = seconds["prefill"] + seconds["decode"]
    step = seconds["teach"] / teacher_batch + seconds["update"]
    alone = seconds["teach_alone"] + seconds["update"]
    return {
        "train.prefill_seconds": seconds["prefill"],
        "train.decode_seconds": seconds["decode"],
        "train.update_seconds": seconds["update"],
        "train.step_seconds": step,
        "train.step_ratio": step / unit,
        "train.step_seconds_alone": alone,
        "train.step_ratio_alone": alone / unit,
    }


def prefill_memory(lm: LanguageModel, length: int = 8000) -> Numbers:
    """Bytes that a prefill with all five signals needs: weights, result, and what XLA reserves while it runs."""
    tokens, lengths = pad_prompts([random_prompt(lm, length)], length)
    run = functools.partial(model.prefill, config=lm.config, request=needs(PAPER_SIGNALS))
    memory: Any = jax.jit(run).lower(lm.params, tokens=tokens, length=lengths).compile().memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return {
        f"prefill.s{length}.total_bytes": total,
        f"prefill.s{length}.temporary_bytes": memory.temp_size_in_bytes,
        f"prefill.s{length}.cache_bytes": memory.output_size_in_bytes,
    }


def prefill_signals(lm: LanguageModel, length: int, repeats: int = 5) -> Numbers:
    """Seconds of a prefill without statistics, with those of the paper's five signals, and with those of all signals."""
    tokens, lengths = pad_prompts([random_prompt(lm, length)], length)
    run = jax.jit(functools.partial(model.prefill, config=lm.config), static_argnames="request")
    requests = {"none": StatsRequest(), "paper": needs(PAPER_SIGNALS), "all": needs(tuple(SIGNALS))}
    seconds = interleaved(
        {
            name: functools.partial(run, lm.params, tokens=tokens, length=lengths, request=request)
            for name, request in requests.items()
        },
        repeats,
    )
    return {
        f"prefill.s{length}.seconds": seconds["none"],
        "prefill.paper_signals_ratio": seconds["paper"] / seconds["none"],
        "prefill.signals_ratio": seconds["all"] / seconds["none"],
    }


def rollout_cost(
    lm: LanguageModel, trained: Trained, *, prompt: int = 512, samples: int = 8, horizon: int = 32, evict_every: int = 8,
    repeats: int = 5,
) -> Numbers:  # fmt: skip
    """The students of a training step over the decoding of as many sequences, token by token, from full caches.

    A rollout scores, draws keep-sets, evicts every `evict_every` tokens and gives the KL after every token; its students
    share the prompt's keys and values. What it is compared with does none of that and has a cache for each sequence.
    """
    policy = distilled(trained)
    cache = filled(lm, policy.needs, batch=1, slots=prompt, free=0, unrolled=False)
    teacher = jax.nn.log_softmax(jax.random.normal(jax.random.key(1), (horizon, lm.config.vocab_size)))
    roll = jax.jit(
        functools.partial(
            rollout.sample_students, config=lm.config, policy=policy, samples=samples, evict_every=evict_every,
            law="plackett_luce", minimum=budgets.MINIMUM, most=budgets.tokens_kept(0.25, prompt + horizon),
        )
    )  # fmt: skip
    continuation = jnp.asarray(random_prompt(lm, horizon))
    seconds = interleaved(
        {
            "rollout": lambda: roll(
                lm.params, policy_params=trained.params, cache=cache, continuation=continuation, teacher=teacher,
                ratio=jnp.float32(0.25), key=jax.random.key(2),
            ),
            "decode": Decoding(lm, None, batch=samples, slots=prompt + horizon, steps=horizon),
        },
        repeats,
    )  # fmt: skip
    return {
        "rollout.seconds": seconds["rollout"],
        "rollout.decode_seconds": seconds["decode"],
        "rollout.ratio": seconds["rollout"] / seconds["decode"],
    }


def generation_bytes(lm: LanguageModel, trained: Trained, length: int = 8000, new: int = 16) -> Numbers:
    """Bytes of keys and values that `generate` allocates at 25% on a long prompt, over those of the full cache."""
    result = generate(
        lm,
        [random_prompt(lm, length)],
        trained,
        0.25,
        max_new_tokens=new,
        temperature=0.0,
        top_p=1.0,
        seed=0,
        evict_every=16,
    )
    exact = (length + new) * lm.config.kv_bytes_per_token()
    return {
        f"generate.s{length}.cache_bytes": result.cache_bytes,
        f"generate.s{length}.full_cache_bytes": exact,
        f"generate.s{length}.cache_fraction": result.cache_bytes / exact,
        f"generate.s{length}.prefill_seconds": result.prefill_seconds,
    }
