import base64
import re

from made_up import Tags

from dcache.evaluate import pictures, report


def page(sample, tmp_path):
    header, records = sample
    pictures.retained(header, records, tmp_path / "a.png")
    shown = [report.Picture("kept <where>", tmp_path / "a.png")]
    return report.page("A & B", header, records, shown, ["python x --y='1'"], {"seed": 7, "budgets": (0.5, 0.25)})


def test_self_contained(sample, tmp_path):
    text = page(sample, tmp_path)
    tags = Tags(text).found
    assert not {"script", "link", "iframe"} & {tag for tag, _ in tags}
    sources = [attributes["src"] for _, attributes in tags if "src" in attributes]
    assert len(sources) == 1 and not any("href" in attributes for _, attributes in tags)
    assert "http:" not in text and "https:" not in text and "url(" not in text
    kind, data = sources[0].split(",", 1)
    assert kind == "data:image/png;base64" and base64.b64decode(data) == (tmp_path / "a.png").read_bytes()


def test_readable_on_a_phone(sample, tmp_path):
    text = page(sample, tmp_path)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert "max-width" in text and "overflow-x: auto" in text
    assert text.count('<div class="scroll"><table>') == text.count("<table>") >= 4


def test_contents(sample, tmp_path):
    text = page(sample, tmp_path)
    for part in ("<h1>A &amp; B</h1>", "made &lt;up&gt;", "kept &lt;where&gt;", "Retrieval prompts", "Plain text",
                 "python x --y=", "&quot;seed&quot;: 7", "once, after the prompt"):  # fmt: skip
        assert part in text, part
    for name, version in report.versions().items():
        assert f"<td>{name}</td><td>{version}</td>" in text
    assert len(re.findall(r'<tr class="trained"><td>ours', text)) == 2 * 2 + 2  # in each result table, and its settings
    assert "<li>ours at 25%" in text
    assert '<tr class="trained"><td>h2o' not in text


def test_versions():
    found = report.versions()
    assert found["python"].startswith("3.") and found["jax"][0].isdigit()
