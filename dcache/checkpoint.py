"""What a run leaves on disk: training checkpoints (Orbax) to go on from, and trained policies to use.

A training checkpoint is a folder named after its step: `arrays/`, written by Orbax, holds the state and the run's
random key (never the language model), `run.json` describes the run and holds a digest of every file, since Orbax does
not notice changed bytes inside arrays. `run.json` is written last and deleted first: a folder without it does not count,
so a run that is killed leaves the last complete one. No folder is renamed when it is complete, because on a mounted bucket
renaming a folder is not one step.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from dcache.errors import CheckpointError, DcacheError
from dcache.learn.state import TrainState
from dcache.policies import REGISTRY, Trained, make
from dcache.sharding import is_first_process, lost_another, wait_for_all
from dcache.workdir import atomic_write

ARRAYS, RUN = "arrays", "run.json"
WEIGHTS, DESCRIPTION = "policy.safetensors", "policy.json"


# ---------------------------------------------------------------------------------------------------------------------
# Training checkpoints: <directory>/<step>


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """Step of the newest complete checkpoint, or None."""
    return max(_steps(directory), default=None)


def _steps(directory: str | os.PathLike[str]) -> list[int]:
    """Steps of the complete checkpoints, ascending; what is being written or deleted has no description."""
    return sorted(int(file.parent.name) for file in Path(directory).glob(f"*/{RUN}") if file.parent.name.isdecimal())


def _delete_incomplete(folder: Path) -> None:
    """Deletes what a run left that was killed, or failed, while it wrote or deleted a checkpoint."""
    for path in folder.iterdir():
        if path.name.isdecimal() and not (path / RUN).is_file():
            shutil.rmtree(path)


def save(
    directory: str | os.PathLike[str], step: int, state: TrainState, key: Array, identity: Mapping[str, Any], keep: int
) -> None:
    """Writes the checkpoint of a step and removes all but the `keep` newest.

    Of several processes all call it: Orbax writes the arrays together, the first process does the rest.

    Args:
      state: of the run. key: typed random key of the run.
      identity: JSON values that a run must share to go on from here. keep: at least 1.

    Raises:
      CheckpointError: it cannot be written, for instance because the disk is full; older ones stay.
    """
    from orbax.checkpoint import v1 as ocp

    folder = Path(directory).absolute()
    new = folder / str(step)
    try:
        tree = {"state": state, "key": jax.random.key_data(key)}
        if is_first_process():
            _make_room(folder, new, 65536 + 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(tree)))
        wait_for_all(f"checkpoint {step} begins")
        ocp.save(new / ARRAYS, tree)
        if is_first_process():
            run = {"step": step, "identity": _plain(identity), "files": _file_digests(new / ARRAYS)}
            atomic_write(new / RUN, json.dumps(run | {"digest": _digest({}, run)}, indent=1))
            for old in _steps(folder)[:-keep]:
                (folder / str(old) / RUN).unlink()  # one deleted by half must not look complete
                shutil.rmtree(folder / str(old))
        wait_for_all(f"checkpoint {step} is written")
    except Exception as error:  # Orbax, TensorStore and the operating system each have errors of their own.
        if lost_another(error):  # then no file is at fault
            raise
        if is_first_process():
            with contextlib.suppress(OSError):
                _delete_incomplete(folder)
        last = latest_step(folder)
        stays = "there is no older one" if last is None else f"the one of step {last} stays"
        raise CheckpointError(
            f"The checkpoint of step {step} cannot be written to {str(directory)!r} ({_reason(error)}); free disk "
            f"space and go on with --resume ({stays})."
        ) from error


def _make_room(folder: Path, new: Path, size: int) -> None:
    """Makes the folder, removes what a killed run left in it, and sees whether the disk takes `size` bytes.

    Orbax's threads would print tracebacks of their own if it does not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _delete_incomplete(folder)
    atomic_write(new / "room", bytes(size))
    (new / "room").unlink()


def describe(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The newest checkpoint's description: `step`, `identity` and `files` (their digests).

    Raises:
      CheckpointError: there is no checkpoint, or its description is damaged.
    """
    step = latest_step(directory)
    if step is None:
        raise CheckpointError(f"{str(directory)!r} holds no checkpoint; train first, or give another workdir.")
    try:
        run = json.loads((Path(directory) / str(step) / RUN).read_text(encoding="utf-8"))
        digest = run.pop("digest")
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise _damaged(directory, step, _reason(error)) from error
    if digest != _digest({}, run):
        raise _damaged(directory, step, f"{RUN} has changed")
    return run


def restore(
    directory: str | os.PathLike[str], template: TrainState, identity: Mapping[str, Any],
    place: jax.sharding.Sharding | None = None,
) -> tuple[TrainState, Array]:  # fmt: skip
    """Reads the newest checkpoint.

    Args:
      template: a state of the same shapes and types; its values do not matter (`jax.eval_shape` gives one).
      identity: of the run that wants to go on; see `save`.
      place: where the state shall lie, whatever the mesh on which it was saved; None for the first device.

    Returns:
      The state, and the run's typed random key.

    Raises:
      CheckpointError: there is none, it is damaged, or it belongs to another run (the message says what differs).
    """
    from orbax.checkpoint import v1 as ocp

    run = describe(directory)
    folder = Path(directory).absolute() / str(run["step"]) / ARRAYS
    check_identity(directory, run["identity"], identity)
    # Before Orbax reads: it would find some damage only, and its threads print tracebacks of their own.
    files = _file_digests(folder)
    changed = sorted(name for name in files.keys() | run["files"].keys() if files.get(name) != run["files"].get(name))
    if changed:
        raise _damaged(directory, run["step"], f"{ARRAYS}/{changed[0]} is missing or has changed")
    device = place or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = {"state": template, "key": jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree)
    try:
        loaded = ocp.load(folder, abstract)
    except Exception as error:  # as in `save`
        raise _damaged(directory, run["step"], _reason(error)) from error
    return loaded["state"], jax.random.wrap_key_data(loaded["key"])


def check_identity(directory: str | os.PathLike[str], found: Any, wanted: Mapping[str, Any]) -> None:
    """Compares a checkpoint's identity with the part of it that is given.

    Raises:
      CheckpointError: they differ; the message says in what.
    """
    there, here = _flat(found), _flat(_plain(wanted))
    sections = set(wanted)
    differing = [
        f"{name} ({there.get(name, 'absent')!r} there, {here.get(name, 'absent')!r} here)"
        for name in sorted(there.keys() | here.keys())
        if name.split(".")[0] in sections and there.get(name, "absent") != here.get(name, "absent")
    ]
    if differing:
        raise CheckpointError(
            f"The checkpoints in {str(directory)!r} belong to a run that differs in {', '.join(differing)}; use the "
            "same settings, or start in another workdir."
        )


def _damaged(directory: str | os.PathLike[str], step: int, reason: str) -> CheckpointError:
    older = [s for s in _steps(directory) if s < step]
    path = Path(directory) / str(step)
    advice = f"delete it and go on from step {older[-1]} with --resume" if older else "there is no older one"
    return CheckpointError(f"The checkpoint {str(path)!r} is damaged ({reason}); {advice}.")


def _plain(value: Any) -> Any:
    """The value as JSON gives it back: tuples become lists."""
    return json.loads(json.dumps(value))


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping with dotted names."""
    if not isinstance(value, Mapping):
        return {name: value}
    prefix = f"{name}." if name else ""
    return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{prefix}{key}").items()}


def _file_digests(folder: Path) -> dict[str, str]:
    """Digest of every file of a folder, by its path in it."""
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def weights_digest(params: Any) -> str:
    """A short digest of a policy's weights; two policies with the same digest are the same."""
    return _digest(params, {})[:16]


def _digest(tree: Any, description: Mapping[str, Any]) -> str:
    """Digest of all array values and of the description."""
    digest = hashlib.blake2b(json.dumps(description, sort_keys=True).encode(), digest_size=16)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        value = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)}{value.dtype}{value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def _reason(error: BaseException) -> str:
    """The first line of an error, short enough for one sentence."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


# ---------------------------------------------------------------------------------------------------------------------
# Trained policies: <directory>/policy.safetensors and policy.json


def save_policy(directory: str | os.PathLike[str], policy: Any, params: Any, meta: Mapping[str, Any]) -> None:
    """Writes a trained policy: weights and description in `policy.safetensors`, the description again in `policy.json`.

    One file holds all that `load_policy` needs, so a moment at which weights and description disagree does not exist.

    Args:
      policy: a learned policy, such as `DistillCache`. params: its weights, float32.
      meta: JSON values: the model's name and configuration, the step, results.

    Raises:
      WorkdirError: it cannot be written; an older policy stays.
    """
    import safetensors.numpy

    description = {"policy": policy.name, "settings": _plain(dataclasses.asdict(policy)), **_plain(meta)}
    weights = {name: np.asarray(leaf) for name, leaf in _named(params).items()}
    description["digest"] = _digest(weights, description)
    raw = safetensors.numpy.save(weights, metadata={"dcache": json.dumps(description)})
    atomic_write(Path(directory) / WEIGHTS, raw)
    atomic_write(Path(directory) / DESCRIPTION, json.dumps(description, indent=2) + "\n")


def load_policy(path: str | os.PathLike[str]) -> Trained:
    """Reads a trained policy.

    Args:
      path: a directory with `policy.safetensors`, or a workdir that has such a directory `policy`.

    Raises:
      CheckpointError: there is none, it is damaged, or its policy, signals or shapes are unknown to this version.
    """
    file, description, weights = read_policy(path)
    wanted = {k: v for k, v in description.items() if k != "digest"}
    if _digest(weights, wanted) != description.get("digest"):
        raise CheckpointError(f"{str(file)!r} is damaged (its digest is another); copy or train it again.")
    name = description.get("policy")
    learned = sorted(n for n, cls in REGISTRY.items() if hasattr(cls, "init"))
    if name not in learned:
        raise CheckpointError(f"{str(file)!r} holds the policy {name!r}; this version can load {', '.join(learned)}.")
    try:
        policy: Any = make(name, **description["settings"])
    except (DcacheError, KeyError, TypeError) as error:
        raise CheckpointError(f"{str(file)!r} has settings that this version does not know: {error}") from error
    template = jax.eval_shape(policy.init, jax.random.key(0))
    shapes = {name: leaf.shape for name, leaf in _named(template).items()}
    here = {name: value.shape for name, value in weights.items()}
    if shapes != here:
        wrong = min(name for name in shapes.keys() | here.keys() if shapes.get(name) != here.get(name))
        raise CheckpointError(
            f"{str(file)!r}: the weight {wrong} has the shape {here.get(wrong)}, but its policy's settings ask for "
            f"{shapes.get(wrong)}; weights and settings do not belong together."
        )
    leaves = [jax.numpy.asarray(weights[name]) for name in shapes]
    return Trained(policy, jax.tree.unflatten(jax.tree.structure(template), leaves))


def read_policy(path: str | os.PathLike[str]) -> tuple[Path, dict[str, Any], dict[str, np.ndarray]]:
    """File, description and weights of a policy, as they lie there.

    Raises:
      CheckpointError: there is none, or the file cannot be read.
    """
    import safetensors

    file = next((d / WEIGHTS for d in (Path(path), Path(path) / "policy") if (d / WEIGHTS).is_file()), None)
    if file is None:
        raise CheckpointError(
            f"There is no trained policy in {str(path)!r}; give a directory with {WEIGHTS}, or the "
            "workdir of a run; launch/train.py makes one, and policies/ holds trained ones."
        )
    try:
        with safetensors.safe_open(file, framework="np") as handle:
            description = json.loads((handle.metadata() or {})["dcache"])
            weights = {name: handle.get_tensor(name) for name in handle.keys()}
        if not isinstance(description, dict):
            raise ValueError("its description is not an object")
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{str(file)!r} is damaged ({_reason(error)}); copy or train it again.") from error
    return file, description, weights


def _named(params: Any) -> dict[str, Any]:
    """Weights by name, in the order of the tree's leaves: {"params": {"Dense_0": ...}} -> "params/Dense_0/..."."""
    return {
        "/".join(str(step.key) for step in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
