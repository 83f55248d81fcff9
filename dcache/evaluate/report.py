"""One self-contained HTML page: tables, pictures (embedded), configuration, versions, and how to make it again."""

import base64
import html
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from dcache.evaluate import tables
from dcache.evaluate.tables import Record

_PACKAGES = ("dcache", "jax", "flax", "optax", "numpy", "transformers")

_LONG = 26

# Tables take the whole window, text does not. A table that is wider still scrolls, and a shadow on its right edge says so.
_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1600px; margin: auto; padding: 1em }
p, ul, nav, figure, pre { max-width: 60em } h1 { font-size: 1.5em } h2 { font-size: 1.2em; margin-top: 2em }
.scroll { overflow-x: auto; background:
  linear-gradient(to left, #fff 1.5em, transparent) right / 3em 100% no-repeat local,
  linear-gradient(to left, #aaa, transparent) right / .8em 100% no-repeat scroll }
img { max-width: 100%; height: auto } figure { margin: 1em 0 }
table { border-collapse: collapse; font-size: .9em; white-space: nowrap }
th, td { padding: .25em .7em; text-align: left; border-bottom: 1px solid #ddd } tr.trained td { font-weight: bold }
th { white-space: normal; vertical-align: bottom }
td:first-child, th:first-child { position: sticky; left: 0; background: #fff } tr.part td { color: #555; padding-top: .9em }
td.long { white-space: normal; min-width: 11em; overflow-wrap: anywhere } td.long:last-child { min-width: 15em }
.note { color: #555; font-size: .9em } nav { columns: 10em } nav a { display: block }
@media (max-width: 600px) {
  td:first-child { min-width: 7em; max-width: 8.5em; white-space: normal; overflow-wrap: anywhere }
  td.long, td.long:last-child { min-width: 11em }
}
pre { background: #f4f4f4; padding: .8em; overflow-x: auto; font-size: .85em }
"""


class Picture(NamedTuple):
    """A PNG file with a caption."""

    caption: str
    path: pathlib.Path


def versions() -> dict[str, str]:
    """Python, the packages that numbers depend on, and the kind of processor."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # dcache itself, when it runs from a checkout
            found[name] = "not installed"
    return found | {"machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"}


def page(
    title: str, header: Record, records: Sequence[Record], pictures: Sequence[Picture], commands: Sequence[str],
    config: Any,
) -> str:  # fmt: skip
    """The report as HTML text.

    Args:
      header, records: see `dcache.evaluate.records.run`. pictures: embedded in the page.
      commands: that made it, one per line. config: JSON-ready, shown as it is (seeds included).
    """
    cells, compared = tables.cells(header, records), tables.comparisons(header, records)
    trained = {method for method, _, is_trained in tables.columns(header) if is_trained}
    settings = header["settings"]
    schedule = f"again every {settings['evict_every']} tokens" if settings["evict_every"] else "once, after the prompt"
    if settings["unseen"]:
        schedule += f" without its last {settings['unseen']} tokens (the question is hidden from the policies)"
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>Model {html.escape(header['model'])}, prompts of up to {settings['length']} tokens, {settings['horizon']} "
        f"continuation tokens, eviction {schedule}. Brackets are 95% bootstrap intervals over the prompts, paired for "
        "comparisons; n is the number of prompts. KL is to the model with the full cache, in nats per token.</p>",
    ]
    for kind, heading in tables.KINDS.items():
        if any(cell.kind == kind for cell in cells):
            parts += [f"<h2>{heading}</h2>", table(*tables.rows(cells, kind), trained)]
            sentences = [f"<li>{html.escape(tables.sentence(c))}</li>" for c in compared if c.kind == kind]
            parts += ["<ul>", *sentences, "</ul>"] if sentences else []
    parts += ["<h2>Pictures</h2>"] if pictures else []
    parts += map(figure, pictures)
    parts += ["<h2>How to make this again</h2>", pre("\n".join(commands))]
    parts += ["<h2>Policies as they were fitted</h2>", table(*_arms(header), trained)]
    parts += ["<h2>Versions</h2>", table(["", "version"], [list(item) for item in versions().items()], set())]
    parts += ["<h2>Configuration</h2>", pre(json.dumps(config, indent=2, default=list))]
    return document(title, parts)


def document(title: str, parts: Sequence[str]) -> str:
    """A whole page around HTML parts: no script, nothing fetched from elsewhere."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_CSS}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _arms(header: Record) -> tuple[list[str], list[list[str]]]:
    arms = header["arms"]
    return ["policy", "budget", "settings", "weights"], [
        [a["method"], a["budget"], a["policy"], a["weights"] or "none"] for a in arms
    ]


def figure(picture: Picture) -> str:
    """A picture that is part of the page's own text."""
    data = base64.b64encode(picture.path.read_bytes()).decode()
    caption = html.escape(picture.caption)
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'
    )


def pre(text: str) -> str:
    """Text as it is, in a box that scrolls."""
    return f"<pre>{html.escape(text)}</pre>"


def table(heads: Sequence[str], body: Sequence[Sequence[str]], trained: Collection[str] = ()) -> str:
    """An HTML table; rows whose first cell is in `trained` stand out, and a row of one cell is a heading for those below it."""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    lines = []
    for line in body:
        if len(line) == 1:
            lines.append(f'<tr class="part"><td colspan="{len(heads)}">{html.escape(line[0])}</td></tr>')
            continue
        mark = ' class="trained"' if line[0] in trained else ""
        # Sentences may break into lines, numbers with their intervals may not.
        cells = (
            f'<td class="long">{html.escape(text)}</td>' if len(text) > _LONG else f"<td>{_short(text)}</td>"
            for text in line
        )
        lines.append(f"<tr{mark}>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _short(text: str) -> str:
    """A cell that does not break, but behind a semicolon: two numbers stand one above the other."""
    return html.escape(text).replace("; ", ";<br>")
