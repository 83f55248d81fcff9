"""Budget allocation around another policy."""

import dataclasses

from dcache.errors import ConfigError
from dcache.policies.base import Policy, Scope, best_of_each, check_cap, floored_counts, most_capped, most_floored
from dcache.policies.pyramidkv import PyramidKV, falling
from dcache.policies.wrapper import Wrapper, check_head_level, check_ranks

_SCOPES: dict[str, Scope] = {"adaptive": "layer", "global": "model"}
_WAYS = ("uniform", "pyramid", *_SCOPES)


@dataclasses.dataclass(frozen=True)
class Allocated(Wrapper):
    """Shares the budget out among layers and heads in one of four ways, whatever policy gives the scores.

    "uniform": every head gets the budget. "pyramid": budgets fall linearly from layer to layer, as in PyramidKV (Cai et al.,
    arXiv 2406.02069) with its steepness; every layer gets at least what is protected. Both replace the allocation of the
    policy inside. "adaptive": the heads of a layer share one budget, the best tokens of all of them stay, as in Ada-KV (Feng
    et al., arXiv 2407.11550; `adakv` is this way). "global": all heads of all layers share one budget; scores of different
    layers then compete, so they should mean the same everywhere. These two share what the policy inside gives the heads, so
    "adaptive" around "pyramid" gives a layer its share and its heads what they need of it.

    The fixed-shape cache gives every head as many slots as one head may need: unequal budgets keep as many tokens as
    equal ones but allocate more memory (`generate` reports it), "global" the most. A `cap` bounds it: at 2, a quarter of the
    tokens takes half of the memory; what heads would keep beyond it goes to others, and quality with it (docs/composing.md).

    Attributes:
      base: whose scores are used. by: one of the four. floor: share of its own budget that each head keeps in any case
        ("adaptive" and "global" only). cap: most that a head keeps, as a multiple of the budget ("global" only); 0 for no
        bound.
    """

    name = "allocated"
    summary = "another policy's scores (SnapKV's); budgets equal, falling, or shared by heads"
    paper = "arXiv 2407.11550"

    by: str = "adaptive"
    floor: float = 0.2
    cap: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_head_level(self)
        check_ranks(self)
        if self.by not in _WAYS:
            raise ConfigError(f"allocated: by is {self.by!r}; use one of {', '.join(_WAYS)}.")
        if not 0.0 <= self.floor <= 1.0:
            raise ConfigError(f"allocated: floor is {self.floor}; give a share in [0, 1].")
        check_cap(self, self.by == "global")

    def allocate(self, params, cache, scores, filled, budget, protected):
        """Tokens of each head."""
        if self.by == "uniform":
            return Policy.allocate(self, params, cache, scores, filled, budget, protected)
        if self.by == "pyramid":
            return falling(scores, filled, budget, protected, window=0, beta=PyramidKV.beta)
        shares = self.base.allocate(params, cache, scores, filled, budget, protected)
        if self.cap:
            filled = best_of_each(scores, filled, budget, protected, self.cap)
        return floored_counts(scores, filled, shares, protected, self.floor, _SCOPES[self.by])

    def most_kept(self, budget, seen, config):
        """The budget; twice that for a pyramid; what the floors of the others leave where heads share."""
        if self.by in ("uniform", "pyramid"):
            return min(seen, budget if self.by == "uniform" else 2 * budget)
        most = most_floored(
            budget, self.base.most_kept(budget, seen, config), seen, config, _SCOPES[self.by], self.floor
        )
        return min(most, most_capped(budget, self.cap)) if self.cap else most
