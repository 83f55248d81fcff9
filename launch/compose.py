"""Makes a hybrid: `python launch/compose.py --gates=runs/rlkv_smollm2 --policy=policies/smollm2-distillcache --out=DIR`.

--gates=PATH   a trained rlkv policy, or the workdir of its run
--policy=PATH  a trained distillcache policy, or the workdir of its run
--out=DIR      where the hybrid is saved, a new folder; every command takes it as a policy
--nomatched    the paper's split: 20% of the heads keep everything
"""

import os

import common
from absl import flags

_GATES = flags.DEFINE_string("gates", None, "A trained rlkv policy, or the workdir of its run.")
_POLICY = flags.DEFINE_string("policy", None, "A trained distillcache policy, or the workdir of its run.")
_OUT = flags.DEFINE_string("out", None, "Where the hybrid is saved.")
_MATCHED = flags.DEFINE_bool("matched", True, "Full heads get at most 0.4 of the budget; otherwise as in the paper.")
flags.mark_flags_as_required(["gates", "policy", "out"])


def main(argv: list[str]) -> None:
    from dcache import checkpoint
    from dcache.errors import ConfigError
    from dcache.policies.hybrid import compose

    if len(argv) > 1:
        raise ConfigError(f"Unknown argument {argv[1]!r}; options begin with --, see --help.")
    if os.path.exists(_OUT.value):
        raise ConfigError(f"--out={_OUT.value} exists already; give a new folder, or delete it first.")
    gates, base = checkpoint.load_policy(_GATES.value), checkpoint.load_policy(_POLICY.value)
    made = compose(gates, base, matched=_MATCHED.value)
    checkpoint.save_policy(_OUT.value, made.policy, made.params, {"gates": _GATES.value, "base": _POLICY.value})
    print(f"The hybrid is in {_OUT.value}.")


if __name__ == "__main__":
    common.run(main)
