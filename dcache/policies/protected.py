"""Protection around another policy: tokens that stay whatever their scores."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from dcache import budget as budgets
from dcache import cache as kv
from dcache import signals
from dcache.attention import StatsRequest
from dcache.errors import ConfigError
from dcache.policies.base import Policy, recent, shaped, slot_positions, statistics
from dcache.policies.wrapper import Wrapper

_CHAT = "chat"  # in `Stats.extra`: 1 for a token of the chat template
_FROM_END = "from_end"  # in `Stats.extra`: tokens of the prompt that come after this one


@dataclasses.dataclass(frozen=True)
class Protected(Wrapper):
    """What the policy inside protects, and the first, the last, the chat template's and the prompt's outermost tokens.

    Where not all of it fits into the budget, the first, the last and the prompt's outermost tokens come before the chat
    template's, and those before what the policy inside protects; of the kind that is cut the most recent tokens stay.
    Where layers get unequal budgets, each gets at least what is protected (`pyramid` and CAKE fall less then).

    Attributes:
      base: the policy inside.
      first: tokens at the beginning. last: most recently seen tokens, which move on while decoding.
      boundaries: tokens at either end of the prompt; they stay while decoding, although newer tokens come.
      chat: protect the prompt's special tokens, and the role names and line breaks with which the chat template follows
        them. (Of a template without special tokens nothing is recognised, nor are tokens that come after the prompt.)
      markers: sequences of token ids that the chat template inserts; `bind` fills them in.
    """

    name = "protected"
    summary = "another policy (SnapKV), with first, last, template and prompt-end tokens protected"
    paper = "-"

    first: int = 0
    last: int = 0
    boundaries: int = 0
    chat: bool = False
    markers: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self):
        super().__post_init__()
        if min(self.first, self.last, self.boundaries) < 0:
            raise ConfigError(
                f"protected: first is {self.first}, last {self.last} and boundaries {self.boundaries}; give 0 or more tokens."
            )

    @property
    def needs(self):
        """What the policy inside needs, and the prompt's own marks."""
        names = (*((_CHAT,) if self.chat else ()), *((_FROM_END,) if self.boundaries else ()))
        return self.base.needs | StatsRequest(extra=names)

    def bind(self, tokenizer):
        """Finds out what the chat template inserts."""
        bound = super().bind(tokenizer)
        if not self.chat or self.markers is not None:
            return bound
        return dataclasses.replace(bound, markers=template_markers(tokenizer))

    def protected_tokens(self, budget):
        """Those that are known beforehand: at most so many while decoding, when the last tokens have left the prompt."""
        return max(max(self.first, self.boundaries) + self.boundaries + self.last, self.base.protected_tokens(budget))

    def fit(self, budget):
        """Refuses a budget that cannot hold what is protected; fits the policy inside."""
        Policy.fit(self, budget)
        return super().fit(budget)

    @property
    def offline(self):
        """Marks of the prompt's ends and of the chat template need all of the prompt."""
        return "what it marks depends on the whole prompt" if self.boundaries or self.chat else super().offline

    def observe(self, weights, params, config, cache, tokens, continuation):
        """Marks the tokens of the chat template, and how far each token is from the end of the prompt."""
        cache = super().observe(weights, params, config, cache, tokens, continuation)
        position = kv.positions(cache)
        if self.chat:
            if self.markers is None:
                raise ConfigError("protected was not told the chat template; call policy.bind(tokenizer) first.")
            marks = occurrences(tokens, self.markers).astype(jnp.float32)
            cache = kv.with_extra(cache, _CHAT, jnp.broadcast_to(marks[None, :, None], position.shape))
        if self.boundaries:
            after = cache.length[None, :, None, None] - 1 - position
            cache = kv.with_extra(cache, _FROM_END, after.astype(jnp.float32))
        return cache

    def protects(self, cache, budget):
        """All of it, as far as the budget goes."""
        inside = self.base.protects(cache, budget)
        if not (self.first or self.last or self.boundaries or self.chat):
            return inside
        position = slot_positions(cache, self.granularity)
        marks = (position < self.first) | recent(cache, self.granularity, jnp.full_like(cache.length, self.last))
        if self.boundaries:
            after = self._noted(cache, _FROM_END)
            marks |= (after < self.boundaries) | (position < self.boundaries) & jnp.isfinite(after)
        marks &= position >= 0
        chat = self._noted(cache, _CHAT) == 1.0 if self.chat else None
        for more in (chat, inside):
            if more is not None:
                room = shaped(budget, self.granularity) - jnp.sum(marks, axis=-1, dtype=jnp.int32)
                others = more & ~marks & (position >= 0)
                marks |= budgets.keep_top(position.astype(jnp.float32), others, room)
        return marks

    def _noted(self, cache, name: str) -> Array:
        """What `observe` wrote, in the shape of the scores; infinite for later tokens."""
        return signals.positions_of(statistics(cache, lambda stats: stats.extra[name]), self.granularity)

    def decide(self, params, cache, budget, key, protected=None):
        """As the policy inside does, with more tokens protected."""
        protected = self.protects(cache, budget) if protected is None else protected
        return self.base.decide(params, cache, budget, key, protected)


def template_markers(tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Sequences of ids that a chat template inserts: its special tokens, each alone and with the text that follows it."""
    letter = tokenizer.encode("a").tolist()
    bare = tokenizer.decode(letter * 2)

    def special(token: int) -> bool:
        return tokenizer.decode([*letter, token, *letter]) == bare

    # The same conversation with two contents: ids that differ are content, the others the template's.
    one, other = (_conversation(tokenizer, content) for content in ("0", "1"))
    ends = [*tokenizer.eos_ids, *(() if tokenizer.bos_id is None else (tokenizer.bos_id,))]
    found: list[list[int]] = [[int(token)] for token in ends]
    inside = False
    for token, same in zip(one, other, strict=False):
        if token != same:
            inside = False
        elif special(token):
            found += [[token], [token]]
            inside = True
        elif inside:
            found[-1].append(token)
    return tuple(sorted({tuple(marker) for marker in found}))


def _conversation(tokenizer: Any, content: str) -> list[int]:
    """A conversation of as many roles as the template takes."""
    turns = [{"role": role, "content": content} for role in ("system", "user", "assistant", "user")]
    try:
        return tokenizer.chat(turns).tolist()
    except ConfigError:  # some templates know no system message
        return tokenizer.chat(turns[1:]).tolist()


def occurrences(tokens: Array, markers: tuple[tuple[int, ...], ...]) -> Array:
    """Which tokens of int32[B, S] belong to an occurrence of a marker: bool[B, S]."""
    found = jnp.zeros(tokens.shape, bool)
    slots = tokens.shape[1]
    for marker in markers:
        if len(marker) > slots:
            continue
        starts = jnp.ones((tokens.shape[0], slots - len(marker) + 1), bool)
        for i, token in enumerate(marker):
            starts &= tokens[:, i : i + starts.shape[1]] == token
        for i in range(len(marker)):
            found |= jnp.pad(starts, ((0, 0), (i, len(marker) - 1 - i)))
    return found
