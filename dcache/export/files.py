"""A trained policy as two files that anybody can read: `weights.safetensors` and `policy.json`.

The description says everything that the scores depend on. `docs/using_elsewhere.md` explains it, `dcache/export/kvpress.py`
reads it with PyTorch alone.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from dcache import budget, checkpoint, signals
from dcache.errors import ConfigError
from dcache.policies.base import Trained
from dcache.policies.distillcache import DistillCache, ScoreNet
from dcache.policies.reader import EPSILON
from dcache.workdir import atomic_write

FORMAT, VERSION = "dcache-policy", 2
WEIGHTS, DESCRIPTION = "weights.safetensors", "policy.json"
_GRANULARITIES = ("sequence", "head")


def export(source: str | os.PathLike[str], directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Writes a trained policy for other software.

    Args:
      source: folder of a trained policy, or the workdir of a run. directory: is created if needed.

    Returns:
      The description, as `policy.json` holds it.

    Raises:
      CheckpointError: no usable policy lies there. ConfigError: one of a kind that cannot be exported.
      WorkdirError: the files cannot be written.
    """
    import safetensors.numpy

    trained = checkpoint.load_policy(source)
    check(trained)
    file, meta, _ = checkpoint.read_policy(source)
    if Path(directory).resolve() == file.parent.resolve():
        # Both have a policy.json.
        raise ConfigError(f"{str(directory)!r} is the folder of the trained policy itself; export into another one.")
    weights = tensors(trained)
    raw = safetensors.numpy.save(weights)
    description = describe(
        trained, {name: meta[name] for name in ("experiment", "seed", "step", "model") if name in meta}
    )
    description["weights"] = {
        "file": WEIGHTS,
        "sha256": hashlib.sha256(raw).hexdigest(),
        "shapes": {name: list(value.shape) for name, value in weights.items()},
    }
    atomic_write(Path(directory) / WEIGHTS, raw)
    atomic_write(Path(directory) / DESCRIPTION, json.dumps(description, indent=2) + "\n")
    return description


def check(trained: Trained) -> None:
    """Raises ConfigError if a policy is of a kind that cannot be exported."""
    policy: Any = trained.policy
    if policy.name == DistillCache.name and policy.granularity in _GRANULARITIES:
        if policy.sees_budget:
            raise ConfigError(
                "The policy sees the budget, which the exported form does not know; export one that does not."
            )
        return
    given = f"{policy.name!r} with granularity {policy.granularity!r}"
    raise ConfigError(
        f"The policy is {given}; what can be exported is {DistillCache.name!r} with granularity "
        f"{' or '.join(map(repr, _GRANULARITIES))}."
    )


def tensors(trained: Trained) -> dict[str, np.ndarray]:
    """The weights under plain names, float32; matrices are [outputs, inputs].

    `linear.<i>.weight`, `linear.<i>.bias`, `norm.<i>.weight`, `norm.<i>.bias` of the hidden layers, `score.weight`,
    `score.bias`, and with terms of each head `heads.code` [L, K, C], `heads.slope` [L, K, F], `heads.offset` [L, K]. Of what
    reads hidden states `reader.in` [L, U, D], `reader.in_bias` [L, U], `reader.out` [L, K, U], `reader.bias` [L, K].
    """
    tree = jax.tree.map(np.asarray, trained.params["params"])
    count = trained.policy.net.layers  # type: ignore[attr-defined]
    found = {}
    for i in range(count):
        found[f"linear.{i}.weight"] = tree[f"Dense_{i}"]["kernel"].T
        found[f"linear.{i}.bias"] = tree[f"Dense_{i}"]["bias"]
        found[f"norm.{i}.weight"] = tree[f"LayerNorm_{i}"]["scale"]
        found[f"norm.{i}.bias"] = tree[f"LayerNorm_{i}"]["bias"]
    found["score.weight"] = tree[f"Dense_{count}"]["kernel"].T
    found["score.bias"] = tree[f"Dense_{count}"]["bias"]
    found |= {f"heads.{name}": tree[name] for name in ("code", "slope", "offset") if name in tree}
    if "reader" in trained.params:
        reader = jax.tree.map(np.asarray, trained.params["reader"])
        found |= {f"reader.{name}": reader[name].swapaxes(1, 2) for name in ("in", "out")}
        found |= {f"reader.{name}": reader[name] for name in ("in_bias", "bias")}
    # The file format stores memory as it lies: a transposed view would be written untransposed.
    return {name: np.ascontiguousarray(value, np.float32) for name, value in found.items()}


def describe(trained: Trained, source: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values: all that the scores depend on beside the weights. source: where the policy comes from."""
    policy: Any = trained.policy
    return {
        "format": FORMAT,
        "version": VERSION,
        "method": policy.name,
        "paper": policy.paper,
        "granularity": policy.granularity,
        "scope": policy.scope,
        # Most that one head keeps, as a multiple of the budget, where heads share it; 0 for no bound.
        "cap": policy.cap,
        "heads": list(policy.heads),
        "layer_reduce": policy.layer_reduce,
        # In the order of the network's inputs. Those of "sequence" are one value per token for all layers and heads.
        "signals": [
            {
                "name": name,
                "per": "sequence" if name in policy.once else policy.granularity,
                "log": policy.logs and signals.SIGNALS[name].is_mass,
            }
            for name in policy.signals
        ],
        "prior": list(policy.prior),
        "network": {
            "inputs": policy.inputs + (ScoreNet.CODE if policy.heads else 0),
            "hidden": policy.hidden,
            "layers": policy.layers,
            "each_layer": ["linear", "layernorm", "relu"],
            "layernorm_epsilon": nn.LayerNorm().epsilon,
            "code": ScoreNet.CODE if policy.heads else 0,
        },
        # One network per layer; its output is the input after the signals, not standardised.
        "reader": {
            "inputs": "hidden states that enter the layer's attention, (x - mean) / sqrt(variance + epsilon) over D",
            "epsilon": EPSILON,
            "width": policy.reads[0],
            "hidden": policy.reads[1],
            "activation": "gelu, tanh approximation",
        }
        if policy.reads
        else None,
        "constants": {
            "window": signals.WINDOW,
            "near": signals.NEAR,
            "entropy_queries": signals.ENTROPY_QUERIES,
            "log_offset": signals.LOG_OFFSET,
            "minimum_tokens": budget.MINIMUM,
        },
        "standardisation": {
            "rule": "(x - mean) / sqrt(mean((x - mean)^2)) over the prompt's tokens that compete for one budget",
            "over": {"sequence": "S", "head": {"head": "S", "layer": "K S", "model": "L K S"}[policy.scope]},
            "constant": "0 where the deviation is at most 1e-6 * max(|mean|, 1e-6)",
        },
        "axes": {
            "legend": "L layer, K key/value head, S token, F signal or reading, C code",
            "features": "L K S F" if policy.granularity == "head" else "S F",
            "heads": "L K",
            "matrices": "outputs inputs",
            "network_inputs": "F signals (and the reading), then C code",
        },
        "source": dict(source),
    }
