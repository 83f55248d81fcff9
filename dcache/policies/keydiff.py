"""KeyDiff: keep keys that differ from the others."""

import dataclasses

from dcache.policies.base import Policy
from dcache.signals import key_similarity


@dataclasses.dataclass(frozen=True)
class KeyDiff(Policy):
    """Minus the cosine of the key to the mean of its head's unit keys. Park et al., arXiv 2504.15364."""

    name = "keydiff"
    summary = "keys that differ most from their head's mean key; needs no attention"
    paper = "arXiv 2504.15364"
    granularity = "head"

    def scores(self, params, cache, key):
        """Minus the cosine to the mean unit key."""
        del params, key
        return -key_similarity(cache)
