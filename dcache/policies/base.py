"""The policy seam: what every eviction method declares, and how its scores become a keep-set."""

import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from dcache import budget as budgets
from dcache import cache as kv
from dcache import model, signals
from dcache.attention import Segment, Stats, StatsRequest
from dcache.config import ModelConfig
from dcache.errors import BudgetError, ConfigError


@dataclasses.dataclass(frozen=True)
class Policy:
    """An eviction method: frozen and hashable (a static argument of jitted functions), its weights passed in.

    A subclass sets the class attributes and overrides `scores`, and whatever else it needs.

    Attributes:
      name: short name in the registry. summary: one line. paper: title or arXiv number.
      granularity: "sequence" (one keep-set for all), "layer" or "head" (key/value head).
      learner: of a learned policy, the module that trains it (see `dcache.learn.learner`); it also defines `init(key)`.
      looks: whether `observe` depends on the policy's weights; one evaluation then holds one trained policy of its kind.
      ranks: whether the tokens that stay are those of the best scores, protected ones first: whether `decide` is the one below.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    granularity: ClassVar[signals.Granularity] = "sequence"
    learner: ClassVar[str] = ""
    looks: ClassVar[bool] = False
    ranks: ClassVar[bool] = True

    @property
    def needs(self) -> StatsRequest:
        """The attention statistics that `scores` reads; nothing else is computed."""
        return StatsRequest()

    @property
    def offline(self) -> str:
        """Why the method cannot evict while a prompt is read in chunks (`dcache.chunked`); "" if it can."""
        return ""

    def bind(self, tokenizer: Any) -> "Policy":
        """The policy with every setting that depends on the model's tokenizer filled in."""
        del tokenizer
        return self

    def check_model(self, config: ModelConfig) -> None:
        """Raises ConfigError if the policy's weights do not fit a model of this shape."""

    def observe(
        self, weights: Any, params: model.Params, config: ModelConfig, cache: kv.Cache, tokens: Array,
        continuation: Array | None,
    ) -> kv.Cache:  # fmt: skip
        """Passes of its own that a method makes over the model after the prefill; most make none.

        Args:
          weights: of a trained policy, () for others. params: the language model's, stacked.
          cache: of the prompts, full, stacked, slot t holding token t.
          tokens: int32[B, S], the prompts, padded on the right. continuation: int32[B, T], the text that will follow (`EMPTY`
            after its end) where it is known, or None; only the oracle looks at it.

        Returns:
          The cache with the method's own statistics in `Stats.extra`.
        """
        del weights, params, config, tokens, continuation
        return cache

    def scores(self, params: Any, cache: kv.Cache, key: Array) -> Array:
        """Scores of all slots, higher = keep.

        Args:
          params: weights of a trained policy, () for others. cache: with the statistics that `needs` asks for.
          key: a random key; most policies ignore it.

        Returns:
          f32[B, S], f32[L, B, S] or f32[L, B, K, S], by granularity. Empty slots may hold anything finite.
        """
        raise NotImplementedError(f"{type(self).__name__} must define scores().")

    def scores_at(self, params: Any, cache: kv.Cache, budget: Array, key: Array) -> Array:
        """`scores` of a method whose ranking depends on the budget (int32[B]); most do not look at it."""
        del budget
        return self.scores(params, cache, key)

    def protects(self, cache: kv.Cache, budget: Array) -> Array | None:
        """bool of the shape of the scores: slots that stay whatever their score; None for none. budget: int32[B]."""
        del cache, budget
        return None

    def protected_tokens(self, budget: int) -> int:
        """How many tokens `protects` marks under a budget, so that a budget too small for them can be refused."""
        del budget
        return 0

    def allowance(self, budget: Array, seen: Array) -> Array:
        """How many tokens the method keeps of `seen` (int32[B]) under a budget (int32[B])."""
        del seen
        return budget

    def allocate(
        self, params: Any, cache: kv.Cache, scores: Array, filled: Array, budget: Array, protected: Array | None
    ) -> Array:  # fmt: skip
        """How many tokens each keep-set gets: by default the budget, for every layer and head.

        Args:
          params: weights of a trained policy, () for others. cache, scores: what `scores` was given and returned.
          filled: bool[..., S]. budget: int32[B]. protected: bool[..., S] or None.

        Returns:
          int32[...] of the shape of the scores without their last axis.
        """
        del params, cache, filled, protected
        return jnp.broadcast_to(shaped(budget, self.granularity), scores.shape[:-1])

    def decide(
        self, params: Any, cache: kv.Cache, budget: Array, key: Array, protected: Array | None = None
    ) -> Array:  # fmt: skip
        """Which slots stay, bool of the shape of the scores: the best of each keep-set's share, protected ones first.

        Args:
          budget: int32[B], tokens per keep-set (on average, if the policy allocates unequally).
          protected: bool of the shape of the scores, what is protected in place of what `protects` says; None for that.
        """
        scores = self.scores_at(params, cache, budget, key).astype(jnp.float32)
        mask = signals.filled(cache, self.granularity)
        protected = self.protects(cache, budget) if protected is None else protected
        allowed = self.allocate(params, cache, scores, mask, self.allowance(budget, cache.length), protected)
        return budgets.keep_top(scores, mask, allowed, protected)

    def most_kept(self, budget: int, seen: int, config: ModelConfig) -> int:
        """Upper bound of what `allocate` gives any one head of `seen` tokens, so that its slots can be allocated."""
        del config
        return min(budget, seen)

    def fit(self, budget: int) -> "Policy":
        """The policy with every setting that depends on the budget (in tokens) filled in.

        Raises:
          BudgetError: the budget is smaller than what the method protects.
        """
        protected = self.protected_tokens(budget)
        if protected > budget:
            raise BudgetError(
                f"{self.name} always keeps {protected} tokens, more than the budget of {budget}; "
                "raise the budget or lower the method's own settings."
            )
        return self


def check_granularity(policy: Policy) -> None:
    """Raises ConfigError if a policy's granularity is unknown."""
    if policy.granularity not in signals.GRANULARITIES:
        raise ConfigError(
            f"{policy.name}: granularity is {policy.granularity!r}; use one of {', '.join(signals.GRANULARITIES)}."
        )


def shaped(x: Array, granularity: str) -> Array:
    """[B] -> the shape that broadcasts against scores without their last axis: [B], [1, B] or [1, B, 1]."""
    if granularity == "sequence":
        return x
    return x[None] if granularity == "layer" else x[None, :, None]


def slot_positions(cache: kv.Cache, granularity: signals.Granularity) -> Array:
    """int32 positions of the slots in the shape of the scores: [B, S], [L, B, S] or [L, B, K, S]."""
    return signals.positions_of(kv.positions(cache), granularity)


def recent(cache: kv.Cache, granularity: signals.Granularity, count: Array) -> Array:
    """bool in the shape of the scores: the `count` (int32[B]) most recently seen tokens that are still there."""
    first = shaped(cache.length - count, granularity)[..., None]
    position = slot_positions(cache, granularity)
    return (position >= first) & (position >= 0)


def spread(x: Array, cache: kv.Cache, granularity: str) -> Array:
    """Scores or masks of any granularity as [L, B, K, S]."""
    l, b, k, s = kv.positions(cache).shape
    if granularity == "sequence":
        x = x[None, :, None]
    elif granularity == "layer":
        x = x[:, :, None]
    return jnp.broadcast_to(x, (l, b, k, s))


def keep_set(policy: Policy, params: Any, cache: kv.Cache, budget: Array, key: Array) -> Array:
    """Which slots the policy keeps: bool[L, B, K, S].

    At most `budget` (int32[B]) per sequence, on average over layers and heads if the policy allocates unequally.
    """
    return spread(policy.decide(params, cache, budget, key), cache, policy.granularity)


def read(
    policy: Policy, weights: Any, params: model.Params, config: ModelConfig, tokens: Array, length: Array,
    continuation: Array | None = None,
) -> tuple[Array, kv.Cache]:  # fmt: skip
    """Reads prompts as a policy needs it: hidden states [B, S, D] and the cache with all that its scores look at.

    Args:
      tokens: int32[B, S], padded on the right. length: int32[B]. continuation: see `Policy.observe`.
    """
    hidden, cache = model.prefill(params, config, tokens, length, policy.needs)
    cache = policy.observe(weights, params, config, cache, tokens, continuation)
    return hidden, dataclasses.replace(cache, hidden=None)


Scope = Literal["head", "layer", "model"]
"""Whose tokens compete for one budget: those of a key/value head, of a layer's heads, or of all heads of the model."""


def check_scope(policy: Any) -> None:
    """Raises ConfigError if a policy's scope is unknown, or is one that its granularity does not have."""
    scopes = typing.get_args(Scope)
    if policy.scope not in scopes:
        raise ConfigError(f"{policy.name}: scope is {policy.scope!r}; use one of {', '.join(scopes)}.")
    if policy.scope != "head" and policy.granularity != "head":
        raise ConfigError(
            f"{policy.name}: scope is {policy.scope!r} with granularity {policy.granularity!r}; budgets are shared among "
            "heads by policies of granularity 'head'."
        )


def pooled(x: Array, scope: Scope) -> Array:
    """What competes for one budget on the last axis: any shape -> itself, [L, B, K, S] -> [L, B, K * S] or [B, L * K * S]."""
    if scope == "head":
        return x
    l, b, k, s = x.shape
    if scope == "layer":
        return x.reshape(l, b, k * s)
    return x.transpose(1, 0, 2, 3).reshape(b, l * k * s)


def unpooled(x: Array, shape: Sequence[int], scope: Scope) -> Array:
    """The inverse of `pooled`; shape: what it was given."""
    if scope == "model":
        l, b, k, s = shape
        return x.reshape(b, l, k, s).transpose(1, 0, 2, 3)
    return x.reshape(shape)


def pooled_budget(budget: Array, scope: Scope) -> Array:
    """Tokens of each budget that `pooled` makes: int32[L, B, K] -> [L, B, K], [L, B] or [B]."""
    if scope == "model":
        return jnp.sum(budget, axis=(0, 2))
    return jnp.sum(budget, axis=2) if scope == "layer" else budget


def shared_counts(scores: Array, filled: Array, budget: Array, safe: Array | None, scope: Scope) -> Array:
    """Tokens of each head among the best of all that share its budget: int32[L, B, K].

    Args:
      scores: f32[L, B, K, S]. filled: bool[L, B, K, S]. budget: int32[L, B, K], each head's before they share.
      safe: bool[L, B, K, S] or None, tokens that stay in any case.
    """
    guarded = None if safe is None else pooled(safe, scope)
    best = budgets.keep_top(pooled(scores, scope), pooled(filled, scope), pooled_budget(budget, scope), guarded)
    return jnp.sum(unpooled(best, scores.shape, scope), axis=-1, dtype=jnp.int32)


def most_capped(budget: int, cap: float) -> int:
    """Most tokens of one head under a cap, a multiple of the budget."""
    return int(cap * budget + 1e-4)


def best_of_each(scores: Array, filled: Array, budget: Array, protected: Array | None, cap: float) -> Array:
    """bool[L, B, K, S]: the best tokens of each head, as many as `cap` allows, a multiple of the budget (int32[B])."""
    most = jnp.floor(cap * budget.astype(jnp.float32) + 1e-4).astype(jnp.int32)
    return budgets.keep_top(scores, filled, jnp.broadcast_to(shaped(most, "head"), filled.shape[:-1]), protected)


def check_cap(policy: Any, shares: bool) -> None:
    """Raises ConfigError if a policy's cap is below 1, or is set though its heads share no budget."""
    if policy.cap and (policy.cap < 1.0 or not shares):
        raise ConfigError(
            f"{policy.name}: cap is {policy.cap}; give a multiple of 1 or more where heads of all layers share a budget, or 0."
        )


def floored_counts(
    scores: Array, filled: Array, budget: Array, protected: Array | None, floor: float, scope: Scope
) -> Array:  # fmt: skip
    """`shared_counts` of which every head gets `floor` (a share) of its own budget and what is protected in any case."""
    least = jnp.floor(floor * budget.astype(jnp.float32) + 1e-4).astype(jnp.int32)
    safe = budgets.keep_top(scores, filled, least, protected)
    if protected is not None:
        safe |= protected & filled
    return shared_counts(scores, filled, budget, safe, scope)


def most_shared(budget: int, seen: int, config: ModelConfig, scope: Scope) -> int:
    """Upper bound of the tokens of one head where heads share budgets: all of them, if the others keep none."""
    return min(seen, _sharing(config, scope) * budget)


def most_floored(budget: int, most: int, seen: int, config: ModelConfig, scope: Scope, floor: float) -> int:
    """Upper bound of `floored_counts`: what the floors of the others leave; most: of one head before they share."""
    if most > budget:  # heads of unequal shares: the floors of the others may be smaller
        return most_shared(most, seen, config, scope)
    least = int(floor * min(budget, seen) + 1e-4)
    return min(seen, _sharing(config, scope) * budget - (_sharing(config, scope) - 1) * least)


def _sharing(config: ModelConfig, scope: Scope) -> int:
    """How many heads share a budget."""
    return {"model": config.num_layers * config.num_kv_heads, "layer": config.num_kv_heads, "head": 1}[scope]


def most_marked(mask: Array) -> Array:
    """The most marks of any layer or head: bool[L, B, S] or [L, B, K, S] -> int32[B]."""
    counts = jnp.sum(mask, axis=-1, dtype=jnp.int32)
    return jnp.max(counts.reshape(*counts.shape[:2], -1), axis=(0, 2))


def averaged(scores: Array, granularity: str) -> Array:
    """Per-head scores f32[L, B, K, S] averaged down to a granularity."""
    if granularity == "sequence":
        return jnp.mean(scores, axis=(0, 2))
    return jnp.mean(scores, axis=2) if granularity == "layer" else scores


def per_kv_head(x: Array, cache: kv.Cache) -> Array:
    """Mean over the query heads of each key/value head: [L, B, N, S] -> [L, B, K, S] (what kvpress does under GQA)."""
    l, b, n, s = x.shape
    k = kv.positions(cache).shape[2]
    return jnp.mean(x.reshape(l, b, k, n // k, s), axis=3)


def statistics(cache: kv.Cache, read: Callable[[Stats], Array]) -> Array:
    """One attention statistic of all layers, for instance `lambda stats: stats.mass`: f32[L, B, N, S]."""
    return kv.by_layer(cache, lambda layer: read(layer.stats))


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """A policy together with its weights."""

    policy: Policy
    params: Any


def later(cache: kv.Cache, name: str, granularity: signals.Granularity) -> Array:
    """bool in the shape of the scores: tokens that came after a policy put its own statistic into `Stats.extra`."""
    marked = jnp.isinf(statistics(cache, lambda stats: stats.extra[name]))
    l, b, n, s = marked.shape
    k = kv.positions(cache).shape[2]
    per_head = jnp.any(marked.reshape(l, b, k, n // k, s), axis=3)
    per = {"sequence": per_head[0, :, 0], "layer": per_head[:, :, 0], "head": per_head}[granularity]
    return per & signals.filled(cache, granularity)


def per_token(cache: kv.Cache, function: Callable[..., Array], *others: Any, positions: bool = False) -> Array:
    """A function of each token's key and value, read where they lie: f32[L, B, K, S].

    Args:
      function: (k [B or 1, K, S', H], v, *others of the layer) -> f32[B or 1, K, S']; a shared prompt is read once for all
        sequences. others: arrays, or trees of them, with a leading axis L.
      positions: the function gets int32[B or 1, K, S'] after v, the position of each token. In a shared prompt it is that of
        any sequence which still has the token.
    """

    def one(state) -> Array:
        k, v, position, prompt, extra = state
        shared_slots = 0 if prompt is None else prompt.k.shape[2]
        own = function(k, v, *([position[..., shared_slots:]] if positions else []), *extra)
        if prompt is None:
            return own
        anyone = jnp.max(position[..., :shared_slots], axis=0, keepdims=True)
        shared = function(prompt.k, prompt.v, *([anyone] if positions else []), *extra)
        return jnp.concatenate([jnp.broadcast_to(shared, (own.shape[0], *shared.shape[1:])), own], axis=-1)

    if isinstance(cache.layers, tuple):
        layers = enumerate(cache.layers)
        return jnp.stack(
            [
                one((at.k, at.v, at.position, _prompt_of(cache, i), jax.tree.map(lambda x, i=i: x[i], others)))
                for i, at in layers
            ]
        )
    return jax.lax.map(one, (cache.layers.k, cache.layers.v, cache.layers.position, cache.prompt, others))


def in_order(cache: kv.Cache, function: Callable[[Array, Array, Array], Array]) -> Array:
    """A function of each head's tokens in the order of their positions: f32[L, B, K, S].

    Args:
      function: (k f32[S, H], v f32[S, H], count int32 scalar) -> f32[S]; the `count` tokens come first, oldest first.
    """

    def one(k: Array, v: Array, position: Array) -> Array:
        order = jnp.argsort(jnp.where(position >= 0, position, jnp.iinfo(jnp.int32).max))
        value = function(k[order].astype(jnp.float32), v[order].astype(jnp.float32), jnp.sum(position >= 0))
        return jnp.zeros_like(value).at[order].set(value)

    def all_heads(state) -> Array:
        layer, prompt = state

        def whole(shared: Array | None, own: Array) -> Array:
            if shared is None:
                return own
            return jnp.concatenate([jnp.broadcast_to(shared, (own.shape[0], *shared.shape[1:])), own], axis=2)

        k = whole(None if prompt is None else prompt.k, layer.k)
        v = whole(None if prompt is None else prompt.v, layer.v)
        return jax.vmap(jax.vmap(one))(k, v, layer.position)

    if isinstance(cache.layers, tuple):
        return jnp.stack([all_heads((layer, _prompt_of(cache, i))) for i, layer in enumerate(cache.layers)])
    bare = kv.restrict(cache, StatsRequest())
    return jax.lax.map(all_heads, (bare.layers, bare.prompt))


def _prompt_of(cache: kv.Cache, layer: int) -> Segment | None:
    return None if cache.prompt is None else Segment(cache.prompt.k[layer], cache.prompt.v[layer])
