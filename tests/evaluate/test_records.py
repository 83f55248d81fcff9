import dataclasses
import json

import jax
import numpy as np
import pytest
from conftest import LENGTH

from dcache import checkpoint
from dcache.errors import CheckpointError, ConfigError, DcacheError
from dcache.evaluate import fidelity, records

SETTINGS = fidelity.Settings(length=LENGTH, horizon=4, new_tokens=3, batch=2)


@pytest.fixture(scope="module")
def arms():
    return fidelity.make_arms({"random": fidelity.heuristic("random")}, [12], 40)


@pytest.fixture(scope="module")
def finished(lm, prompts, arms, tmp_path_factory):
    """Header, records and the bytes of the file of a run that was not interrupted."""
    path = tmp_path_factory.mktemp("whole") / "sub" / "results.jsonl"
    header, found = records.run(lm, prompts, arms, SETTINGS, path)
    return header, found, path.read_bytes()


def lines(raw):
    return raw.splitlines(keepends=True)


def test_file_holds_everything_in_order(finished, prompts):
    header, found, raw = finished
    assert [record["name"] for record in found] == [prompt.name for prompt in prompts]
    parsed = [json.loads(line) for line in lines(raw)]
    assert parsed[1:] == found and parsed[0] == json.loads(json.dumps(header))
    assert header["prompts"] == {"retrieval": 3, "text": 2}


def test_same_settings_give_the_same_bytes(finished, lm, prompts, arms, tmp_path):
    records.run(lm, prompts, arms, SETTINGS, tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == finished[2]


@pytest.mark.parametrize("whole_lines", [1, 2, 4])
def test_cut_off_anywhere_it_goes_on(finished, lm, prompts, arms, tmp_path, monkeypatch, whole_lines):
    """Also in the middle of a block of prompts; the unfinished line is evaluated again, the finished ones are not."""
    path, parts = tmp_path / "results.jsonl", lines(finished[2])
    path.write_bytes(b"".join(parts[:whole_lines]) + parts[whole_lines][:25])
    evaluated = []
    one = fidelity._evaluate_one
    monkeypatch.setattr(
        fidelity, "_evaluate_one", lambda lm, prompt, *rest: evaluated.append(prompt.name) or one(lm, prompt, *rest)
    )
    _, found = records.run(lm, prompts, arms, SETTINGS, path)
    assert path.read_bytes() == finished[2] and found == finished[1]
    assert evaluated == [prompt.name for prompt in prompts[whole_lines - 1 :]]


def test_finished_run_does_no_work(finished, lm, prompts, arms, tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    path.write_bytes(finished[2])
    monkeypatch.setattr(fidelity, "_read", None)  # calling it would fail
    assert records.run(lm, prompts, arms, SETTINGS, path)[1] == finished[1]


def test_cut_off_header_starts_anew(finished, lm, prompts, arms, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_bytes(finished[2][:40])
    records.run(lm, prompts, arms, SETTINGS, path)
    assert path.read_bytes() == finished[2]


def test_other_settings_are_refused(finished, lm, prompts, arms, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_bytes(finished[2])
    other_seed = dataclasses.replace(SETTINGS, seed=5)
    more = fidelity.make_arms({"random": fidelity.heuristic("random")}, [13], 40)
    altered = dataclasses.replace(prompts[0], tokens=prompts[0].tokens[::-1].copy())
    for arguments, name in (
        ((lm, prompts, arms, other_seed), "settings"),
        ((lm, prompts, more, SETTINGS), "arms"),
        ((lm, prompts[1:], arms, SETTINGS), "prompts, prompts_digest"),
        ((lm, [altered, *prompts[1:]], arms, SETTINGS), "prompts_digest"),
        ((dataclasses.replace(lm, name="other"), prompts, arms, SETTINGS), "model"),
    ):
        with pytest.raises(ConfigError, match=rf"another evaluation \({name} differ\)"):
            records.run(*arguments, path)
    assert path.read_bytes() == finished[2]


def test_damaged_line_is_named(finished, lm, prompts, arms, tmp_path):
    path, parts = tmp_path / "results.jsonl", lines(finished[2])
    path.write_bytes(b"".join([parts[0], parts[1], parts[2].replace(b":", b"", 1), *parts[3:]]))
    with pytest.raises(CheckpointError, match="Line 3 of"):
        records.run(lm, prompts, arms, SETTINGS, path)
    path.write_text('{"step": 1}\n')
    with pytest.raises(CheckpointError, match="does not hold evaluation results"):
        records.run(lm, prompts, arms, SETTINGS, path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        records.read(tmp_path)


def test_full_disk_keeps_what_was_written(finished, lm, prompts, arms, tmp_path, monkeypatch):
    path, write = tmp_path / "results.jsonl", records.write_line

    def full_after_two(file, line):
        if line.get("name") == prompts[2].name:
            file.write('{"name": "hal')
            file.flush()
            raise OSError(28, "No space left on device")
        write(file, line)

    monkeypatch.setattr(records, "write_line", full_after_two)
    with pytest.raises(DcacheError, match=r"No space left on device\); the 2 finished prompts stay"):
        records.run(lm, prompts, arms, SETTINGS, path)
    monkeypatch.setattr(records, "write_line", write)
    records.run(lm, prompts, arms, SETTINGS, path)
    assert path.read_bytes() == finished[2]


def test_weights_digest_sees_values_and_names():
    params = {"a": np.zeros(3, np.float32), "b": np.ones(3, np.float32)}
    digest = checkpoint.weights_digest(params)
    assert digest == checkpoint.weights_digest(jax.tree.map(np.copy, params))
    assert digest != checkpoint.weights_digest({"b": params["a"], "c": params["b"]})
    assert digest != checkpoint.weights_digest(jax.tree.map(lambda x: x + 1e-6, params))
