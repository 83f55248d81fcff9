"""Results on disk: one JSON line per prompt, written as they come, so that an evaluation can be taken up again."""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from dcache import checkpoint
from dcache.data.prompts import Prompt
from dcache.errors import CheckpointError, ConfigError, DcacheError
from dcache.evaluate import fidelity
from dcache.load import LanguageModel
from dcache.sharding import on_its_mesh

Record = dict[str, Any]


def describe(
    lm: LanguageModel, prompts: Sequence[Prompt], arms: Sequence[fidelity.Arm], settings: fidelity.Settings
) -> Record:
    """Everything that the results depend on, JSON-ready: the first line of a results file."""
    return {
        "model": lm.name,
        "architecture": dataclasses.asdict(lm.config),
        "settings": dataclasses.asdict(settings),
        "prompts": {kind: sum(p.kind == kind for p in prompts) for kind in ("retrieval", "text")},
        "prompts_digest": digest(
            part
            for p in prompts
            for part in (p.name, p.kind, p.tokens, p.continuation[: settings.horizon], "\0".join(p.answers))
        ),
        "arms": describe_arms(arms),
    }


def describe_arms(arms: Sequence[fidelity.Arm]) -> list[Record]:
    """What results depend on of each arm, JSON-ready."""
    return [
        {
            "method": arm.method,
            "budget": fidelity.budget_name(arm.budget),
            "policy": repr(arm.policy),
            "granularity": arm.policy.granularity,
            "weights": checkpoint.weights_digest(arm.params) if jax.tree.leaves(arm.params) else None,
        }
        for arm in arms
    ]


def digest(parts) -> str:
    """A short digest of texts and arrays, in their order."""
    found = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else np.ascontiguousarray(part).tobytes()
        found.update(len(raw).to_bytes(8, "big") + raw)
    return found.hexdigest()[:16]


@on_its_mesh
def run(
    lm: LanguageModel, prompts: Sequence[Prompt], arms: Sequence[fidelity.Arm], settings: fidelity.Settings,
    path: str | os.PathLike[str],
) -> tuple[Record, list[Record]]:  # fmt: skip
    """Evaluates what a results file does not hold yet, with a progress bar, and writes each result at once.

    Args:
      path: the JSON-lines file, made if it is not there. Other arguments: see `fidelity.evaluate`.

    Returns:
      The header, and the records of all prompts in the order of `prompts`.

    Raises:
      ConfigError: the file holds results of other settings.
      CheckpointError: the file is damaged.
      DcacheError: the file cannot be written; results written before stay.
    """
    path = pathlib.Path(path)
    header = describe(lm, prompts, arms, settings)
    found = read(path) if path.exists() else None
    if found is not None:
        check_header(path, found[0], header)
    done = {record["name"]: record for record in found[1]} if found else {}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a" if found else "w", encoding="utf-8") as file:
            if not found:
                write_line(file, header)
            with tqdm(total=len(prompts), initial=len(done), desc="evaluating", unit="prompt", smoothing=0.1) as bar:
                for record in fidelity.evaluate(lm, prompts, arms, settings, skip=frozenset(done)):
                    write_line(file, record)
                    done[record["name"]] = record
                    bar.update()
    except OSError as error:
        raise DcacheError(
            f"Results cannot be written to {path} ({error.strerror}); the {len(done)} finished prompts stay: "
            "make room and run the same command again."
        ) from error
    return header, [done[prompt.name] for prompt in prompts]


def write_line(file, line: Record) -> None:
    """Appends one JSON line that is on disk when this returns."""
    file.write(json.dumps(line, allow_nan=False) + "\n")
    file.flush()


def read(path: str | os.PathLike[str]) -> tuple[Record, list[Record]] | None:
    """The header and the records of a results file; None if not even its header is complete.

    A last line that a killed run left unfinished is cut off from the file.

    Raises:
      CheckpointError: another line is damaged, or the file cannot be read.
    """
    path = pathlib.Path(path)
    try:
        raw = path.read_bytes()
        complete = raw[: raw.rfind(b"\n") + 1]
        if len(complete) < len(raw):
            os.truncate(path, len(complete))
    except OSError as error:
        raise CheckpointError(f"The results {path} cannot be read ({error.strerror}); give another file.") from error
    lines: list[Record] = []
    for number, line in enumerate(complete.splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise CheckpointError(
                f"Line {number} of {path} is damaged; delete that line to evaluate its prompt again, or the whole file."
            ) from error
    if not lines:
        return None
    if "arms" not in lines[0] or "settings" not in lines[0] or any("name" not in record for record in lines[1:]):
        raise CheckpointError(f"{path} does not hold evaluation results; delete it or give another file.")
    return lines[0], lines[1:]


def check_header(path: pathlib.Path, found: Record, wanted: Record) -> None:
    """Raises ConfigError if a results file holds those of another evaluation."""
    wanted = json.loads(json.dumps(wanted))  # Tuples become lists, as in the file.
    differ = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
    if differ:
        raise ConfigError(
            f"{path} holds results of another evaluation ({', '.join(differ)} differ); "
            "delete it to evaluate anew, or choose another workdir."
        )
