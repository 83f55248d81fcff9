"""DistillCache: a small network scores every cached token; trained by `dcache.learn.distill`."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from dcache import signals as signal_lib
from dcache.errors import ConfigError
from dcache.policies.base import Policy, check_granularity


class ScoreNet(nn.Module):
    """MLP with ReLU and LayerNorm: features f32[..., F] -> score f32[...]. Two hidden layers of 128 in the paper."""

    hidden: int = 128
    layers: int = 2

    @nn.compact
    def __call__(self, features: Array) -> Array:
        """Scores every token independently."""
        x = features
        for _ in range(self.layers):
            x = nn.relu(nn.LayerNorm()(nn.Dense(self.hidden)(x)))
        # A zero start: the first keep-sets are uniformly random, and no signal has a head start.
        return nn.Dense(1, kernel_init=nn.initializers.zeros)(x)[..., 0]


@dataclasses.dataclass(frozen=True)
class DistillCache(Policy):
    """Scores of a learned network over per-token signals. Althoubi, arXiv 2608.08878.

    Attributes:
      signals: names of `dcache.signals.SIGNALS`, in the order of the network's inputs.
      granularity: "sequence" as in the paper, "layer" or "head" (the same network on per-layer or per-head signals).
      hidden, layers: width and number of hidden layers of the network.
      layer_reduce: "mean" or "max": how `vnorm` and `sigma` are reduced over layers.
      logs: take the logarithm of attention signals before they are standardised.
      prior: fixed weights of the standardised signals, added to the network's output, one per signal; () for none. The
        network starts at zero, so with a prior training starts from that ranking instead of a random one.
    """

    name = "distillcache"
    summary = "learned network over attention signals, trained on the KL to the full-cache model"
    paper = "arXiv 2608.08878"

    signals: tuple[str, ...] = signal_lib.EXTENDED_SIGNALS
    granularity: signal_lib.Granularity = "sequence"  # type: ignore[misc]
    hidden: int = 128
    layers: int = 2
    layer_reduce: str = "mean"
    logs: bool = True
    prior: tuple[float, ...] = ()

    def __post_init__(self):
        signal_lib.check_names(self.signals)
        check_granularity(self)
        mixed = [name for name in self.signals if name in signal_lib.SEQUENCE_ONLY]
        if self.granularity != "sequence" and mixed:
            raise ConfigError(
                f"distillcache: the signals {', '.join(mixed)} are defined for granularity 'sequence' only, since they "
                "average over layers and heads; leave them out of `signals`."
            )
        if self.prior and len(self.prior) != len(self.signals):
            raise ConfigError(
                f"distillcache: the prior has {len(self.prior)} weights for {len(self.signals)} signals; "
                "give one each, or none."
            )
        if self.layer_reduce not in ("mean", "max"):
            raise ConfigError(f"distillcache: layer_reduce is {self.layer_reduce!r}; use 'mean' or 'max'.")

    @property
    def net(self) -> ScoreNet:
        """The scoring network."""
        return ScoreNet(self.hidden, self.layers)

    @property
    def needs(self):
        """Whatever the signals need."""
        return signal_lib.needs(self.signals)

    def init(self, key: Array) -> Any:
        """Fresh weights, float32."""
        return self.net.init(key, jnp.zeros((1, len(self.signals)), jnp.float32))

    def features(self, cache) -> Array:
        """Standardised signals f32[..., S, F] of a cache, the network's input."""
        raw = signal_lib.compute(self.signals, cache, self.granularity, self.layer_reduce)
        return signal_lib.standardise(self.signals, raw, signal_lib.filled(cache, self.granularity), logs=self.logs)

    def scores_of(self, params: Any, features: Array) -> Array:
        """Scores f32[..., S] of features f32[..., S, F]."""
        learned: Any = self.net.apply(params, features)
        return learned + features @ jnp.asarray(self.prior, jnp.float32) if self.prior else learned

    def scores(self, params, cache, key):
        """The network's scores."""
        del key
        return self.scores_of(params, self.features(cache))


def parameter_count(params: Any) -> int:
    """Number of weights (the paper's text says about 200 thousand; its own architecture has about 17 thousand)."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
