"""StreamingLLM: attention sinks and the most recent tokens."""

import dataclasses

import jax.numpy as jnp

from dcache.errors import ConfigError
from dcache.policies.base import Policy, slot_positions


@dataclasses.dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keeps the first `sinks` tokens and the most recent ones. Xiao et al., arXiv 2309.17453.

    Attributes:
      sinks: how many first tokens are always kept.
    """

    name = "streaming_llm"
    summary = "first tokens (sinks) and the most recent ones"
    paper = "arXiv 2309.17453"

    sinks: int = 4

    def __post_init__(self):
        if self.sinks < 0:
            raise ConfigError(f"streaming_llm: sinks is {self.sinks}; keep 0 or more first tokens.")

    def scores(self, params, cache, key):
        """The relative position: later tokens score higher."""
        del params, key
        length = cache.length[:, None].astype(jnp.float32)
        return slot_positions(cache, "sequence").astype(jnp.float32) / length

    def protects(self, cache, budget):
        """The sinks."""
        del budget
        position = slot_positions(cache, "sequence")
        return (position >= 0) & (position < self.sinks)

    def protected_tokens(self, budget):
        """The sinks."""
        del budget
        return self.sinks
