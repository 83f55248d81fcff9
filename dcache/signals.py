"""Per-token signals: what a policy may know about a cached token, computed from the cache and its attention statistics.

The first five are DistillCache's (arXiv 2608.08878, section 3); the others cost nothing extra. A signal has up to three
granularities: "sequence" (one value per token, averaged over heads and layers), "layer" and "head" (key/value head). Those of
`SEQUENCE_ONLY` mix layers, so they describe a token only where all layers and heads hold the same tokens.

| name            | definition |
|-----------------|------------|
| `alpha`         | attention mass received, divided by the number of queries that could see the token |
| `alpha_last`    | the literal reading "from the most recent forward pass": attention of the most recent query |
| `vnorm`         | L2 norm of the value vector |
| `sigma`         | variance over query heads of `alpha` |
| `entropy`       | sum_q a_q(i) H(a_q) / sum_q a_q(i), last `ENTROPY_QUERIES` queries, a_q averaged over heads and layers |
| `pos`           | position divided by the number of tokens seen |
| `window_mean`   | attention of the last `WINDOW` queries, divided by `WINDOW`, mean over heads |
| `window_max`    | the same, maximum over heads (and layers) |
| `last`          | attention of the last query, mean over heads |
| `last_max`      | the same, maximum over heads (and layers) |
| `..._upper`     | one of the four above over the upper half of the layers only, where a model looks up what it needs next |
| `..._all`       | one of the above averaged (or its maximum taken) over all layers and heads at every granularity |
| `..._near`      | one of the above: its maximum over the `NEAR` tokens around (an answer spans tokens) |
| `key_distinct`  | minus the cosine between the key and the mean unit key of its head (KeyDiff) |
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from dcache import cache as kv
from dcache.attention import StatsRequest
from dcache.errors import ConfigError

Granularity = Literal["sequence", "layer", "head"]
GRANULARITIES: tuple[Granularity, ...] = ("sequence", "layer", "head")
ENTROPY_QUERIES = 64
WINDOW = 32
NEAR = 15
LOG_OFFSET = 1e-8
"""Added before the logarithm of an attention signal."""


@dataclasses.dataclass(frozen=True)
class _View:
    """A cache as the signals read it, from layer `first` on.

    Layers are reduced one by one: where they are a tuple, stacking their statistics first would copy them.
    """

    cache: kv.Cache
    granularity: Granularity
    layer_reduce: str
    first: int = 0

    def positions(self) -> Array:
        """int32 positions of the slots in the shape of the granularity."""
        return positions_of(kv.positions(self.cache), self.granularity)

    def over_layers(self, x: Array, reduce: str) -> Array:
        """[L, ...] -> [...] at granularity "sequence", else unchanged."""
        if self.granularity != "sequence":
            return x
        return jnp.max(x, axis=0) if reduce == "max" else jnp.mean(x, axis=0)

    def _by_layer(self, read: Callable[[kv.LayerCache], Array], over: Callable[..., Array]) -> Array:
        """[B, M, S] of each layer's query or key/value heads: [L, B, K, S] at granularity "head", else [L, B, S]."""

        def reduced(layer: kv.LayerCache) -> Array:
            x = read(layer)
            if self.granularity != "head":
                return over(x, axis=1)
            b, m, s = x.shape
            heads = layer.position.shape[1]
            return over(x.reshape(b, heads, m // heads, s), axis=2)

        return kv.by_layer(self.cache, reduced, self.first)

    def mean(self, read: Callable[[kv.LayerCache], Array], reduce: str = "mean") -> Array:
        """Mean over heads (and layers) of what `read` gives of a layer, [B, M, S], down to the granularity."""
        return self.over_layers(self._by_layer(read, jnp.mean), reduce)

    def highest(self, read: Callable[[kv.LayerCache], Array]) -> Array:
        """The same with the maximum over heads and layers."""
        return self.over_layers(self._by_layer(read, jnp.max), "max")

    def variance(self, read: Callable[[kv.LayerCache], Array]) -> Array:
        """Variance over heads, then reduced over layers as `layer_reduce` says."""
        return self.over_layers(self._by_layer(read, jnp.var), self.layer_reduce)

    def rate(self, layer: kv.LayerCache) -> Array:
        """f32[B, N, S]: attention mass over the number of queries that could see the token (its own included, at least 1)."""
        seen = jnp.maximum(self.cache.length[:, None, None] - layer.position, 1).astype(jnp.float32)
        mass = layer.stats.mass
        b, n, s = mass.shape
        return (mass.reshape(b, seen.shape[1], -1, s) / seen[:, :, None]).reshape(b, n, s)


def _alpha(view: _View) -> Array:
    return view.mean(view.rate)


def _sigma(view: _View) -> Array:
    return view.variance(view.rate)


def _vnorm(view: _View) -> Array:
    return view.mean(lambda layer: layer.value_norm, view.layer_reduce)


def _entropy(view: _View) -> Array:
    rows, entropy = view.cache.rows, view.cache.row_entropy
    weighted = jnp.einsum("bws,bw->bs", rows, entropy)
    value = weighted / jnp.maximum(rows.sum(axis=1), 1e-20)
    return _broadcast(value, view)


def _pos(view: _View) -> Array:
    position = view.positions()
    lead = {"sequence": (), "layer": (1,), "head": (1,)}[view.granularity]
    length = view.cache.length.reshape(*lead, -1, *(1,) * (position.ndim - 1 - len(lead)))
    return position.astype(jnp.float32) / length.astype(jnp.float32)


def _window_mean(view: _View) -> Array:
    return view.mean(lambda layer: layer.stats.windows[WINDOW]) / WINDOW


def _window_max(view: _View) -> Array:
    return view.highest(lambda layer: layer.stats.windows[WINDOW]) / WINDOW


def _upper(signal: Callable[[_View], Array]) -> Callable[[_View], Array]:
    """An attention signal of the upper half of the layers."""

    def compute_upper(view: _View) -> Array:
        first = kv.shape(view.cache)[0] // 2
        return _broadcast(signal(dataclasses.replace(view, first=first, granularity="sequence")), view)

    return compute_upper


def _all(signal: Callable[[_View], Array]) -> Callable[[_View], Array]:
    """The value that a signal has at granularity "sequence"."""
    return lambda view: _broadcast(signal(dataclasses.replace(view, granularity="sequence")), view)


def _near(signal: Callable[[_View], Array]) -> Callable[[_View], Array]:
    """The maximum of a signal over the neighbouring tokens."""
    return lambda view: pool(signal(view), view.positions(), NEAR, "max")


def _last(view: _View) -> Array:
    return view.mean(lambda layer: layer.stats.last)


def _last_max(view: _View) -> Array:
    return view.highest(lambda layer: layer.stats.last)


def _key_distinct(view: _View) -> Array:
    value = -key_similarity(view.cache)
    if view.granularity == "head":
        return value
    return view.over_layers(jnp.mean(value, axis=2), "mean")


def _broadcast(value: Array, view: _View) -> Array:
    """[B, S] -> the shape of the granularity."""
    l, b, k, s = kv.shape(view.cache)
    if view.granularity == "sequence":
        return value
    if view.granularity == "layer":
        return jnp.broadcast_to(value[None], (l, b, s))
    return jnp.broadcast_to(value[None, :, None], (l, b, k, s))


@dataclasses.dataclass(frozen=True)
class Signal:
    """What a signal needs, how it is computed from a cache, and whether it is an attention mass.

    Attention spans many orders of magnitude, its logarithm does not: see `standardise`.
    """

    needs: StatsRequest
    compute: Callable[[_View], Array]
    is_mass: bool = False


_MASS = StatsRequest(mass=True)
_LAST = StatsRequest(last=True)
_RECENT = StatsRequest(windows=(WINDOW,))

SIGNALS: dict[str, Signal] = {
    "alpha": Signal(_MASS, _alpha, is_mass=True),
    "alpha_last": Signal(_LAST, _last, is_mass=True),
    "vnorm": Signal(StatsRequest(), _vnorm),
    "sigma": Signal(_MASS, _sigma, is_mass=True),
    "entropy": Signal(StatsRequest(rows=ENTROPY_QUERIES), _entropy),
    "pos": Signal(StatsRequest(), _pos),
    "window_mean": Signal(_RECENT, _window_mean, is_mass=True),
    "window_max": Signal(_RECENT, _window_max, is_mass=True),
    "last": Signal(_LAST, _last, is_mass=True),
    "last_max": Signal(_LAST, _last_max, is_mass=True),
    "last_upper": Signal(_LAST, _upper(_last), is_mass=True),
    "last_near": Signal(_LAST, _near(_last), is_mass=True),
    "last_max_near": Signal(_LAST, _near(_last_max), is_mass=True),
    "window_mean_near": Signal(_RECENT, _near(_window_mean), is_mass=True),
    "window_max_near": Signal(_RECENT, _near(_window_max), is_mass=True),
    "last_upper_near": Signal(_LAST, _near(_upper(_last)), is_mass=True),
    "last_max_upper_near": Signal(_LAST, _near(_upper(_last_max)), is_mass=True),
    "window_mean_upper_near": Signal(_RECENT, _near(_upper(_window_mean)), is_mass=True),
    "window_max_upper_near": Signal(_RECENT, _near(_upper(_window_max)), is_mass=True),
    "alpha_all": Signal(_MASS, _all(_alpha), is_mass=True),
    "window_mean_all": Signal(_RECENT, _all(_window_mean), is_mass=True),
    "key_distinct": Signal(StatsRequest(), _key_distinct),
}
PAPER_SIGNALS = ("alpha", "vnorm", "sigma", "entropy", "pos")
EXTENDED_SIGNALS = (
    *PAPER_SIGNALS, "window_mean", "window_max", "last", "last_max", "key_distinct", "last_upper", "last_upper_near",
    "last_max_upper_near", "window_mean_upper_near", "window_max_upper_near",
)  # fmt: skip
SEQUENCE_ONLY = ("entropy", *(name for name in SIGNALS if "_upper" in name or "_all" in name))
HEAD_SIGNALS = (
    *PAPER_SIGNALS, "window_mean", "window_max", "last", "last_max", "key_distinct", "window_max_near", "last_max_near",
    "alpha_all", "window_mean_all", "last_upper_near", "last_max_upper_near", "window_mean_upper_near",
    "window_max_upper_near",
)  # fmt: skip


def check_names(names: Sequence[str]) -> None:
    """Raises ConfigError if a name is not a signal."""
    unknown = [n for n in names if n not in SIGNALS]
    if unknown or not names:
        raise ConfigError(f"Unknown signals {unknown or '(none given)'}; the signals are {', '.join(SIGNALS)}.")


def needs(names: Sequence[str]) -> StatsRequest:
    """The attention statistics that a list of signals needs."""
    check_names(names)
    request = StatsRequest()
    for name in names:
        request |= SIGNALS[name].needs
    return request


def key_similarity(cache: kv.Cache) -> Array:
    """Cosine of each key with the mean of the unit keys of its head, over the filled slots: f32[L, B, K, S].

    KeyDiff, arXiv 2504.15364. Empty slots get 0.
    """

    def product(spec: str, x: Array, keys: Array) -> Array:
        # The keys of a shared prompt have batch size 1 and are read once for all sequences.
        return jnp.einsum(spec, x, keys) if keys.shape[0] > 1 else jnp.einsum(spec.replace("bksh", "ksh"), x, keys[0])

    def one(layer: kv.LayerCache, prompt: Array | None) -> Array:
        # Unit keys are never written down: products with the keys as they are take a fifth of the time on a CPU.
        parts = [x.astype(jnp.float32) for x in ([layer.k] if prompt is None else [prompt, layer.k])]
        inverse = jnp.where(layer.position >= 0, 1.0 / jnp.maximum(layer.key_norm, 1e-12), 0.0)
        scale = jnp.split(inverse, [part.shape[2] for part in parts[:-1]], axis=-1)
        total: Any = sum(product("bks,bksh->bkh", w, k) for w, k in zip(scale, parts, strict=True))
        anchor = total / jnp.maximum(jnp.linalg.norm(total, axis=-1, keepdims=True), 1e-12)
        sims = [w * product("bkh,bksh->bks", anchor, k) for w, k in zip(scale, parts, strict=True)]
        return jnp.concatenate(sims, axis=-1)

    if isinstance(cache.layers, tuple):
        prompts = [None] * len(cache.layers) if cache.prompt is None else list(cache.prompt.k)
        return jnp.stack([one(layer, prompt) for layer, prompt in zip(cache.layers, prompts, strict=True)])
    if cache.prompt is None:
        return jax.vmap(lambda layer: one(layer, None))(cache.layers)
    return jax.vmap(one)(cache.layers, cache.prompt.k)


def compute(
    names: Sequence[str], cache: kv.Cache, granularity: Granularity = "sequence", layer_reduce: str = "mean"
) -> Array:
    """Raw signals of every slot.

    Args:
      names: of `SIGNALS`. cache: with the statistics of `needs(names)`.
      granularity: "sequence", "layer" or "head".
      layer_reduce: "mean" or "max": how `vnorm` and `sigma` are reduced over layers (the paper does not say).

    Returns:
      f32[B, S, F], f32[L, B, S, F] or f32[L, B, K, S, F], F signals in the order of `names`. Empty slots hold anything.
    """
    check_names(names)
    view = _View(cache, granularity, layer_reduce)
    return jnp.stack([SIGNALS[name].compute(view) for name in names], axis=-1)


def positions_of(position: Array, granularity: Granularity) -> Array:
    """int32[L, B, K, S] positions as the granularity sees them: [B, S], [L, B, S] or unchanged."""
    if granularity == "head":
        return position
    return position[:, :, 0] if granularity == "layer" else position[0, :, 0]


def pool(x: Array, position: Array, kernel: int, pooling: str, *, zeros: bool = True) -> Array:
    """Pools a per-token value over neighbouring tokens, with stride 1.

    Args:
      x: f32[..., S]. position: int32[..., S], `EMPTY` where there is no token (which then comes after all tokens). After
        decode-time eviction slots are in any order; neighbours are neighbours in position.
      kernel: odd number of tokens. pooling: "max" or "avg".
      zeros: places beyond the ends count as zeros (then the maximum is right for values that are not negative only);
        otherwise they do not count: any finite values, and the average is over the tokens that are there.

    Returns:
      f32[..., S]. Empty slots hold anything finite.
    """
    order = jnp.argsort(jnp.where(position >= 0, position, jnp.iinfo(jnp.int32).max), axis=-1)
    back = jnp.argsort(order, axis=-1)
    outside = -jnp.inf if pooling == "max" and not zeros else 0.0
    x = jnp.take_along_axis(jnp.where(position >= 0, x, outside), order, axis=-1)
    window, strides = (1,) * (x.ndim - 1) + (kernel,), (1,) * x.ndim
    side = ((0, 0),) * (x.ndim - 1) + ((kernel // 2, kernel // 2),)
    if pooling == "max":
        x = jax.lax.reduce_window(x, outside, jax.lax.max, window, strides, side)
    else:
        x = jax.lax.reduce_window(x, 0.0, jax.lax.add, window, strides, side)
        if zeros:
            return jnp.take_along_axis(x / kernel, back, axis=-1)
        there = jnp.take_along_axis((position >= 0).astype(x.dtype), order, axis=-1)
        x = x / jnp.maximum(jax.lax.reduce_window(there, 0.0, jax.lax.add, window, strides, side), 1.0)
    x = jnp.take_along_axis(x, back, axis=-1)
    return x if zeros else jnp.where(position >= 0, x, 0.0)


def filled(cache: kv.Cache, granularity: Granularity = "sequence") -> Array:
    """bool[B, S], [L, B, S] or [L, B, K, S]: which slots hold a token."""
    return positions_of(kv.positions(cache), granularity) >= 0


def standardise(names: Sequence[str], raw: Array, mask: Array, *, logs: bool = True) -> Array:
    """Features of a policy: zero mean and unit variance over the filled slots, 0 in empty ones.

    Args:
      raw: f32[..., S, F]. mask: bool[..., S]. logs: take the logarithm of signals that are attention masses first.

    Returns:
      f32[..., S, F]. Defined for any number of filled slots: a constant signal becomes 0.
    """
    if logs:
        is_logged = jnp.asarray([SIGNALS[n].is_mass for n in names])
        shape = (1,) * (raw.ndim - 1) + (len(names),)
        raw = jnp.where(is_logged.reshape(shape), jnp.log(jnp.maximum(raw, 0.0) + LOG_OFFSET), raw)
    weight = mask[..., None].astype(jnp.float32)
    count = jnp.maximum(weight.sum(axis=-2, keepdims=True), 1.0)
    mean = jnp.sum(raw * weight, axis=-2, keepdims=True) / count
    centred = (raw - mean) * weight
    deviation = jnp.sqrt(jnp.sum(centred**2, axis=-2, keepdims=True) / count)
    return jnp.where(deviation > 1e-6 * jnp.maximum(jnp.abs(mean), 1e-6), centred / jnp.maximum(deviation, 1e-12), 0.0)
