"""ForesightKV: a learned scorer in every head evicts block by block; trained by `dcache.learn.foresight`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dcache import budget as budgets
from dcache import cache as kv
from dcache import model
from dcache.attention import EMPTY, Segment, StatsRequest, attend
from dcache.config import ModelConfig
from dcache.errors import ConfigError
from dcache.policies.base import Policy, later, recent, shaped, slot_positions, statistics

STATISTICS = 8
"""Attention statistics of a token per query head, after each block of queries (see `after_each_block`)."""

_NAME = "foresight"
_TAILS = (8, 16, 32)
_DECAY = 0.9
_TINY = 1e-6  # attention below it counts as none, before logarithms
_HIDDEN = 16

Keep = Callable[[Any, Array, Array, Array], tuple[Array, Any]]
"""(scores f32[L, B, K, S], competing bool[L, B, K, S], guarded bool[L, B, K, S], budget int32[L, B, K]) -> (keep, anything)."""


def after_each_block(
    q: Array, k: Array, position: Array, length: Array, block: int, sliding_window: int | None = None
) -> Array:
    """What each token has received once each block of queries is read, in one layer, from attention over the full cache.

    Block r ends at min((r + 1) * block, length). The last one of a prompt may be shorter than the others; its statistics are
    those of the prompt's last `block` queries nevertheless, so that all are of one size. A query that comes before a token
    gives it 0.

    Args:
      q: [B, S, N, H], rotated. k: [B, K, S, H]. position: int32[B, K, S]. length: int32[B].

    Returns:
      f32[R, B, N, S, 8], R = ceil(S / block): maximum, minimum and sum over the block; sums over its last 8, 16 and 32
      queries; the sum over all queries so far; the sum over all blocks so far, each new block multiplying it by 0.9.
    """
    batch, slots, heads, _ = q.shape
    back = jnp.arange(-block, 0, dtype=jnp.int32)[None]  # of a query, counted from the end of its block

    def one(carry, xs):
        total, decayed = carry
        start, end = xs
        at = end[:, None] + back  # [B, block]
        real, new = at >= 0, at >= start[:, None]
        queries = jnp.take_along_axis(q, jnp.maximum(at, 0)[:, :, None, None], axis=1)
        _, probs = attend(queries, [Segment(k, k)], jnp.where(real, at, EMPTY), position, sliding_window)

        def summed(which):
            return jnp.einsum("bnts,bt->bns", probs, which.astype(jnp.float32))

        here = real[:, None, :, None]
        fresh = summed(new)
        total = total + fresh
        # A prompt that has ended gets no further block.
        decayed = jnp.where(jnp.any(new, axis=1)[:, None, None], _DECAY * decayed + fresh, decayed)
        found = (
            jnp.max(jnp.where(here, probs, 0.0), axis=2), jnp.min(jnp.where(here, probs, 1.0), axis=2), summed(real),
            *(summed(real & (back >= -width)) for width in _TAILS), total, decayed,
        )  # fmt: skip
        return (total, decayed), jnp.stack(found, axis=-1)

    nothing = jnp.zeros((batch, heads, slots), jnp.float32)
    edges = jnp.minimum(block * jnp.arange(-(-slots // block) + 1, dtype=jnp.int32)[:, None], length[None])
    return jax.lax.scan(one, (nothing, nothing), (edges[:-1], edges[1:]))[1]


def look(
    params: model.Params, config: ModelConfig, cache: kv.Cache, block: int, function: Callable[..., Array], *others: Any
) -> Array:
    """Calls `function(statistics f32[R, B, N, S, 8], k, v, position, *others of the layer)` for every layer.

    Args:
      cache: of prompts right after the prefill, stacked, with `hidden`. others: pytrees with a leading axis L.

    Returns:
      What the function returns, with a leading axis L.
    """

    def one(xs):
        p, layer, hidden, own = xs
        q = model.queries(p, hidden, config)
        found = after_each_block(q, layer.k, layer.position, cache.length, block, config.sliding_window)
        return function(found, layer.k, layer.v, layer.position, *own)

    layers = kv.restrict(cache, StatsRequest()).layers
    return jax.lax.map(one, (params["layers"], layers, cache.hidden.swapaxes(0, 1), others))


def layer_scores(weights: Any, found: Array, k: Array, v: Array, position: Array, block: int) -> Array:
    """Scores of one layer's tokens after each block of queries, higher = keep: f32[R, B, K, S].

    Args:
      weights: of the layer, see `ForesightKV.init`. found: f32[R, B, N, S, 8]. k, v: [B, K, S, H].
      position: int32[B, K, S].
    """
    rounds, b, n, s, _ = found.shape
    heads = k.shape[1]
    kv_part = jnp.einsum("bksh,khf->bksf", _standard(k.astype(jnp.float32), position >= 0), weights["key"])
    kv_part += jnp.einsum("bksh,khf->bksf", _standard(v.astype(jnp.float32), position >= 0), weights["value"])
    kv_part += weights["bias"][None, :, None]

    def one(xs):
        block_found, end = xs
        logs = jnp.log(block_found + _TINY).reshape(b, heads, n // heads, s, STATISTICS)
        logs = logs.transpose(0, 1, 3, 2, 4).reshape(b, heads, s, -1)
        own = _standard(logs, (position >= 0) & (position < end))
        hidden = jax.nn.gelu(kv_part + jnp.einsum("bksf,kfo->bkso", own, weights["attention"]), approximate=False)
        return -jnp.einsum("bksf,kf->bks", hidden, weights["out"])

    return jax.lax.map(one, (found, block * jnp.arange(1, rounds + 1, dtype=jnp.int32)))


def _standard(x: Array, there: Array) -> Array:
    """f32[B, K, S, F] with zero mean and unit variance over a head's tokens; 0 where bool[B, K, S] says that there is none."""
    weight = there[..., None].astype(jnp.float32)
    count = jnp.maximum(jnp.sum(weight, axis=2, keepdims=True), 1.0)
    centred = (x - jnp.sum(x * weight, axis=2, keepdims=True) / count) * weight
    return centred * jax.lax.rsqrt(jnp.sum(centred**2, axis=2, keepdims=True) / count + _TINY)


def keep_best(scores: Array, competing: Array, guarded: Array, budget: Array) -> tuple[Array, None]:
    """Keeps the best scores (a `Keep`)."""
    return budgets.keep_top(scores, competing, budget, guarded), None


def replay(
    scores: Any, position: Array, came_later: Array, block: int, budget: Array, keep: Keep = keep_best
) -> tuple[Array, Any]:
    """Evicts block by block: after each, what is left and the new block compete for the budget.

    The newest min(block, budget // 4) tokens of each round stay, and in the last round what came after the prompt.

    Args:
      scores: f32[R, L, B, K, S], after each block of the prompt, higher = keep; or any pytree with leading axes R that `keep`
        takes in its place. position: int32[L, B, K, S]. came_later: bool[L, B, K, S]. budget: int32[B].
      keep: what decides in each round.

    Returns:
      Who stays, bool[L, B, K, S], and what `keep` returned beside, with a leading axis R.
    """
    prompt = (position >= 0) & ~came_later
    length = 1 + jnp.max(jnp.where(prompt, position, -1), axis=(0, 2, 3))
    newest = shaped(jnp.minimum(block, budget // 4), "head")
    allowed = jnp.broadcast_to(shaped(budget, "head"), position.shape[:-1])
    rounds = jax.tree.leaves(scores)[0].shape[0]

    def one(there, xs):
        score, end, last = xs
        competing = there & ((position < end) | last)
        recent = prompt & (position >= (shaped(jnp.minimum(end, length), "head") - newest)[..., None])
        kept, more = keep(score, competing, competing & (recent | came_later), allowed)
        return kept | there & ~competing, more

    ends = block * jnp.arange(1, rounds + 1, dtype=jnp.int32)
    return jax.lax.scan(one, position >= 0, (scores, ends, jnp.arange(rounds) == rounds - 1))


@dataclasses.dataclass(frozen=True)
class ForesightKV(Policy):
    """A scorer of its own in every head predicts which tokens later queries will not need. Dong et al., arXiv 2602.03203.

    The input is a token's key and value and eight attention statistics for each query head of its key/value head; one hidden
    layer of 16 with GELU. The method compresses while it decodes, every `block` tokens. Here a prompt is read with the full
    cache, and the evictions that would have happened on the way are replayed afterwards: the statistics are those of
    attention over all tokens, as in the method's labels, not over the survivors. That leaves them independent of the budget.
    They are recomputed from the prefill's hidden states, without a second pass through the network. Generated tokens stay.

    Choices where the authors' code has none or differs: logarithms of the statistics, and all inputs, are standardised over the
    head's tokens (the code defines a layer norm and does not use it); keys and values over the whole prompt. The
    most evictable go (the code samples among the most evictable at inference too). In its training code the decaying sum is
    multiplied by 0.9 at each block; its inference code replaces it by the plain sum, this one does not. The newest tokens that
    always stay are at most a quarter of the budget.

    Attributes:
      block: queries between two evictions (the paper: 256, for a budget of 1,024).
      shape: (layers, key/value heads, query heads of each, head dimension) of the model that the weights are for.
    """

    name = "foresightkv"
    summary = "learned scorer in every head, evicts block by block; trained on future attention, then by GRPO"
    paper = "arXiv 2602.03203"
    granularity = "head"
    learner = "dcache.learn.foresight"
    looks = True
    ranks = False

    block: int = 256
    shape: tuple[int, ...] = (30, 3, 3, 64)

    def __post_init__(self):
        if self.block < 1:
            raise ConfigError(f"foresightkv: block is {self.block}; evict after 1 or more tokens.")
        if len(self.shape) != 4 or min(self.shape) < 1:
            raise ConfigError(
                f"foresightkv: shape is {self.shape}; give (layers, key/value heads, query heads of each, head dimension)."
            )

    @property
    def needs(self):
        """Hidden states for its own look, and what it makes of them."""
        return StatsRequest(hidden=True, extra=(_NAME,))

    def init(self, key: Array) -> Any:
        """Fresh weights, float32, every leaf with leading axes L and K."""
        layers, heads, group, dim = self.shape
        inputs = {"key": dim, "value": dim, "attention": group * STATISTICS}
        width = sum(inputs.values())
        keys = dict(zip((*inputs, "out"), jax.random.split(key, len(inputs) + 1), strict=True))

        def normal(name: str, fan_in: int, *shape: int) -> Array:
            return jax.random.normal(keys[name], (layers, heads, *shape), jnp.float32) * fan_in**-0.5

        weights = {name: normal(name, width, size, _HIDDEN) for name, size in inputs.items()}
        return weights | {"bias": jnp.zeros((layers, heads, _HIDDEN)), "out": normal("out", _HIDDEN, _HIDDEN)}

    def check_model(self, config):
        """Raises ConfigError if the weights are for another model."""
        shape = (config.num_layers, config.num_kv_heads, config.group_size, config.head_dim)
        if self.shape != shape:
            raise ConfigError(
                f"This foresightkv is for a model of (layers, key/value heads, query heads of each, head dimension) "
                f"{self.shape}; the model has {shape}. Train one for it."
            )

    @property
    def offline(self):
        """It needs all of the prompt."""
        return "its features are of blocks of a whole prompt"

    def observe(self, weights, params, config, cache, tokens, continuation):
        """Scores every token after each block of the prompt."""
        del tokens, continuation
        self.check_model(config)

        def scored(found, k, v, position, own):
            scores = layer_scores(own, found, k, v, position, self.block)
            rounds, b, heads, s = scores.shape
            return scores.transpose(1, 2, 0, 3).reshape(b, heads * rounds, s)

        return kv.with_extra(cache, _NAME, look(params, config, cache, self.block, scored, weights))

    def rounds(self, cache: kv.Cache) -> Array:
        """Scores after each block, f32[R, L, B, K, S]; 0 for what came after the prompt."""
        stored = statistics(cache, lambda stats: stats.extra[_NAME])
        l, b, m, s = stored.shape
        heads = slot_positions(cache, "head").shape[2]
        stored = jnp.where(jnp.isinf(stored), 0.0, stored)
        return jnp.moveaxis(stored.reshape(l, b, heads, m // heads, s), 3, 0)

    def scores(self, params, cache, key):
        """Those after the last block."""
        del params, key
        return self.rounds(cache)[-1]

    def protects(self, cache, budget):
        """The newest tokens, and what came after the prompt; for policies around this one."""
        return recent(cache, "head", jnp.minimum(self.block, budget // 4)) | later(cache, _NAME, "head")

    def protected_tokens(self, budget):
        """At most a quarter of the budget."""
        return min(self.block, budget // 4)

    def decide(self, params, cache, budget, key, protected=None):
        """The evictions of all blocks, one after the other."""
        del params, key

        def keep(scores, competing, stays, allowed):
            more = False if protected is None else competing & protected
            return keep_best(scores, competing, stays | more, allowed)

        came_later = later(cache, _NAME, "head")
        return replay(self.rounds(cache), slot_positions(cache, "head"), came_later, self.block, budget, keep)[0]
