"""What a policy that changes another one has in common: it passes on whatever it does not change."""

import dataclasses
from typing import Any

from dcache.errors import ConfigError
from dcache.policies.base import Policy, Trained
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
    def looks(self):  # type: ignore[override]
        """Whether the policy inside does."""
        return self.base.looks

    @property
    def ranks(self):  # type: ignore[override]
        """Whether the policy inside does."""
        return self.base.ranks

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

    @property
    def offline(self):
        """That of the policy inside."""
        return self.base.offline

    def observe(self, weights, params, config, cache, tokens, continuation):
        """What the policy inside observes."""
        return self.base.observe(weights, params, config, cache, tokens, continuation)

    def scores(self, params, cache, key):
        """The scores of the policy inside."""
        return self.base.scores(params, cache, key)

    def scores_at(self, params, cache, budget, key):
        """The scores of the policy inside."""
        return self.base.scores_at(params, cache, budget, key)

    def protects(self, cache, budget):
        """What the policy inside protects."""
        return self.base.protects(cache, budget)

    def protected_tokens(self, budget):
        """What the policy inside protects."""
        return self.base.protected_tokens(budget)

    def allowance(self, budget, seen):
        """As the policy inside does."""
        return self.base.allowance(budget, seen)

    def allocate(self, params, cache, scores, filled, budget, protected):
        """As the policy inside does."""
        return self.base.allocate(params, cache, scores, filled, budget, protected)

    def most_kept(self, budget, seen, config):
        """As the policy inside does."""
        return self.base.most_kept(budget, seen, config)


def check_head_level(wrapper: Wrapper) -> None:
    """Raises ConfigError unless the policy inside decides per head."""
    base = wrapper.base
    if base.granularity != "head":
        raise ConfigError(
            f"{wrapper.name}: {base.name} decides per {base.granularity}; give a policy that decides per head."
        )


def check_ranks(wrapper: Wrapper) -> None:
    """Raises ConfigError if the policy inside does not keep the best of its scores."""
    inside = wrapper.base
    while isinstance(inside, Wrapper) and not inside.base.ranks:
        inside = inside.base
    if not inside.ranks:
        raise ConfigError(
            f"{wrapper.name}: {inside.name} does not simply keep its best scores; put it around instead, as in "
            f"{inside.name}({wrapper.name}(...))."
        )


def innermost(policy: Policy) -> Policy:
    """The policy inside all wrappers."""
    return innermost(policy.base) if isinstance(policy, Wrapper) else policy


def around(trained: Trained, wrapper: Wrapper) -> Trained:
    """A trained policy in place of the innermost one of a wrapper (or of several around each other)."""
    base: Any = wrapper.base
    inside = around(trained, base).policy if isinstance(base, Wrapper) else trained.policy
    return Trained(dataclasses.replace(wrapper, base=inside), trained.params)
