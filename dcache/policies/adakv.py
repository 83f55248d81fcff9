"""Ada-KV: the heads of a layer share one budget."""

import dataclasses

from dcache.errors import ConfigError
from dcache.policies.base import floored_counts, most_floored
from dcache.policies.wrapper import Wrapper, check_head_level


@dataclasses.dataclass(frozen=True)
class AdaKV(Wrapper):
    """The best tokens of all heads of a layer together, whatever head they are in. Feng et al., arXiv 2407.11550.

    Works on the scores of any policy that decides per head. The fixed-shape cache gives every head as many slots as one
    head may need, so the memory that is allocated exceeds the budget (`generate` reports it); the number of tokens kept
    does not. Around a policy that gives layers unequal budgets (PyramidKV) the heads of a layer share that layer's.

    Attributes:
      base: whose scores are used (SnapKV, as in the paper).
      floor: share of the budget that every head keeps in any case.
    """

    name = "adakv"
    summary = "another policy's scores (SnapKV's), one budget for all heads of a layer"
    paper = "arXiv 2407.11550"

    floor: float = 0.2

    def __post_init__(self):
        super().__post_init__()
        check_head_level(self)
        if not 0.0 <= self.floor <= 1.0:
            raise ConfigError(f"adakv: floor is {self.floor}; give a share in [0, 1].")

    def allocate(self, params, cache, scores, filled, budget, protected):
        """Counts the tokens of each head among the best of the layer."""
        shares = self.base.allocate(params, cache, scores, filled, budget, protected)
        return floored_counts(scores, filled, shares, protected, self.floor, "layer")

    def most_kept(self, budget, seen, config):
        """One head takes what the floors of the others leave."""
        most = self.base.most_kept(budget, seen, config)
        return most_floored(budget, most, seen, config, "layer", self.floor)
