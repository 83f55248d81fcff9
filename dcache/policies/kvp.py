"""KVP: every key/value head ranks its tokens by a small network of its own; trained by `dcache.learn.kvp`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dcache.errors import ConfigError
from dcache.policies.base import Policy, per_token, recent, slot_positions

DEFAULT_RECENT = 16
_POSITIONS = 1024.0  # Positions are counted in thousands of tokens: near one for the prompts of training.


@dataclasses.dataclass(frozen=True)
class KVP(Policy):
    """Scores of one network per layer and key/value head. Moschella, Manduchi and Sener, arXiv 2602.10238.

    An agent sees one token at a time: its rotated key, its value and its position; no query and no attention. The paper's
    two layers are read as one hidden layer and the output, 2 * width + 3 numbers -> hidden -> 1, with GELU. The paper does
    not say how the inputs are scaled. Here the key and the value are divided by the root of their mean square, whose
    logarithms are two further inputs, and the position is divided by 1,024. All heads get the same budget.

    Attributes:
      heads: (L, K) of the model. width: its head dimension H. The defaults are those of SmolLM2-135M.
      hidden: hidden units of each agent.
      sinks: first tokens, which stay.
      recent: last tokens, which stay too; None for `min(16, budget // 4)`, so that they never eat a small budget.
    """

    name = "kvp"
    summary = "one learned network per head over keys, values and positions; needs no attention"
    paper = "arXiv 2602.10238"
    granularity = "head"
    learner = "dcache.learn.kvp"

    heads: tuple[int, ...] = (30, 3)
    width: int = 64
    hidden: int = 256
    sinks: int = 4
    recent: int | None = None

    def __post_init__(self):
        if len(self.heads) != 2 or min(*self.heads, self.width, self.hidden) < 1:
            raise ConfigError(
                f"kvp: heads is {self.heads}, width {self.width} and hidden {self.hidden}; give (layers, key/value heads per "
                "layer) and the head dimension of the model, and 1 or more hidden units."
            )
        if self.sinks < 0 or (self.recent is not None and self.recent < 0):
            raise ConfigError(f"kvp: sinks is {self.sinks} and recent {self.recent}; give 0 or more tokens.")

    @property
    def tail(self) -> int:
        """The last tokens that stay."""
        return DEFAULT_RECENT if self.recent is None else self.recent

    def init(self, key: Array) -> dict[str, Array]:
        """Fresh weights, float32, each with leading axes L, K. All scores start at zero, so the first rankings are random."""
        l, k = self.heads
        inputs = 2 * self.width + 3
        return {
            "inner": jax.random.normal(key, (l, k, inputs, self.hidden), jnp.float32) * (2.0 / inputs) ** 0.5,
            "inner_bias": jnp.zeros((l, k, self.hidden), jnp.float32),
            "outer": jnp.zeros((l, k, self.hidden), jnp.float32),  # a bias would move all tokens of a head alike
        }

    def check_model(self, config: Any) -> None:
        """Raises ConfigError if the model (a `ModelConfig`) has other heads than the agents."""
        shape = (config.num_layers, config.num_kv_heads, config.head_dim)
        if (*self.heads, self.width) != shape:
            raise ConfigError(
                f"This kvp has agents for {self.heads[0]} layers of {self.heads[1]} key/value heads of dimension {self.width}; "
                f"the model has {shape[0]} of {shape[1]} of dimension {shape[2]}. Train one for it: set policy.heads to "
                f"({shape[0]}, {shape[1]}) and policy.width to {shape[2]}."
            )

    def observe(self, weights, params, config, cache, tokens, continuation):
        """Looks at nothing; refuses a model of other heads."""
        del weights, params, tokens, continuation
        self.check_model(config)
        return cache

    def scores(self, params, cache, key):
        """What each head's agent says of its tokens."""
        del key

        def layer(k: Array, v: Array, position: Array, weights: dict[str, Array]) -> Array:
            return jax.vmap(jax.vmap(_agent), in_axes=(0, 0, 0, None))(k, v, position, weights)

        return per_token(cache, layer, params, positions=True)

    def protects(self, cache, budget):
        """The sinks and the last tokens."""
        position = slot_positions(cache, "head")
        last = recent(cache, "head", jnp.full_like(budget, self.tail))
        return (position >= 0) & (position < self.sinks) | last

    def protected_tokens(self, budget):
        """The sinks and the last tokens."""
        del budget
        return self.sinks + self.tail

    def fit(self, budget):
        """Fills in how many of the last tokens stay."""
        if self.recent is not None:
            return super().fit(budget)
        last = max(0, min(DEFAULT_RECENT, budget // 4, budget - self.sinks))
        return dataclasses.replace(self, recent=last).fit(budget)


def _agent(k: Array, v: Array, position: Array, weights: dict[str, Array]) -> Array:
    """Scores f32[S] of one head's tokens: k, v [S, H], position int32[S], weights without their leading L, K."""
    k, k_size = _scaled(k)
    v, v_size = _scaled(v)
    place = position.astype(jnp.float32)[:, None] / _POSITIONS
    inputs = jnp.concatenate([k, v, k_size, v_size, place], axis=-1)
    hidden = jax.nn.gelu(inputs @ weights["inner"] + weights["inner_bias"][None])
    return hidden @ weights["outer"]


def _scaled(x: Array) -> tuple[Array, Array]:
    """x [S, H] over the root of its mean square, f32, and the logarithm of that root, f32[S, 1]."""
    x = x.astype(jnp.float32)
    square = jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6
    return x * jax.lax.rsqrt(square), 0.5 * jnp.log(square)
