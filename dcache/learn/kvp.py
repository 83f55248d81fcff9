"""KVP's learning: agents that rank a head's tokens, rewarded by the attention that the tokens receive later.

Moschella, Manduchi and Sener, arXiv 2602.10238. The language model runs once for each text, to make the traces
(`dcache.learn.traces`); training reads these only. One update takes one text and a prefix of n tokens. A token's importance
is the attention that the queries after the prefix give it. Each agent draws A rankings of the prefix, best first, from its
scores (Plackett-Luce). With b tokens kept, R_b is minus the importance of those ranked below b, and the reward of a ranking
is the sum over all b = 1 .. n - 1. The token of rank r (from 0) is below b for b = 1 .. r, hence

    R = sum_b R_b = -sum_r r * importance[token of rank r],

which costs a sort. The best ranking is by falling importance. R is negative and that of the best ranking, R*, is the least
negative: R / R* is 1 or more and grows as rankings get worse. The reward here is R / |R*|: at most -1, reached by the best
ranking, and higher is better.

An agent learns from its own reward only: gradients are clipped agent by agent, and AdamW acts on each weight by itself.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from dcache import cache as kv
from dcache import subset
from dcache.attention import EMPTY, Stats
from dcache.errors import ConfigError
from dcache.learn import learner, traces
from dcache.learn import policy_gradient as pg
from dcache.learn.blocks import training_prompts
from dcache.learn.state import LearnConfig, TrainState, advance, start
from dcache.policies.keydiff import KeyDiff
from dcache.policies.kvp import KVP

_TEXTS = 0  # Seed of the traces' texts. It is not the run's: runs of all seeds share one folder of traces.
_KEPT = 0.25  # At which the metrics look.


@dataclasses.dataclass(frozen=True)
class KvpConfig(LearnConfig):
    """Everything that the learning rule depends on, beside `LearnConfig`. Defaults are the paper's where it gives a value.

    Attributes:
      samples: A, rankings drawn per agent and update, at least 2. standardise: divide the advantages of an agent's rankings
        by their standard deviation.
      traces: number of texts. folder: where their traces are; "" for `traces` in the workdir. Runs may share a folder.
      horizon: tokens of each text that follow the prompt (an answer, or the text going on); with the prompt at most
        data.length. block: queries whose attention a trace adds up; prefixes are whole blocks.
    """

    steps: int = 4_000
    learning_rate: float = 5e-5
    warmup_steps: int = 100
    final_rate: float = 0.02
    clip_norm: float = 5.0
    samples: int = 8
    standardise: bool = True
    traces: int = 300
    folder: str = ""
    horizon: int = 16
    block: int = 64

    def __post_init__(self):
        super().__post_init__()
        if self.samples < 2:
            raise ConfigError(f"samples is {self.samples}; the leave-one-out baseline needs 2 or more rankings.")
        if self.traces < 1 or self.horizon < 0 or self.block < 1:
            raise ConfigError(
                f"traces is {self.traces}, horizon {self.horizon} and block {self.block}; give 1 or more texts, 0 or more "
                "tokens and 1 or more queries."
            )


def ranking_reward(importance: Array, order: Array) -> Array:
    """R / |R*|, at most -1 (see above); 0 if no order loses anything."""
    best = pg.ranking_cost(importance, jnp.argsort(-importance))
    # Rounding decides about what is far below a millionth of the worst.
    least = 1e-6 * importance.shape[0] * jnp.sum(importance) + 1e-20
    return -pg.ranking_cost(importance, order) / jnp.maximum(best, least)


def lost_share(importance: Array, scores: Array, filled: Array, kept: Array) -> Array:
    """Share of the importance that is lost if the `kept` (int32 scalar) tokens of the highest scores stay; all f32[S]."""
    order = jnp.argsort(jnp.where(filled, -scores, jnp.inf))
    lost = jnp.where(jnp.arange(scores.shape[0]) >= kept, importance[order], 0.0)
    return jnp.sum(lost) / jnp.maximum(jnp.sum(importance), 1e-20)


def clip_each(grads: Any, norm: float) -> Any:
    """Gradients whose leaves are f32[L, K, ...], those of each agent scaled down to a norm."""
    sizes = jax.vmap(jax.vmap(optax.tree.norm))(grads)
    factor = jnp.minimum(1.0, norm / jnp.maximum(sizes, 1e-20))
    return jax.tree.map(lambda g: g * factor.reshape(factor.shape + (1,) * (g.ndim - 2)), grads)


def train_step(
    state: TrainState, k: Array, v: Array, importance: Array, count: Array, key: Array, *, policy: KVP, config: KvpConfig
) -> tuple[TrainState, dict[str, Array]]:  # fmt: skip
    """One update of all agents on a prefix of one text.

    Args:
      state: donated. k, v: bf16[L, K, S, H]. importance: f32[L, K, S], 0 after the prefix. count: int32 scalar, its tokens.
      key: random key of the run; the step is folded in.

    Returns:
      The new state and metrics (f32 scalars, means over agents): reward; lost, lost_keydiff and lost_oracle (share of the
      importance that goes if a quarter is kept: by the agents' scores, by KeyDiff and at the least); grad_norm.
    """
    l, heads, slots, _ = k.shape
    index = jnp.arange(slots, dtype=jnp.int32)
    filled = index < count
    cache = kv.from_prompt(k[:, None], v[:, None], jnp.where(filled, index, EMPTY)[None], Stats(), None)
    scores, back = jax.vjp(lambda params: policy.scores(params, cache, key)[:, 0], state.params)  # [L, K, S]

    def over_agents(function):
        return jax.vmap(jax.vmap(function))

    def draw(key_, scores_):
        return subset.sample("plackett_luce", key_, scores_, filled, count, slots)

    def log_prob(scores_, order):
        return subset.log_prob("plackett_luce", scores_, order, filled, count, slots)

    keys = jax.random.split(jax.random.fold_in(key, state.step), (config.samples, l, heads))
    order = jax.vmap(over_agents(draw), in_axes=(0, None))(keys, scores)  # [A, L, K, S]
    reward = jax.vmap(over_agents(ranking_reward), in_axes=(None, 0))(importance, order)
    advantage = pg.leave_one_out(reward)
    if config.standardise:
        advantage = advantage / jnp.maximum(jnp.std(advantage, axis=0, keepdims=True), 1e-6)

    def loss(scores_):
        log_probs = jax.vmap(over_agents(log_prob), in_axes=(None, 0))(scores_, order)
        return pg.reinforce_loss(*(x.reshape(config.samples, -1) for x in (log_probs, advantage)))

    (grads,) = back(jax.grad(loss)(scores))
    # The optimiser's clipping would tie the agents together: it is given a norm that it never meets.
    unbound = dataclasses.replace(config, clip_norm=config.clip_norm * l * heads + 1.0)
    new = advance(state, clip_each(grads, config.clip_norm), unbound)

    kept = (_KEPT * count.astype(jnp.float32)).astype(jnp.int32)
    rankings = {"lost": scores, "lost_keydiff": KeyDiff().scores((), cache, key)[:, 0], "lost_oracle": importance}
    share = over_agents(lambda importance_, by: lost_share(importance_, by, filled, kept))
    lost = {name: jnp.mean(share(importance, by)) for name, by in rankings.items()}
    return new, {"reward": jnp.mean(reward), **lost, "grad_norm": optax.tree.norm(grads)}


Config = KvpConfig


class Learner(learner.Learner):
    """KVP in the training loop."""

    def __init__(self, experiment, workdir, load):
        """Checks that traces, policy and model fit; traces are collected when the first work is asked for."""
        learn, data = experiment.learn, experiment.data
        self.experiment = experiment
        lm: Any = load()
        experiment.policy.check_model(lm.config)
        if data.length > lm.config.max_positions or data.length % learn.block or data.length < 2 * learn.block:
            raise ConfigError(
                f"data.length is {data.length}; give two or more blocks (learn.block, {learn.block}) of tokens, in all at most "
                f"the {lm.config.max_positions} positions of {lm.name!r}."
            )
        texts = dataclasses.replace(data, length=data.length - learn.horizon)
        self._prompts, digest = training_prompts(texts, lm.tokenizer, learn.horizon, _TEXTS)
        self.model_info = {"name": lm.name, **dataclasses.asdict(lm.config)}
        self.identity = {"architecture": self.model_info, "training_text": digest}
        self.folder = Path(learn.folder or workdir / "traces")
        self._lm = lm

        def step(state, k, v, importance, count, key):
            return train_step(state, k, v, importance, count, key, policy=experiment.policy, config=learn)

        self.compiled = jax.jit(step, donate_argnums=0)

    def init(self, key):
        """Fresh weights from the policy."""
        return start(self.experiment.policy.init(key), self.experiment.learn)

    def collect(self, stopped) -> bool:
        """Makes the traces that are missing, then lets go of the language model; False if it was stopped."""
        learn, data = self.experiment.learn, self.experiment.data
        chosen = {name: getattr(data, name) for name in ("source", "retrieval", "held_out")}
        identity = {"texts": self.identity["training_text"], "data": chosen, "texts_seed": _TEXTS}
        done = traces.collect(
            self.folder, self._lm, self._prompts.__getitem__, learn.traces, length=data.length, horizon=learn.horizon,
            block=learn.block, identity=identity, stopped=stopped,
        )  # fmt: skip
        self._lm = None
        return done

    def work(self, step, stopped):
        """Each step's trace, all of them in an order of their own for each pass, and a prefix of it."""
        learn = self.experiment.learn
        if not self.collect(stopped):
            return
        while step < learn.steps and not stopped():
            yield self.prefix(step)
            step += 1

    def prefix(self, step: int) -> learner.Work:
        """The prefix of a step: a pure function of the seed and the step."""
        learn, seed = self.experiment.learn, self.experiment.seed
        turn, place = divmod(step, learn.traces)
        number = np.random.default_rng([seed, turn]).permutation(learn.traces)[place]
        trace = traces.read(traces.path_of(self.folder, int(number)))
        slots = trace.k.shape[2]
        blocks = (trace.length - 1) // learn.block  # at least one query must follow
        if not blocks:
            raise ConfigError(
                f"The text {trace.name!r} has {trace.length} tokens, no more than a block of {learn.block}; lower learn.block."
            )
        count = learn.block * int(np.random.default_rng([seed, step, 1]).integers(1, blocks + 1))
        width = slots if 2 * count > slots else -(-slots // 2)  # two sizes, each compiled once
        importance = np.zeros((*trace.k.shape[:2], width), np.float32)
        importance[..., :count] = trace.importance(count)
        data = (trace.k[:, :, :width], trace.v[:, :, :width], importance, np.int32(count))
        return learner.Work(f"{trace.name}@{count}", trace.kind, count, data)

    def update(self, state, work, key):
        """One compiled step."""
        return self.compiled(state, *work.data, key)
