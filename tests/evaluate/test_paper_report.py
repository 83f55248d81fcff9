import importlib
import json
import re

import made_up
import pytest

from dcache.errors import CheckpointError, ConfigError, LoadError
from dcache.evaluate import paper_report


def load(part):
    return importlib.import_module(f"configs.paper.{part}").get_config().to_dict()


def make(tmp_path, part, **changes):
    """The report of one configuration in tmp_path/out, as Markdown."""
    config = load(part) | changes
    plans = paper_report.make_plans(config, load)
    return paper_report.write(plans, tmp_path / "out", title="The paper", commands=["python x"], config=config)


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    for seed in (0, 1):
        made_up.write(folder / f"seed{seed}", *made_up.results(seed=seed, budgets=("25%",)))
    return str(folder)


def row(markdown, first, after=""):
    """Cells of the first row that begins with `first`, after a text."""
    text = markdown[markdown.index(after) :]
    return [cell.strip() for cell in re.search(rf"^\| {re.escape(first)} .*$", text, re.M)[0].strip("|").split("|")]


def test_everything_at_small_scale(tmp_path, benchmark, monkeypatch):
    (tmp_path / "run").mkdir()
    lines = [json.dumps({"step": i, "reward": -1 / i, "surprise": 3.0}) for i in range(1, 9)]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "view.html").write_text("<p>tokens</p>")
    real = load

    def with_training(part):
        config = real(part)
        return (
            config | {"training": {"ours": str(tmp_path / "run"), "gone": "nowhere"}} if config["training"] else config
        )

    config = real("all") | {"model": "smollm2", "runs": (benchmark,), "viewer": str(tmp_path / "view.html")}
    plans = paper_report.make_plans(config, with_training)
    text = paper_report.write(plans, tmp_path / "out", title="A & B", commands=["python x <y>"], config=config)

    # The paper's number, what is missing for it, and what was measured instead, which is no reproduction.
    cells = row(text, "H2O", "**LongBench 25%**")
    assert cells[1:3] == ["36.4 (1.5)", "not run: needs Mistral-7B-Instruct-v0.3"] and "[" in cells[3]
    assert "2 of 15 tasks" in cells[-1] and "2 runs: " in cells[-1] and cells[-2] == "24"
    assert "smollm2, no reproduction" in text and "| difference" not in text
    assert row(text, "RLKV", "**LongBench 25%**")[-1] == "smollm2: not run: no arm rlkv at 25%"
    assert row(text, "H2O", "**LongBench 50%**")[-1] == "smollm2: not run: no arm h2o at 50%"
    assert "full cache not above chance on 1 of 2 tasks" in row(text, "H2O", "**Reasoning 25%**")[-1]  # GSM8K
    assert "two RTX 4090" in text and "not measured: bench.json has no attention_ms of h2o" in text
    assert "Table 5 are not at hand" in text and "not run: gone (nowhere)" in text
    for heading in ("Retention", "Fidelity and perplexity", "distillcache against the others", "Scores in percent at 25%",
                    "Errors and length of the answers", "RULER by context length", "What was run", "Pictures"):  # fmt: skip
        assert f"## smollm2: {heading}" in text, heading

    page = (tmp_path / "out" / "report.html").read_text()
    tags = made_up.Tags(page).found
    assert "<h1>A &amp; B</h1>" in page and "python x &lt;y&gt;" in page and "python launch/eval.py" in page
    assert not {"script", "link", "iframe"} & {tag for tag, _ in tags} and "url(" not in page
    sources = [attributes["src"] for _, attributes in tags if "src" in attributes]
    assert len(sources) == 3 and all(source.startswith("data:image/png;base64,") for source in sources)
    links = [attributes["href"] for _, attributes in tags if "href" in attributes]
    assert "../view.html" in links
    anchors = {attributes["id"] for _, attributes in tags if "id" in attributes}
    assert all(link == "../view.html" or link.removeprefix("#") in anchors for link in links)
    assert not re.search(r"(src|href)=.https?:", page)

    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert set(summary["paper"]) == {plan.name for plan in plans} and summary["models"] == ["smollm2"]
    cell = next(c for c in summary["paper"]["table1"] if c["row"] == "H2O" and c["column"] == "LongBench 25%")
    assert cell["paper"] == 36.4 and cell["ours"] is None and len(cell["other"]["seeds"]) == 2
    assert summary["versions"]["python"] and summary["config"]["model"] == "smollm2"
    assert (tmp_path / "out" / "table.md").read_text() == text


def test_on_the_papers_own_model(tmp_path):
    header, records = made_up.results(model="mistralai/Mistral-7B-Instruct-v0.3", budgets=("25%",), prompts=20)
    place = made_up.write(tmp_path / "results", header, records)
    text = make(tmp_path, "table2", runs=(str(place),))
    cells = row(text, "H2O", "**2K**")
    heads = row(text, "method")
    assert heads[:4] == ["method", "paper (sd)", "this project", "difference"] and "no reproduction" not in text
    value = float(cells[2].split()[0])
    assert float(cells[3].split()[0]) == pytest.approx(value - 40.2, abs=0.06)
    assert row(text, "RLKV", "**2K**")[2] == "not run: no arm rlkv at 25%"
    assert row(text, "H2O", "**8K**")[2] == "not run: no prompt of LongBench of 8K tokens with a score"


def test_nothing_was_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = make(tmp_path, "table1")
    note = next(line for line in text.splitlines() if line.startswith("No results in "))
    for seed in ("", "-seed1", "-seed4"):
        assert f"runs/Mistral-7B-Instruct-v0.3{seed}/benchmarks" in note
    expected = "not run: no results in runs/Mistral-7B-Instruct-v0.3/benchmarks"
    assert row(text, "DistillCache")[1:3] == ["40.5 (0.9)", expected]
    for figure in ("figure2", "figure3", "figure4", "figure5", "table5"):
        text = make(tmp_path, figure)
        assert "not run: " in text or "not made: " in text or "not at hand" in text
    made_up.Tags((tmp_path / "out" / "report.html").read_text())


def test_latency_of_a_benchmark_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    of = {"model": "smollm2", "prompt": 2000, "budget": 0.25, "evict_every": 16, "machine": "cpu, 2 processors"}
    numbers = {"latency": {"snapkv": {"features_ms": 0.31, "tokens_per_second": 12.34}}, "latency_of": of}
    (tmp_path / "bench.json").write_text(json.dumps(numbers))
    text = make(tmp_path, "table3", model="smollm2")
    cells = row(text, "SnapKV", "**features ms**")
    assert cells[1:4] == ["0.2", "not run: needs Mistral-7B-Instruct-v0.3 on two RTX 4090", "0.31"]
    assert row(text, "SnapKV", "**tokens per second**")[3] == "12.3"
    assert row(text, "H2O", "**policy ms**")[-1] == "smollm2: not measured: bench.json has no policy_ms of h2o"
    assert "Measured here: smollm2, cpu, 2 processors; prompt of 2000 tokens, 25% of the cache" in text
    assert "No results in" not in text  # it needs no benchmark
    other = make(tmp_path, "table3", model="another/model")
    assert "another/model: not measured" not in other and "model: not measured: bench.json is of smollm2" in other
    (tmp_path / "bench.json").write_text("{")
    with pytest.raises(LoadError, match="bench.json cannot be read as JSON"):
        make(tmp_path, "table3", model="smollm2")


def test_full_cache_at_chance(tmp_path):
    header, records = made_up.results(tasks=("gsm8k_cot",), budgets=("25%",))
    text = make(tmp_path, "table1", model="smollm2", runs=(str(made_up.write(tmp_path / "r", header, records)),))
    assert row(text, "H2O", "**Reasoning 25%**")[4] == "full cache not above chance"
    assert "Full cache clearly above chance on no task" in text and "full cache at chance (5%)" in text


def test_errors(tmp_path, benchmark):
    with pytest.raises(LoadError, match="No results.jsonl in .*gone or a folder in it"):
        make(tmp_path, "table1", runs=(benchmark, str(tmp_path / "gone")))
    with pytest.raises(LoadError, match="no retention viewer 'gone.html'"):
        make(tmp_path, "figure2", runs=(benchmark,), viewer="gone.html")
    header, records = made_up.results(prompts=1)
    del records[0]["arms"]["h2o"]["50%"]
    with pytest.raises(CheckpointError, match="line 2: the result of h2o at 50% is missing"):
        make(tmp_path, "table1", runs=(str(made_up.write(tmp_path / "bad", header, records)),))
    with pytest.raises(ConfigError, match="does not know sedes"):
        make(tmp_path, "table1", sedes=3)
    with pytest.raises(ConfigError, match="The paper has no 'table11'"):
        make(tmp_path, "table1", name="table11")
    with pytest.raises(ConfigError, match="The paper has no 'table11'"):
        make(tmp_path, "all", parts=("table11",))
