"""KNorm: keep keys of small norm."""

import dataclasses

from dcache import cache as kv
from dcache.policies.base import Policy


@dataclasses.dataclass(frozen=True)
class KNorm(Policy):
    """Minus the L2 norm of the key; keys of small norm receive much attention. Devoto et al., arXiv 2406.11430.

    The paper leaves the first two layers uncompressed; here, as in kvpress, all layers are treated alike.
    """

    name = "knorm"
    summary = "keys of the smallest norm; needs no attention"
    paper = "arXiv 2406.11430"
    granularity = "head"

    def scores(self, params, cache, key):
        """Minus the norm of the key."""
        del params, key
        return -kv.by_layer(cache, lambda layer: layer.key_norm)
