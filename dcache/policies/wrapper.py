"""What a policy that changes another one has in common: it passes on whatever it does not change."""

import dataclasses

from dcache.errors import ConfigError
from dcache.policies.base import Policy
from dcache.policies.snapkv import SnapKV


@dataclasses.dataclass(frozen=True)
class Wrapper(Policy):
    """A policy around another one, whose scores, needs, protection and granularity it takes over.

    Attributes:
      base: the policy inside. If it is a trained one, its weights are the weights of the whole.
    """

    base: Policy = SnapKV()

    def __post_init__(self):
        if not isinstance(self.base, Policy):
            raise ConfigError(f"{self.name}: base is {self.base!r}; give a policy, for instance make('h2o').")

    @property
    def granularity(self):  # type: ignore[override]
        """That of the policy inside."""
        return self.base.granularity

    @property
    def needs(self):
        """What the policy inside needs."""
        return self.base.needs

    def fit(self, budget):
        """Fits the policy inside."""
        return dataclasses.replace(self, base=self.base.fit(budget))

    def bind(self, tokenizer):
        """Binds the policy inside."""
        return dataclasses.replace(self, base=self.base.bind(tokenizer))

    def observe(self, weights, params, config, cache, tokens, continuation):
        """What the policy inside observes."""
        return self.base.observe(weights, params, config, cache, tokens, continuation)

    def scores(self, params, cache, key):
        """The scores of the policy inside."""
        return self.base.scores(params, cache, key)

    def protects(self, cache, budget):
        """What the policy inside protects."""
        return self.base.protects(cache, budget)

    def protected_tokens(self, budget):
        """What the policy inside protects."""
        return self.base.protected_tokens(budget)

    def allocate(self, params, cache, scores, filled, budget, protected):
        """As the policy inside does."""
        return self.base.allocate(params, cache, scores, filled, budget, protected)

    def most_kept(self, budget, seen, config):
        """As the policy inside does."""
        return self.base.most_kept(budget, seen, config)
