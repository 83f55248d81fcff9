import json

import matplotlib.image
import numpy as np
import pytest

from dcache.errors import LoadError
from dcache.evaluate import pictures, tables


def drawn(path):
    """A PNG that a decoder can read, as f32[height, width, 4]; not a blank page, and no half-written file beside it."""
    assert path.read_bytes().startswith(b"\x89PNG") and not list(path.parent.glob("*.part.png"))
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[1] >= 700 and np.ptp(pixels[..., :3]) == 1.0
    return pixels


def has_colour(pixels, colour):
    wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return bool(np.any(np.all(np.abs(pixels[..., :3] - wanted) < 0.01, axis=-1)))


def only(header, records, budget):
    """The sample with one budget, besides the full cache."""
    header = header | {"arms": [arm for arm in header["arms"] if arm["budget"] in (budget, "100%")]}
    return header, records


def test_kl_by_budget(sample, tmp_path):
    pictures.kl_by_budget(sample[0], tables.cells(*sample), tmp_path / "a.png")
    assert has_colour(drawn(tmp_path / "a.png"), pictures._TRAINED[0])


def test_kl_for_one_budget(sample, tmp_path):
    header, records = only(*sample, "25%")
    pictures.kl_by_budget(header, tables.cells(header, records), tmp_path / "a.png")
    assert has_colour(drawn(tmp_path / "a.png"), pictures._TRAINED[0])


def test_single_prompt_and_perfect_policy(sample, tmp_path):
    """Infinite intervals and a KL of zero (or just below, by rounding) do not break the logarithmic axis."""
    header, records = sample
    for record in records[:2]:
        for budget in ("50%", "25%"):
            record["arms"]["ours"][budget]["kl"] = -1e-9
    pictures.kl_by_budget(header, tables.cells(header, records[:2]), tmp_path / "a.png")
    drawn(tmp_path / "a.png")


@pytest.mark.parametrize("budget", ["25%", None])
def test_retained(sample, tmp_path, budget):
    header, records = only(*sample, budget) if budget else sample
    pictures.retained(header, records, tmp_path / "a.png")
    assert has_colour(drawn(tmp_path / "a.png"), pictures._TRAINED[0])


def write_metrics(path, steps, sampled=True):
    lines = [{"step": s, "reward": -1.0 / (s + 1)} | ({"surprise": 5.0 - s / 9} if sampled else {})
             for s in range(1, steps + 1)]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


@pytest.mark.parametrize("steps", [1, 5, 100])
def test_training(tmp_path, steps):
    pictures.training({"run": write_metrics(tmp_path / "metrics.jsonl", steps)}, tmp_path / "a.png")
    drawn(tmp_path / "a.png")


def test_training_of_several_runs(tmp_path):
    runs = {name: write_metrics(tmp_path / f"{name}.jsonl", 30) for name in ("a", "b")}
    pictures.training(runs, tmp_path / "a.png")
    assert has_colour(drawn(tmp_path / "a.png"), pictures._COLOURS[0])


def test_training_without_sampled_keep_sets(tmp_path):
    relaxed = write_metrics(tmp_path / "relaxed.jsonl", 30, sampled=False)
    pictures.training({"relaxed": relaxed}, tmp_path / "a.png")
    pictures.training({"relaxed": relaxed, "sampled": write_metrics(tmp_path / "b.jsonl", 30)}, tmp_path / "b.png")
    one, two = drawn(tmp_path / "a.png"), drawn(tmp_path / "b.png")
    assert one.shape[0] < two.shape[0]  # no empty panel


def test_training_of_a_supervised_method(tmp_path):
    ranked = tmp_path / "ranked.jsonl"
    ranked.write_text("".join(f'{{"step": {step}, "loss": {1 / step}}}\n' for step in range(1, 31)))
    pictures.training({"ranked": ranked}, tmp_path / "a.png")
    rewarded = write_metrics(tmp_path / "b.jsonl", 30, sampled=False)
    pictures.training({"ranked": ranked, "rewarded": rewarded}, tmp_path / "b.png")
    assert drawn(tmp_path / "a.png").shape[0] < drawn(tmp_path / "b.png").shape[0]


def test_training_without_metrics(tmp_path):
    with pytest.raises(LoadError, match="cannot be read"):
        pictures.training({"run": tmp_path / "none.jsonl"}, tmp_path / "a.png")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(LoadError, match="hold no step"):
        pictures.training({"run": tmp_path / "empty.jsonl"}, tmp_path / "a.png")


def test_labels_are_apart_and_near():
    heights = {"a": 1.0, "b": 1.01, "c": 1.02, "d": 9.0}
    placed = pictures._apart(heights, 0.5)
    assert list(placed) == ["a", "b", "c", "d"]
    assert np.all(np.diff(list(placed.values())) >= 0.5 - 1e-9)
    assert np.mean(list(placed.values())) == pytest.approx(np.mean(list(heights.values())))
