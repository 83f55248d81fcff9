"""Writes a trained policy for other software: `python launch/export.py --policy=policies/smollm2-distillcache --out=DIR`.

    --policy=DIR  folder of a trained policy, or the workdir of a run
    --out=DIR     gets weights.safetensors and policy.json, which can be read without dcache and JAX

docs/using_elsewhere.md shows how to run them on a PyTorch model.
"""

import common
from absl import flags

_POLICY = flags.DEFINE_string("policy", None, "Folder of a trained policy, or the workdir of a run.", required=True)
_OUT = flags.DEFINE_string("out", None, "Folder to write into.", required=True)


def main(argv: list[str]) -> None:
    from dcache.errors import ConfigError
    from dcache.export.files import export

    if len(argv) > 1:
        raise ConfigError(f"Unknown argument {argv[1]!r}; options begin with --, see --help.")
    description = export(_POLICY.value, _OUT.value)
    count = len(description["signals"])
    print(f"{_OUT.value}: {description['method']}, {count} signals, one decision per {description['granularity']}")


if __name__ == "__main__":
    common.run(main)
