"""The page: self-contained, the same numbers as the trace, safe text, and drawn without an error by a real browser."""

import base64
import dataclasses
import html
import json
import re
import shutil
import subprocess
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest

from dcache.evaluate import viewer
from dcache.evaluate.tracing import MethodTrace, Trace

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NASTY = ["</script>", "<!--", "\"'", "\n\n", "\\u003c", "Größe", "日本", "\u2028", "<b>", "&amp;", "\t", " "]
LAYERS, HEADS, LENGTH, FED = 2, 3, 300, 6


class Words:
    """Every token is a text of its own, but token 0, which is special and has none, and 98 and 99, half a character each."""

    bos_id, eos_ids, vocab_size = None, (97,), 100

    def decode(self, ids):
        parts = [
            {98: b"\xc3", 99: b"\xa9", 0: b""}.get(i, (NASTY[i % 16] if i % 16 < len(NASTY) else f" w{i}").encode())
            for i in map(int, ids)
        ]
        return b"".join(parts).decode("utf-8", errors="replace")


def make_method(seed, evicted_at=None):
    rng = np.random.default_rng(seed)
    if evicted_at is None:
        evicted_at = rng.choice([-1, 0, 2, 4], (LAYERS, HEADS, LENGTH + FED)).astype(np.int16)
        evicted_at[..., LENGTH:] = -1
    return MethodTrace(
        policy="Made(up=True)",
        evicted_at=evicted_at,
        score=(1e-6 * rng.normal(size=(LAYERS, HEADS, LENGTH)) ** 3).astype(np.float32),
        kl=rng.random(FED).astype(np.float32),
        agrees=np.array([1, 1, 0, 1, 0, 1], bool),
        choice=rng.integers(1, 90, FED).astype(np.int32),
        tokens=np.array([5, 6, 7, 1, 97], np.int32),
        text="unused",
    )


@pytest.fixture(scope="module")
def trace():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 96, LENGTH).astype(np.int32)
    tokens[:5] = [0, 16, 98, 99, 0]
    return Trace(
        model="made <up>", budget=0.25, evict_every=2, tokens=tokens, continuation=np.arange(5, 5 + FED, dtype=np.int32),
        signals=rng.random((LENGTH, 4)).astype(np.float32),
        methods={"h2o": make_method(1), "</script> x(a, b=1)&": make_method(2)},
    )  # fmt: skip


@pytest.fixture(scope="module")
def page(trace):
    return viewer.page(trace, Words(), 'A "title" & </title><script>x</script>')


class Scripts(HTMLParser):
    """The contents of all script elements by id, and every address that the page would load."""

    def __init__(self, text):
        super().__init__()
        self.found, self.loads, self.titles = {}, [], []
        self._open = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self._open = (tag, attributes.get("id"))
        self.loads += [value for name, value in attributes.items() if name in ("src", "href", "srcset", "action")]

    def handle_data(self, data):
        if self._open and self._open[0] == "script":
            self.found[self._open[1]] = self.found.get(self._open[1], "") + data
        if self._open and self._open[0] == "title":
            self.titles.append(data)

    def handle_endtag(self, tag):
        self._open = None


def array(scripts, name, dtype, *shape):
    return np.frombuffer(zlib.decompress(base64.b64decode(scripts.found[name])), dtype).reshape(shape)


def test_page_loads_nothing(page):
    scripts = Scripts(page)
    assert scripts.loads == [] and "@import" not in page and "url(" not in page
    assert not re.search(r"https?://", page.replace(scripts.found["trace"], ""))
    assert set(scripts.found) == {"trace", "signals", "evicted-0", "score-0", "evicted-1", "score-1", None}


def test_page_holds_the_numbers_of_the_trace(page, trace):
    scripts = Scripts(page)
    summary = json.loads(scripts.found["trace"])
    assert (summary["layers"], summary["heads"], summary["prompt"]) == (LAYERS, HEADS, LENGTH)
    assert summary["steps"] == [0, 2, 4] and summary["budget"] == "25%" and summary["model"] == "made <up>"
    np.testing.assert_array_equal(array(scripts, "signals", "<f4", LENGTH, 4), trace.signals)
    for i, (label, method) in enumerate(trace.methods.items()):
        shown = summary["methods"][i]
        assert shown["label"] == label
        steps = np.array([-1, *summary["steps"]])  # number 0 is "never"
        number = array(scripts, f"evicted-{i}", "<u2", LAYERS, HEADS, LENGTH + FED)
        np.testing.assert_array_equal(steps[number], method.evicted_at)
        scale = np.asarray(shown["scale"], np.float32).reshape(LAYERS, HEADS, 1)
        score = array(scripts, f"score-{i}", "<f2", LAYERS, HEADS, LENGTH).astype(np.float32) * scale
        np.testing.assert_allclose(score, method.score, rtol=1e-3, atol=1e-6 * scale.max())
        np.testing.assert_array_equal(np.asarray(shown["kl"], np.float32), method.kl)
        assert shown["agrees"] == [1, 1, 0, 1, 0, 1]
        assert shown["own"][:4] == [NASTY[5], NASTY[6], NASTY[7], NASTY[1]] and shown["same"] == 3


def test_pieces_are_the_text(page, trace):
    pieces = json.loads(Scripts(page).found["trace"])["pieces"]
    everything = np.concatenate([trace.tokens, trace.continuation])
    assert "".join(pieces) == Words().decode(everything)
    assert pieces[:5] == ["", "</script>", "", "é", ""] and len(pieces) == LENGTH + FED
    assert viewer.pieces(np.array([], np.int32), Words()) == []
    assert viewer.pieces(np.array([16, 98]), Words()) == ["</script>", "\ufffd"]


@pytest.mark.parametrize(
    ("own", "same"),
    [
        ([5, 6, 7, 8, 9, 10, 97], 7),  # says the same and ends
        ([5, 6, 7, 8, 9, 10, 11], 6),  # goes on where the full cache ended
        ([5, 6, 97], 2),  # ends too early
        ([4, 6, 7], 0),
        ([5, 6, 7, 8, 9, 10], 6),
    ],
)
def test_where_the_own_text_leaves_that_of_the_full_cache(trace, own, same):
    method = dataclasses.replace(make_method(1), tokens=np.array(own, np.int32))
    scripts = Scripts(viewer.page(dataclasses.replace(trace, methods={"m": method}), Words(), "t"))
    assert json.loads(scripts.found["trace"])["methods"][0]["same"] == same


def test_title_is_text(page):
    assert "".join(Scripts(page).titles) == 'A "title" & </title><script>x</script>'


def test_scores_of_zero_and_one_eviction(trace):
    method = dataclasses.replace(
        make_method(1, np.full((LAYERS, HEADS, LENGTH + FED), -1, np.int16)),
        score=np.zeros((LAYERS, HEADS, LENGTH), np.float32),
    )
    scripts = Scripts(viewer.page(dataclasses.replace(trace, evict_every=0, methods={"full": method}), Words(), "t"))
    assert json.loads(scripts.found["trace"])["steps"] == [0]
    assert not array(scripts, "score-0", "<f2", LAYERS, HEADS, LENGTH).any()
    assert not array(scripts, "evicted-0", "<u2", LAYERS, HEADS, LENGTH + FED).any()


def draw(path, address=""):
    """What Chromium makes of the page, as HTML."""
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent / 'profile'}",
        "--virtual-time-budget=10000", "--dump-dom", f"file://{path}{address}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    body = re.search(r"<body[^>]*>", done.stdout).group()
    assert "data-error" not in body, body
    assert "data-ready" in body, body
    return body, done.stdout


def tokens_of(dom):
    """(class, text) of every token element."""
    area = dom[dom.index('id="tokens"') : dom.index('id="tip"')]
    return re.findall(r'<i(?: data-other="")? class="([a-z0-9]+)">([^<]*)</i>', area)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_browser(page, trace, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page, encoding="utf-8")
    body, dom = draw(path)
    assert 'data-ready="all all h2o,' in body
    found = tokens_of(dom)
    assert len(found) == 2 * (LENGTH + FED) and all(name[0] == "s" for name, _ in found)
    assert found[0][1] == "◦" and found[1][1] == "&lt;/script&gt;" and "日本" in dom

    body, dom = draw(path, "#layer=1&head=2&methods=h2o")
    assert 'data-ready="1 2 h2o"' in body
    names = {-1: "k", 0: "e", 2: "l1", 4: "l5"}
    found = [name for name, _ in tokens_of(dom)]
    assert found == [names[step] for step in trace.methods["h2o"].evicted_at[1, 2].tolist()]
    assert dom.count("<i data-other") == 2
    kept = (trace.methods["h2o"].evicted_at[1, 2, :LENGTH] != 0).mean()
    assert f"<dt>prompt kept, selected</dt><dd>{100 * kept:.1f}%</dd>" in dom

    body, dom = draw(path, "#layer=9&head=x&methods=%3C%2Fscript%3E%20x(a%2C%20b%3D1)%26")
    assert 'data-ready="all all &lt;/script&gt; x(a, b=1)&amp;"' in body or 'data-ready="all all </script> x(a' in body
    share = (trace.methods["</script> x(a, b=1)&"].evicted_at == -1).mean(axis=(0, 1))
    found = np.array([int(name[1:]) for name, _ in tokens_of(dom)])
    np.testing.assert_array_equal(found[(share == 0) | (share == 1)] // 10, share[(share == 0) | (share == 1)])
    assert (np.abs(found / 10 - share) <= 0.05 + 1e-6).all()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_browser_interaction(page, tmp_path):
    """Selectors, tooltip, keyboard and strips, driven from inside the page."""
    script = """<script>
      const pause = (ms) => new Promise((done) => setTimeout(done, ms));
      addEventListener("load", async () => {
        await pause(300);
        const seen = {};
        $("layer").value = "0"; $("layer").dispatchEvent(new Event("change"));
        $("head").value = "1"; $("head").dispatchEvent(new Event("change"));
        await pause(100);
        seen.address = location.hash;
        const span = document.querySelectorAll("#tokens i")[1];
        span.dispatchEvent(new MouseEvent("click", { bubbles: true, clientX: 50, clientY: 50 }));
        await pause(100);
        seen.tip = $("tip").hidden ? "" : $("tip").textContent;
        $("tokens").dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
        await pause(100);
        seen.next = $("tip").textContent;
        $("tokens").dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
        seen.closed = $("tip").hidden;
        const boxes = $("methods").querySelectorAll("input");
        boxes[1].checked = false; boxes[1].dispatchEvent(new Event("change", { bubbles: true }));
        await pause(100);
        boxes[0].checked = false; boxes[0].dispatchEvent(new Event("change", { bubbles: true }));
        await pause(100);
        seen.last = boxes[0].checked;
        document.body.dataset.seen = JSON.stringify(seen);
      });
    </script>"""
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", script + "</body>"), encoding="utf-8")
    body, dom = draw(path)
    written = re.search(r'data-seen="([^"]*)"', body).group(1)
    seen = json.loads(html.unescape(written))
    assert seen["address"].startswith("#layer=0&head=1&methods=h2o,%3C%2Fscript%3E")
    assert '"</script>"' in seen["tip"] and "token 1 of 300" in seen["tip"] and "alpha 0." in seen["tip"]
    assert "no text of its own" in seen["next"] and "token 2 of 300" in seen["next"]
    assert seen["closed"] and seen["last"]
    assert 'data-ready="0 1 h2o"' in body and len(tokens_of(dom)) == LENGTH + FED
