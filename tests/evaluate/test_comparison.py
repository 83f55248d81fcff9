"""Several evaluations of the same prompts as one table, against numbers worked out by hand."""

import copy

import pytest

from dcache.errors import ConfigError
from dcache.evaluate import comparison

KL = {  # method -> KL of retrieval prompts 0 to 3, of text prompts 0 to 3
    "full": ([0.0] * 4, [0.0] * 4),
    "oracle": ([0.5, 0.5, 0.5, 0.5], [0.1] * 4),
    "ours": ([0.1, 0.2, 0.1, 0.2], [0.2, 0.3, 0.2, 0.3]),
    "h2o": ([0.4, 0.5, 0.4, 0.5], [0.2, 0.3, 0.21, 0.29]),
    "tova": ([0.05, 0.1, 0.05, 0.1], [0.9, 1.0, 0.9, 1.0]),
}


def evaluation(*methods, weights=()):
    header = {
        "model": "m", "architecture": {}, "settings": {"unseen": 0}, "prompts": {"retrieval": 4, "text": 4},
        "prompts_digest": "d",
        "arms": [
            {"method": m, "budget": "100%" if m == "full" else "25%", "weights": "w" if m in weights else None}
            for m in ("full", *methods)
        ],
    }  # fmt: skip
    records = []
    for kind in (0, 1):
        for i in range(4):
            arms = {}
            for method in ("full", *methods):
                cell = {"kl": KL[method][kind][i], "nll": 1.0, "kept": 0.25}
                if kind == 0:
                    cell["correct"] = method in ("full", "ours") and i < 3 - (method == "ours")
                arms[method] = {"100%" if method == "full" else "25%": cell}
            records.append({"name": f"{kind}{i}", "kind": ("retrieval", "text")[kind], "arms": arms})
    return header, records


@pytest.fixture
def parts():
    return [evaluation("oracle", "h2o"), evaluation("tova"), evaluation("ours", weights=("ours",))]


def test_merge(parts):
    before = copy.deepcopy(parts)
    header, records = comparison.merge(parts)
    assert [arm["method"] for arm in header["arms"]] == ["full", "oracle", "h2o", "tova", "ours"]
    assert [record["name"] for record in records] == [f"{k}{i}" for k in (0, 1) for i in range(4)]
    assert records[1]["arms"]["ours"]["25%"]["kl"] == 0.2 and records[6]["arms"]["h2o"]["25%"]["kl"] == 0.21
    assert parts == before  # what was merged is as it was
    with pytest.raises(ConfigError, match="the method 'tova'"):
        comparison.merge([*parts, evaluation("tova")])
    other = evaluation("tova")
    other[0]["prompts_digest"] = "e"
    with pytest.raises(ConfigError, match="differ in prompts_digest"):
        comparison.merge([parts[0], other])


def test_order_and_table(parts):
    results = {"aware": comparison.merge(parts)}
    # sqrt(0.15 * 0.25) = 0.19, sqrt(0.075 * 0.95) = 0.27, sqrt(0.45 * 0.25) = 0.34; the oracle is on top in any case
    assert comparison.order(results, "25%") == ["oracle", "ours", "tova", "h2o"]
    lines = comparison.table(results, "25%").splitlines()
    assert lines[0].split("|")[1:5] and [line.split("|")[1].strip() for line in lines[2:]] == [
        "full", "oracle", "ours", "tova", "h2o",
    ]  # fmt: skip
    row = [cell.strip() for cell in lines[4].strip("|").split("|")]
    assert row[1].startswith("0.250 [") and row[2].startswith("0.150 [") and row[3].startswith("50.0 [")
    assert "hidden" not in lines[0]
    both = comparison.table(results | {"agnostic": results["aware"]}, "25%")
    assert both.splitlines()[0].count("hidden") == 2


def test_a_method_that_one_evaluation_lacks(parts):
    results = {"aware": comparison.merge(parts), "agnostic": comparison.merge(parts[1:])}
    row = next(line for line in comparison.table(results, "25%").splitlines() if line.startswith("| h2o"))
    assert [cell.strip() for cell in row.strip("|").split("|")][4:] == ["n/a", "n/a"]
    hidden = comparison.verdict(results, "ours", "25%")[2]
    assert "hidden" in hidden and "h2o" not in hidden and "tova" in hidden


def test_verdict(parts):
    results = {"aware": comparison.merge(parts)}
    text, retrieval, kept = comparison.verdict(results, "ours", "25%")
    assert "text KL" in text and "1.00" in text and "next best; above it: none; undecided: h2o." in text
    assert "of tova" in retrieval and "2.00" in retrieval and "above it: tova; undecided: none." in retrieval
    assert "keeps 66.7" in kept


def test_the_whole_text_and_the_best_setting(parts):
    header, records = comparison.merge(parts)
    whole = comparison.markdown({"aware": (header, records)}, ["25%"], "ours", {"h2o": "h2o(recent_share=0.1)"})
    assert "### 25% of the cache" in whole and "4 retrieval, 4 text" in whole and "`h2o(recent_share=0.1)`" in whole
    assert comparison.best_setting(header, records, ["h2o", "tova"], "25%") == "tova"
    assert "above it" not in comparison.markdown({"aware": (header, records)}, ["25%"], "", {})
