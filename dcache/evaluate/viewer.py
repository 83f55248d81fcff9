"""The retention viewer: a trace as one self-contained HTML page that needs no server and no network.

The page's own HTML, CSS and JavaScript is `viewer.html` beside this module. Here a trace becomes data for it: what is small as
JSON, arrays as base64 of their deflated bytes (little-endian), which the browser inflates itself.
"""

import base64
import html
import json
import pathlib
import zlib
from typing import Any

import numpy as np

from dcache.evaluate.fidelity import budget_name
from dcache.evaluate.tracing import SIGNALS, MethodTrace, Trace
from dcache.tokenizer import StreamDecoder, Tokenizer

TEMPLATE = pathlib.Path(__file__).with_name("viewer.html")


def page(trace: Trace, tokenizer: Tokenizer, title: str) -> str:
    """The page as HTML text; tokenizer: of the model that was traced."""
    length, fed = len(trace.tokens), len(trace.continuation)
    layers, heads, _ = next(iter(trace.methods.values())).evicted_at.shape
    steps = list(range(0, fed, trace.evict_every)) if trace.evict_every else [0]
    summary = {
        "model": trace.model,
        "budget": budget_name(trace.budget),
        "every": trace.evict_every,
        "layers": layers,
        "heads": heads,
        "prompt": length,
        "steps": steps,
        "pieces": pieces(np.concatenate([trace.tokens, trace.continuation]), tokenizer),
        "signals": SIGNALS,
        "methods": [_method(label, found, trace, tokenizer) for label, found in trace.methods.items()],
    }
    written = json.dumps(summary).replace("<", r"\u003c")  # only a "<" could end the element that holds it
    blocks = [f'<script type="application/json" id="trace">{written}</script>']
    blocks.append(_block("signals", trace.signals.astype("<f4")))
    for i, found in enumerate(trace.methods.values()):
        # 0 for never, else 1 + the number of the eviction.
        number = np.searchsorted(steps, found.evicted_at) + 1
        blocks.append(_block(f"evicted-{i}", np.where(found.evicted_at < 0, 0, number).astype("<u2")))
        blocks.append(_block(f"score-{i}", (found.score / _scale(found.score)[..., None]).astype("<f2")))
    template = TEMPLATE.read_text(encoding="utf-8")
    return template.replace("<!--TITLE-->", html.escape(title)).replace("<!--DATA-->", "\n".join(blocks))


def pieces(tokens: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """The text of each token int32[n].

    A token that completes no character has an empty piece, and the one that does has the whole character; so have special
    tokens, which a tokenizer leaves out of the text.
    """
    decoder = StreamDecoder(tokenizer)
    found = [decoder.push(token) for token in tokens.tolist()]
    if found:
        found[-1] += decoder.flush()
    return found


def _method(label: str, found: MethodTrace, trace: Trace, tokenizer: Tokenizer) -> dict[str, Any]:
    # A token that the method would rather say after a continuation token is shown without the text before it.
    choices = [tokenizer.decode([token]) for token in found.choice.tolist()]
    own, full = found.tokens.tolist(), trace.continuation.tolist()
    if len(own) == len(full) + 1 and own[-1] in tokenizer.eos_ids:
        full.append(own[-1])  # the continuation is given without the token that ends it
    same = next((i for i, (a, b) in enumerate(zip(own, full, strict=False)) if a != b), min(len(own), len(full)))
    return {
        "label": label,
        "policy": found.policy,
        "kl": _numbers(found.kl),
        "agrees": found.agrees.astype(int).tolist(),
        "choice": choices,
        "own": pieces(found.tokens, tokenizer),
        "same": same,  # so many tokens at its beginning are the full cache's
        "scale": _numbers(_scale(found.score).ravel()),
    }


def _scale(score: np.ndarray) -> np.ndarray:
    """f32[L, K]: what scores f32[L, K, S] are divided by, so that float16 holds them whatever their unit."""
    largest = np.abs(score).max(axis=-1)
    return np.where(largest > 0, largest, 1.0).astype(np.float32)


def _numbers(values: np.ndarray) -> list[float]:
    """float32 values with as many digits as identify them."""
    return [float(f"{x:.9g}") for x in values.tolist()]


def _block(name: str, array: np.ndarray) -> str:
    data = base64.b64encode(zlib.compress(array.tobytes())).decode()
    return f'<script type="text/plain" id="{name}">{data}</script>'
