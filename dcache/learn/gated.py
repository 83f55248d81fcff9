"""The language model with a gate on every key/value head: `a * full attention + (1 - a) * local attention`.

RLKV (arXiv 2510.08525) trains the gates `a`. Here the model reads questions with several sampled answers each. A question and
all its answers are one row: the prompt, then each answer's tokens on a branch of its own, which sees the prompt and itself.
So the prompt is read once for all samples, when they are drawn and again when they are differentiated. Attention is dense:
it is meant for the short sequences of training.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dcache import model
from dcache.attention import EMPTY, visible
from dcache.config import ModelConfig

_MASKED = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """Keys and values of a batch of questions with branching answers.

    Attributes:
      k, v: [L, B, K, S, H]. position: int32[B, S], `EMPTY` where nothing is. branch: int32[B, S], 0 for the prompt.
    """

    k: Array
    v: Array
    position: Array
    branch: Array


def empty_tree(config: ModelConfig, batch: int, slots: int) -> Tree:
    """A tree that holds nothing."""
    k = jnp.zeros((config.num_layers, batch, config.num_kv_heads, slots, config.head_dim), config.dtype)
    nothing = jnp.full((batch, slots), EMPTY, jnp.int32)
    return Tree(k, k, nothing, nothing)


def gated_attention(q: Array, k: Array, v: Array, gate: Array, full: Array, local: Array) -> Array:
    """`a * full attention + (1 - a) * local attention` of every key/value head: [B, T, N, H].

    Args:
      q: [B, T, N, H]. k, v: [B, K, S, H]. gate: f32[K]. full, local: bool[B, T, S], what each of the two sees.
    """
    b, t, n, h = q.shape
    heads = k.shape[1]
    grouped, k32, v32 = (x.astype(jnp.float32) for x in (q.reshape(b, t, heads, n // heads, h), k, v))
    logits = jnp.einsum("btkgh,bksh->bkgts", grouped, k32) / math.sqrt(h)

    def softmax(seen: Array) -> Array:
        return jax.nn.softmax(jnp.where(seen[:, None, None], logits, _MASKED), axis=-1)

    a = gate[None, :, None, None, None]
    probs = a * softmax(full) + (1.0 - a) * softmax(local)  # the mixture of the outputs, since values enter linearly
    return jnp.einsum("bkgts,bksh->btkgh", probs, v32).reshape(b, t, n, h).astype(q.dtype)


def gated_extend(
    params: model.Params, config: ModelConfig, gates: Array, tree: Tree, tokens: Array, position: Array, branch: Array,
    at: Array, *, sinks: int, recent: int,
) -> tuple[Array, Tree]:  # fmt: skip
    """Feeds T tokens to every question; differentiable in the gates.

    Args:
      params: stacked. gates: f32[L, K]. position: int32[B, T], `EMPTY` for padding. branch: int32[B, T], the answer that a
        token belongs to, 0 for the prompt. at: int32 scalar, the first of the T slots that they take.
      sinks, recent: of local attention.

    Returns:
      Hidden states [B, T, D] of the last layer and the new tree.
    """
    where, origin = jax.lax.dynamic_update_slice, jnp.int32(0)
    slots = where(tree.position, position, (origin, at))
    branches = where(tree.branch, branch, (origin, at))
    full = visible(position, slots, config.sliding_window)
    full &= (branches == 0)[:, None] | (branches[:, None] == branch[..., None])
    local = full & ((slots < sinks)[:, None] | (slots[:, None] > position[..., None] - recent))

    # Attention is computed again on the way back: its probabilities are what grows with the square of the length.
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    def body(x, p, state):
        gate, k_all, v_all = state
        _, q, k, v = model.qkv(p, model.rms_norm(x, p["attn_norm"], config.norm_eps), position, config)
        k_all, v_all = (
            where(old, new.swapaxes(1, 2), (origin, origin, at, origin)) for old, new in ((k_all, k), (v_all, v))
        )
        return model.finish(p, x, gated_attention(q, k_all, v_all, gate, full, local), config), (k_all, v_all)

    x, (k, v) = model.run_layers(body, model.embed(params, tokens), params["layers"], (gates, tree.k, tree.v))
    return x, Tree(k, v, slots, branches)


def read_prompts(
    params: model.Params, config: ModelConfig, gates: Array, tree: Tree, tokens: Array, length: Array, *, sinks: int,
    recent: int,
) -> tuple[Array, Tree]:  # fmt: skip
    """The prompts int32[B, P] (padded on the right, int32[B] real tokens) into an empty tree: hidden [B, D] of the last one."""
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    position = jnp.where(index < length[:, None], index, EMPTY)
    hidden, tree = gated_extend(
        params,
        config,
        gates,
        tree,
        tokens,
        position,
        jnp.zeros_like(position),
        jnp.int32(0),
        sinks=sinks,
        recent=recent,
    )
    return jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)[:, 0], tree


def sample(
    params: model.Params, config: ModelConfig, gates: Array, tokens: Array, length: Array, key: Array, *, samples: int,
    horizon: int, sinks: int, recent: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Draws answers of the gated model at temperature 1.

    Args:
      tokens: int32[B, P], padded on the right. length: int32[B].

    Returns:
      Answers int32[B, A, T], which do not stop at an end-of-text token, and the log-probability of each token f32[B, A, T].
    """
    b, p = tokens.shape
    local: dict[str, Any] = {"sinks": sinks, "recent": recent}
    tree = empty_tree(config, b, p + samples * (horizon - 1))
    hidden, tree = read_prompts(params, config, gates, tree, tokens, length, **local)
    hidden = jnp.broadcast_to(hidden[:, None], (b, samples, hidden.shape[-1]))
    branch = jnp.broadcast_to(jnp.arange(1, samples + 1, dtype=jnp.int32)[None], (b, samples))

    def draw(hidden: Array, step: Array) -> tuple[Array, Array]:
        log_probs = jax.nn.log_softmax(model.unembed(params, hidden, config))
        token = jax.random.categorical(jax.random.fold_in(key, step), log_probs).astype(jnp.int32)
        return token, jnp.take_along_axis(log_probs, token[..., None], axis=-1)[..., 0]

    def one(carry, step):
        hidden, tree = carry
        token, log_prob = draw(hidden, step)
        position = jnp.broadcast_to((length + step)[:, None], (b, samples))
        hidden, tree = gated_extend(
            params, config, gates, tree, token, position, branch, p + step * samples, **local
        )  # fmt: skip
        return (hidden, tree), (token, log_prob)

    (hidden, _), (drawn, log_probs) = jax.lax.scan(one, (hidden, tree), jnp.arange(horizon - 1, dtype=jnp.int32))
    last, last_log_prob = draw(hidden, jnp.int32(horizon - 1))
    every = jnp.concatenate([drawn, last[None]]), jnp.concatenate([log_probs, last_log_prob[None]])
    return every[0].transpose(1, 2, 0), every[1].transpose(1, 2, 0)


def answer_log_probs(
    params: model.Params, config: ModelConfig, gates: Array, tokens: Array, length: Array, answers: Array, *, sinks: int,
    recent: int,
) -> Array:  # fmt: skip
    """Log-probabilities f32[A, T] of the answers int32[A, T] to one prompt int32[P]; differentiable in the gates f32[L, K]."""
    (a, t), p = answers.shape, tokens.shape[0]
    index, step = jnp.arange(p, dtype=jnp.int32), jnp.arange(t - 1, dtype=jnp.int32)
    position = jnp.concatenate([jnp.where(index < length, index, EMPTY), jnp.tile(length + step, a)])
    branch = jnp.concatenate([jnp.zeros_like(index), jnp.repeat(jnp.arange(1, a + 1, dtype=jnp.int32), t - 1)])
    row = jnp.concatenate([tokens, answers[:, :-1].reshape(-1)])
    tree = empty_tree(config, 1, row.shape[0])
    hidden, _ = gated_extend(
        params, config, gates, tree, row[None], position[None], branch[None], jnp.int32(0), sinks=sinks, recent=recent
    )
    before = jnp.broadcast_to(hidden[0, length - 1][None, None], (a, 1, hidden.shape[-1]))
    states = jnp.concatenate([before, hidden[0, p:].reshape(a, t - 1, -1)], axis=1)
    log_probs = jax.nn.log_softmax(model.unembed(params, states, config))
    return jnp.take_along_axis(log_probs, answers[..., None], axis=-1)[..., 0]
