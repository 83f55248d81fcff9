"""KVzip: what the model looks at when it is asked to repeat the context."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from dcache import cache as kv
from dcache import model
from dcache.attention import StatsRequest
from dcache.errors import ConfigError
from dcache.policies.base import (
    Policy,
    Scope,
    check_scope,
    later,
    most_shared,
    shared_counts,
    slot_positions,
    statistics,
)

_FIRST = "\n\nRepeat the previous context exactly."
_NEXT = "\n\nRepeat the part of the previous context exactly, starting with"
_LEAD = 8  # tokens of the part before, which the second instruction ends with
_QUERY_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class KVzip(Policy):
    """Maximum attention that a token receives while the model re-reads the context after a request to repeat it.

    Kim et al., arXiv 2505.23416. The context is repeated in parts of `part` tokens; the attention of a query is normalised
    over the sinks, the part, and what it has read of the repetition. A token's score is the maximum over all queries and
    over the query heads of its key/value head. One budget for all heads of all layers. Costs two to three times the
    prefill. Here everything in the prompt is context; kvpress leaves the opening of the chat template out of it.

    The fixed-shape cache gives every head as many slots as one head may need, which is all of them: `generate` reports that
    no memory is saved. `scope="head"` gives each head the same budget, and saves it.

    Attributes:
      scope: which heads share a budget: "model", "layer" or "head" (none). sinks: first tokens, which stay.
      part: tokens repeated at once.
      instructions: token ids of the two requests and of what the chat template puts before an answer; `bind` fills them in.
    """

    name = "kvzip"
    summary = "attention while repeating the context, one budget for all heads; reads the context twice"
    paper = "arXiv 2505.23416"
    granularity = "head"

    scope: Scope = "model"
    sinks: int = 4
    part: int = 2048
    instructions: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self):
        check_scope(self)
        if self.sinks < 0 or self.part < _LEAD:
            raise ConfigError(
                f"kvzip: sinks is {self.sinks} and part {self.part}; give sinks >= 0 and part >= {_LEAD}."
            )

    def bind(self, tokenizer):
        """Encodes the instructions, unless they were given."""
        if self.instructions:
            return self
        # What the chat template puts after any message: the ids that two different ones have in common at their ends.
        one, other = (tokenizer.chat(text).tolist() for text in ("0", "1"))
        same = 0
        while same < min(len(one), len(other)) and one[-1 - same] == other[-1 - same]:
            same += 1
        opening = one[len(one) - same :] or tokenizer.encode("\n").tolist()
        first, following = (tokenizer.encode(text).tolist() for text in (_FIRST, _NEXT))
        return dataclasses.replace(self, instructions=(tuple(first), tuple(following), tuple(opening)))

    @property
    def needs(self):
        """Its own second reading."""
        return StatsRequest(extra=("reread",))

    @property
    def offline(self):
        """It needs all of the prompt."""
        return "it reads the whole prompt a second time"

    def observe(self, weights, params, config, cache, tokens, continuation):
        """Re-reads the context part by part."""
        del weights, continuation
        if not self.instructions:
            raise ConfigError("kvzip was not given its instructions; call policy.bind(tokenizer) first.")
        slots = tokens.shape[1]
        bare = kv.restrict(cache, StatsRequest())
        score = jnp.zeros((config.num_layers, tokens.shape[0], config.num_heads, slots), jnp.float32)
        for start in range(0, slots, self.part):
            score = jnp.maximum(score, self._repeat(params, config, bare, tokens, start, min(self.part, slots - start)))
        return kv.with_extra(cache, "reread", score)

    def _repeat(self, params, config, cache: kv.Cache, tokens: Array, start: int, size: int) -> Array:
        """f32[L, B, N, S]: scores of the slots from `start` on, 0 elsewhere."""
        batch, slots = tokens.shape
        first, following, opening = (jnp.asarray(ids, jnp.int32) for ids in self.instructions)
        request = [first] if start == 0 else [following, tokens[:, start - _LEAD : start]]
        asked = [jnp.broadcast_to(x, (batch, x.shape[-1])) for x in (*request, opening)]
        fed = jnp.concatenate([*asked, tokens[:, start : start + size]], axis=1)
        count = fed.shape[1]
        blocks = -(-count // _QUERY_BLOCK)
        fed = jnp.pad(fed, ((0, 0), (0, blocks * _QUERY_BLOCK - count)))
        # A query that repeats padding counts for nothing.
        index = jnp.arange(blocks * _QUERY_BLOCK, dtype=jnp.int32)
        real = (index[None] < count - size + jnp.clip(cache.length - start, 0, size)[:, None]) & (index[None] < count)
        grown = kv.grow(cache, blocks * _QUERY_BLOCK)
        slot = jnp.arange(slots + blocks * _QUERY_BLOCK, dtype=jnp.int32)
        counted = (slot < self.sinks) | (slot >= start) & (slot < start + size) | (slot >= slots)

        def block(carry, xs):
            cache, best = carry
            tokens_b, real_b, at = xs

            def peak(probs, position):
                del position
                probs = jnp.where(counted[None, None, None], probs, 0.0)
                share = probs / jnp.maximum(jnp.sum(probs, axis=-1, keepdims=True), 1e-30)
                return jnp.max(jnp.where(real_b[:, None, :, None], share[..., :slots], 0.0), axis=2)

            _, cache, seen = model.extend_watched(params, config, tokens_b, cache, at, peak)
            return (cache, jnp.maximum(best, seen)), None

        best = jnp.zeros((config.num_layers, batch, config.num_heads, slots), jnp.float32)
        xs = (
            fed.reshape(batch, blocks, _QUERY_BLOCK).swapaxes(0, 1),
            real.reshape(batch, blocks, _QUERY_BLOCK).swapaxes(0, 1),
            slots + _QUERY_BLOCK * jnp.arange(blocks, dtype=jnp.int32),
        )
        (_, best), _ = jax.lax.scan(block, (grown, best), xs)
        return jnp.where(((slot[:slots] >= start) & (slot[:slots] < start + size))[None, None, None], best, 0.0)

    def scores(self, params, cache, key):
        """Maximum attention over the query heads of each key/value head."""
        del params, key
        reread = statistics(cache, lambda stats: stats.extra["reread"])
        reread = jnp.where(jnp.isinf(reread), 0.0, reread)
        l, b, n, s = reread.shape
        heads = slot_positions(cache, "head").shape[2]
        return jnp.max(reread.reshape(l, b, heads, n // heads, s), axis=3)

    def protects(self, cache, budget):
        """The sinks, and what came after the prompt."""
        del budget
        position = slot_positions(cache, "head")
        return (position >= 0) & (position < self.sinks) | later(cache, "reread", "head")

    def protected_tokens(self, budget):
        """The sinks."""
        del budget
        return self.sinks

    def allocate(self, params, cache, scores, filled, budget, protected):
        """By the scores of all heads together."""
        equal = super().allocate(params, cache, scores, filled, budget, protected)
        return equal if self.scope == "head" else shared_counts(scores, filled, equal, protected, self.scope)

    def most_kept(self, budget, seen, config):
        """All of them, if the others keep little."""
        return most_shared(budget, seen, config, self.scope)
