"""Policies around policies: protection, pooling, allocation; their descriptions; the examples of docs/composing.md."""

import dataclasses
import functools
import itertools
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dcache
from dcache import cache as kv
from dcache import signals
from dcache.attention import LATER
from dcache.checkpoint import save_policy
from dcache.errors import BudgetError, ConfigError
from dcache.policies import REGISTRY, around, innermost, make, parse
from dcache.policies.base import Policy, Trained
from dcache.policies.protected import occurrences, template_markers
from tests import naive
from tests.naive import TINY
from tests.policies.helpers import KEY, KINDS, K, L, fixed_tokens, keep_jit, kept_tokens
from tests.policies.test_base import weights_of, with_needs, with_window

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUDGETS = (30, 9)
PROMPT = np.asarray(np.random.default_rng(1).integers(2, 64, 90), np.int32)
TEMPLATE = {0, 1, 2, 11, 12, 30, 38, 39}  # positions that the tests take for tokens of a chat template


def noted(cache, policy, lengths):
    """The cache restricted to what the policy asks for, with the marks that `observe` would have made in it."""
    unrolled = isinstance(cache.layers, tuple)
    cache = with_needs(cache, policy)
    position = np.asarray(kv.positions(cache))
    length = np.asarray(lengths)[None, :, None, None]
    prompt = (position >= 0) & (position < length)
    marks = {
        "from_end": np.where(prompt, length - 1 - position, LATER),
        "chat": np.where(prompt, np.isin(position, list(TEMPLATE)), LATER),
    }
    for name in set(marks) & set(policy.needs.extra):
        cache = kv.with_extra(cache, name, jnp.asarray(marks[name], jnp.float32))
    return kv.unstack(cache) if unrolled else cache


def limited(marks, more, budget):
    """Marks [count] and as many of `more` as the budget leaves room for, the most recent ones."""
    out = marks.copy()
    for t in np.flatnonzero(more & ~marks)[::-1]:
        if out.sum() < budget:
            out[t] = True
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Protection


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", ["streaming_llm", "tova", "h2o"])
def test_protected(base, kind):
    inside = make(base)
    if kind == "head" and inside.granularity != "head":
        pytest.skip("heads hold different tokens")
    policy = make("protected", base=inside, first=2, last=3, boundaries=1, chat=True)
    full, _, alive, lengths = naive.decoded(kind)
    cache = noted(full, policy, lengths)
    scores = np.asarray(kv.positions(cache)) * 0.0
    scores = scores + np.asarray(policy.scores((), cache, KEY)).reshape(
        {"sequence": (1, 2, 1, -1), "layer": (L, 2, 1, -1), "head": (L, 2, K, -1)}[inside.granularity]
    )
    position = np.asarray(kv.positions(cache))
    for b, budget in enumerate(BUDGETS):
        count = alive[b].shape[-1]
        t = np.arange(count)
        own = {"streaming_llm": t < 4, "tova": t >= count - 1, "h2o": t >= count - budget // 2}[base]
        template = np.isin(t, list(TEMPLATE)) & (t < lengths[b])
        of = naive.by_position(scores[:, b], position[:, b], count)
        got = kept_tokens(policy, cache, BUDGETS, b, count)
        for l, k in itertools.product(range(L), range(K)):
            held = alive[b][l, k]
            marks = fixed_tokens(policy, count, lengths[b]) & held
            marks = limited(limited(marks, template & held, budget), own & held, budget)
            np.testing.assert_array_equal(got[l, k], naive.top(of[l, k], held, budget, marks))
            assert got[l, k].sum() == min(budget, held.sum()) and got[l, k][marks].all()


BASES = (
    "full", "tova", "pyramidkv", "cake", "distillcache", "criticalkv(adakv)",
    "allocated(keydiff, by='global', floor=0.0)",
)  # fmt: skip


@pytest.mark.parametrize("base", BASES)
def test_protected_tokens_stay_around_every_kind_of_policy(base):
    """Whatever the granularity, the allocation and the way to decide; while decoding, in a budget that just holds them."""
    policy = make("protected", base=with_window(parse(base), 3), first=3, last=2, boundaries=2)
    full, _, alive, lengths = naive.decoded("sequence")
    cache = noted(full, policy, lengths)
    weights = weights_of(innermost(policy))
    keep = np.asarray(keep_jit(policy, weights, cache, jnp.asarray([40, 7], jnp.int32), KEY))
    position = np.asarray(kv.positions(cache))
    for b, budget in enumerate((40, 7)):
        count = alive[b].shape[-1]
        got = naive.by_position(keep[:, b] * 1.0, position[:, b], count) == 1
        assert got[alive[b] & fixed_tokens(policy, count, lengths[b])].all()
        held = alive[b].sum()
        assert got.sum() == (held if base == "full" else min(L * K * budget, held))
        assert got.sum(-1).max() <= policy.most_kept(budget, count, TINY)


def test_protection_that_adds_nothing_changes_nothing():
    cache = naive.decoded("plain")[0]
    budget = jnp.asarray(BUDGETS, jnp.int32)
    base = make("criticalkv", base=make("h2o"))
    same = keep_jit(make("protected", base=base), (), cache, budget, KEY)
    np.testing.assert_array_equal(same, keep_jit(base, (), cache, budget, KEY))


def test_boundaries_stay_while_newer_tokens_come():
    """Prefill, a look at the prompt, and evictions before each of 8 tokens: the end of the prompt is not its newest part."""
    texts = [naive.some_tokens(n, seed=n) for n in (40, 25)]
    texts[0][[5, 9, 39]], texts[1][[3, 4, 5, 6, 7, 8, 9, 20]] = 1, 2  # 1 and 2 are the template's
    policy = make("protected", base=make("streaming_llm", sinks=0), boundaries=3, chat=True).bind(FakeChat())
    _, cache = naive.read(texts, policy.needs, pad=50)
    padded = jnp.asarray([np.pad(t, (0, 50 - len(t)), constant_values=2) for t in texts], jnp.int32)
    observe = jax.jit(
        lambda policy, params, cache, tokens: policy.observe((), params, TINY, cache, tokens, None), static_argnums=0
    )
    cache = observe(policy, naive.weights(), cache, padded)
    for _ in range(8):
        cache = naive.evict(cache, keep_jit(policy, (), cache, jnp.asarray([14, 16], jnp.int32), KEY))
        fed = jnp.asarray([[2], [2]], jnp.int32)  # of the template, but not of the prompt
        _, cache = naive.extend(naive.weights(), TINY, fed, cache)
    keep = keep_jit(policy, (), cache, jnp.asarray([12, 12], jnp.int32), KEY)
    position = np.asarray(kv.positions(cache))
    for b, text in enumerate(texts):
        count = len(text) + 8
        got = naive.by_position(np.asarray(keep)[:, b] * 1.0, position[:, b], count)[0, 0] == 1
        edges = {0, 1, 2, len(text) - 3, len(text) - 2, len(text) - 1}
        template = [t for t in range(len(text)) if text[t] in (1, 2) and t not in edges][-6:]
        newest = [t for t in range(count)[::-1] if t not in edges and t not in template]
        assert set(np.flatnonzero(got)) == edges | set(template) | set(newest[: 6 - len(template)])
        assert template  # the sample has some


class FakeChat:
    """ChatML with ids for tokens: 1 and 2 begin and end a message, 3 is a line break, words are 10 and more."""

    bos_id, eos_ids = None, (2,)
    words = ("system", "user", "assistant", "0", "1", "a")

    def encode(self, text):
        return np.asarray([10 + self.words.index(text)])

    def decode(self, ids):
        return "".join(" " if i == 3 else self.words[i - 10] for i in ids if i not in (1, 2))

    def chat(self, turns):
        ids = []
        for turn in turns:
            ids += [1, *self.encode(turn["role"]), 3, *self.encode(turn["content"]), 2, 3]
        return np.asarray([*ids, 1, *self.encode("assistant"), 3])


class FakeHeader(FakeChat):
    """Llama 3's way: the role between two special tokens, and no system message."""

    bos_id, eos_ids = 0, (5,)

    def decode(self, ids):
        return "".join(" " if i == 3 else self.words[i - 10] for i in ids if i not in (0, 1, 2, 5))

    def chat(self, turns):
        if turns[0]["role"] == "system":
            raise ConfigError("no system message")
        parts = [[1, *self.encode(t["role"]), 2, 3, *self.encode(t["content"]), 5] for t in turns]
        return np.asarray([0, *itertools.chain(*parts), 1, *self.encode("assistant"), 2, 3])


def test_markers_of_a_chat_template():
    system, user, assistant = 10, 11, 12
    assert set(template_markers(FakeChat())) == {
        (1,), (1, system, 3), (1, user, 3), (1, assistant, 3), (2,), (2, 3),
    }  # fmt: skip
    assert set(template_markers(FakeHeader())) == {(0,), (1,), (1, user), (1, assistant), (2,), (2, 3), (5,)}


def test_markers_of_the_default_model(smollm2):
    """Special tokens, roles and line breaks of SmolLM2's template, but neither the system's text nor the user's."""
    tokens = smollm2.tokenizer.chat("The user said:\nhello.")
    policy = make("protected", base=make("knorm"), chat=True).bind(smollm2.tokenizer)
    assert policy.bind(FakeChat()) == policy
    marks = np.asarray(occurrences(jnp.asarray(tokens, jnp.int32)[None], policy.markers))[0]
    inserted = {smollm2.tokenizer.decode([t]) for t in tokens[marks]}
    assert inserted == {"", "system", "user", "ass", "istant", "\n"} and marks.sum() == 14
    rest = smollm2.tokenizer.decode(tokens[~marks])
    assert rest.endswith("The user said:\nhello.") and rest.startswith("You are")


def test_chat_tokens_reach_keep(tiny):
    tokens = np.concatenate([PROMPT[:50], tiny.tokenizer.chat("a question")])
    keep = dcache.keep(tiny, tokens, "protected(knorm, last=2, chat=True)", 8)
    assert keep[:, :, [50, -2, -1]].all() and (keep.sum(-1) == 8).all()


def test_protected_refuses_small_budgets():
    policy = make("protected", base=make("streaming_llm", sinks=12), first=4, last=2, boundaries=3)
    with pytest.raises(BudgetError, match="always keeps 12 tokens, more than the budget of 10"):
        policy.fit(10)
    assert policy.protected_tokens(10) == 12
    policy = dataclasses.replace(policy, base=make("snapkv"))
    with pytest.raises(BudgetError, match="protected always keeps 9 tokens, more than the budget of 8"):
        policy.fit(8)
    assert policy.fit(9).base.window == 2  # the policy inside is fitted as well
    with pytest.raises(ConfigError, match="protected: first is 0, last -1"):
        make("protected", last=-1)
    cache = naive.decoded("prefill")[0]
    with pytest.raises(ConfigError, match="bind"):
        make("protected", chat=True).observe((), None, TINY, cache, None, None)


# ---------------------------------------------------------------------------------------------------------------------
# Pooling


def pooled(values, held, kernel, pooling):
    """[..., T] -> the same; NaN for tokens that are gone."""
    out = np.full(values.shape, np.nan)
    for index in np.ndindex(values.shape[:-1]):
        tokens = np.flatnonzero(held[index])
        for i, t in enumerate(tokens):
            near = values[index][tokens[max(0, i - kernel // 2) : i + kernel // 2 + 1]]
            out[(*index, t)] = near.max() if pooling == "max" else near.mean()
    return out


@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_pool_without_zeros(pooling):
    rng = np.random.default_rng(0)
    position = rng.permutation(12).astype(np.int32)
    position[position >= 9] = -1
    for offset in (-1e3, 0.0, 1e3):
        x = rng.normal(offset, 1.0, 12).astype(np.float32)
        got = np.asarray(signals.pool(jnp.asarray(x), jnp.asarray(position), kernel=5, pooling=pooling, zeros=False))
        in_order = naive.by_position(x, position, 9)
        want = pooled(in_order, np.ones(9, bool), 5, pooling)
        np.testing.assert_allclose(naive.by_position(got, position, 9), want, rtol=1e-6)
        assert np.isfinite(got).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("base", "kernel", "pooling"), [("keydiff", 3, "avg"), ("h2o", 7, "max"), ("tova", 5, "max")])
def test_smoothed(base, kernel, pooling, kind):
    inside = make(base)
    if kind == "head" and inside.granularity != "head":
        pytest.skip("heads hold different tokens")
    policy = make("smoothed", base=inside, kernel=kernel, pooling=pooling)
    cache, _, alive, _ = naive.decoded(kind)
    position = np.asarray(kv.positions(cache))
    position = position if inside.granularity == "head" else position[:, :, 0]
    plain, got = (np.asarray(scores_jit(p, cache)) for p in (inside, policy))
    for b in range(2):
        count = alive[b].shape[-1]
        held = alive[b] if inside.granularity == "head" else alive[b][:, 0]
        want = pooled(naive.by_position(plain[:, b], position[:, b], count), held, kernel, pooling)
        have = naive.by_position(got[:, b], position[:, b], count)
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


scores_jit = jax.jit(lambda policy, cache: policy.scores((), cache, KEY), static_argnums=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernel": 4}, "kernel is 4"), ({"pooling": "sum"}, "pooling is 'sum'"),
        ({"base": make("criticalkv")}, r"criticalkv does not.*criticalkv\(smoothed\("),
        ({"base": make("protected", base=make("criticalkv"))}, r"criticalkv does not.*criticalkv\(smoothed\("),
    ],
)  # fmt: skip
def test_smoothed_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        make("smoothed", **settings)


# ---------------------------------------------------------------------------------------------------------------------
# Descriptions


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("h2o", make("h2o")), (" h2o@sequence ", make("h2o", granularity="sequence")), ("h2o()", make("h2o")),
        ("h2o(recent_share=0.25)@layer", make("h2o", recent_share=0.25, granularity="layer")),
        ("adakv(h2o@head, floor=1)", make("adakv", base=make("h2o"), floor=1)),
        ("protected(snapkv(window=16, pooling='avg'),\n first=4, boundaries=8, chat=True)",
         make("protected", base=make("snapkv", window=16, pooling="avg"), first=4, boundaries=8, chat=True)),
        ("protected(criticalkv(allocated(smoothed(keydiff, kernel=5), by='global')), last=8)",
         make("protected", last=8, base=make("criticalkv", base=make(
             "allocated", by="global", base=make("smoothed", base=make("keydiff"), kernel=5))))),
        ("kvzip(instructions=((1, 2), (3,), ()))", make("kvzip", instructions=((1, 2), (3,), ()))),
        ("rkv(window=None, threshold=-0.5)", make("rkv", threshold=-0.5)),
    ],
)  # fmt: skip
def test_descriptions(text, policy):
    assert parse(text) == policy and hash(parse(text)) == hash(policy)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "character 1"), ("h2o(", r"character 4 \('\('\): '\(' was never closed"), ("h2o@", "character"),
        ("h2o@3", "character 5 .*a granularity belongs"), ("h2o + tova", "character 1 .*a policy belongs here"),
        ("protected(3, first=4)", r"character 11 \('3, first=4\)'\): a policy belongs here"),
        ("protected(h2o, tova)", "character 16 .*only one policy goes inside"),
        ("snapkv(h2o)", "character 8 .*takes no policy inside .adakv, allocated, criticalkv, protected, smoothed do"),
        ("snapkv(16)", "character 8 .*snapkv takes no policy inside"),
        ("protected(h2o, first=4, first=5)", "character 25 .*once"), ("protected(h2o, **{})", "character 16 .*once"),
        ("protected(h2o, base=1)", "character 11 .*given twice"),
        ("h2o(granularity=sequence)", "character 17 .*text in quotes"), ("h2o(recent_share=1+1)", "character 18"),
        ("h2o(recent_share=-'a')", "character 18 .*sign"), ("h2o(recent_share=[0.5])", "character 18 .*tuple"),
        ("h2o.scores()", "character 1 .*a policy belongs here"), ("protected(h3o)", "Unknown policy 'h3o'"),
        ("__import__('os')", "Unknown policy '__import__'|takes no policy|a policy belongs here"), ("h2o\0", "character 1"),
        ("protected(h2o, fist=4)", "no setting fist; its settings are"), ("tova@sequence", "no setting granularity"),
        ("protected(h2o, first='4')", "setting first is '4'; give a value of type int"),
        ("adakv(tova)", "tova decides per layer"), ("(" * 300 + ")" * 300, "character"),
    ],
)  # fmt: skip
def test_descriptions_that_cannot_be_read(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_descriptions_in_the_api(tiny):
    text = "protected(h2o, first=2)"
    same = dcache.keep(tiny, PROMPT, parse(text), 20)
    np.testing.assert_array_equal(dcache.keep(tiny, PROMPT, text, 20), same)
    assert dcache.resolve("snapkv@layer").policy == make("snapkv", granularity="layer")
    for policy, settings, message in (
        (text, {"first": 3}, "write them into the description"), ("runs/x(1)", {}, "There is no folder"),
        ("protected(distillcache(hidden=4))", {}, "part of its training"),
        (make("protected", base=make("distillcache")), {}, "'distillcache' policy was given without its weights"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            dcache.resolve(policy, **settings)


def test_a_trained_policy_inside():
    trained = dcache.resolve("distillcache")
    text = "protected(smoothed(distillcache), first=2)"
    composed = dcache.resolve(text)
    assert innermost(composed.policy) == trained.policy and composed.policy.first == 2
    jax.tree.map(np.testing.assert_array_equal, composed.params, trained.params)
    again = around(trained, parse("protected(smoothed, first=2)"))
    assert again.policy == composed.policy and isinstance(again, Trained)
    assert not composed.policy.looks and dcache.resolve("distillcache").policy == trained.policy


def test_wrappers_pass_on_what_they_do_not_change():
    @dataclasses.dataclass(frozen=True)
    class Odd(Policy):
        name, summary, paper, granularity, looks, ranks = "odd", "-", "-", "head", True, False

        def allowance(self, budget, seen):
            return budget + seen

    policy = make("protected", base=make("protected", base=Odd()))
    assert policy.looks and not policy.ranks and policy.granularity == "head" and policy.allowance(2, 3) == 5
    assert parse("criticalkv").ranks is False and parse("protected(h2o)").ranks and not parse("adakv").looks


# ---------------------------------------------------------------------------------------------------------------------
# The whole way


@pytest.mark.parametrize("cap", [0, 1.5])
def test_generate(tiny, cap):
    """The slots that are allocated are enough, and nothing changes if everything fits."""
    text = f"protected(allocated(smoothed(h2o), by='global', floor=0.1, cap={cap}), boundaries=2)"
    settings = dict(max_new_tokens=6, evict_every=2)
    full = dcache.generate(tiny, [PROMPT], "full", 1.0, **settings)
    assert dcache.generate(tiny, [PROMPT], text, 1.0, **settings).texts == full.texts
    assert len(dcache.generate(tiny, [PROMPT], text, 40, **settings).tokens[0]) == len(full.tokens[0])


def test_eval_of_composed_policies(tmp_path):
    """launch/eval.py as a user starts it, with another eviction every 4 tokens."""
    from configs import smollm2
    from dcache.experiment import from_config

    policy = from_config(smollm2.get_config("tiny")).policy
    save_policy(tmp_path / "policy", policy, policy.init(jax.random.key(0)), {})
    texts = (
        "full",
        "protected(snapkv(window=8), first=2, boundaries=3, chat=True)",
        "allocated(smoothed(h2o), by='global')",
    )
    command = [
        sys.executable, "launch/eval.py", "--config=configs/smollm2.py:tiny", f"--workdir={tmp_path}",
        f"--config.eval.policies={texts!r}", "--config.eval.budgets=(0.25,)", "--config.eval.prompts=1",
        "--config.eval.evict_every=4", "--config.eval.accuracy=False",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for text in texts[1:]:
        assert f"| {text} " in done.stdout


DOCUMENT = (ROOT / "docs" / "composing.md").read_text(encoding="utf-8")


def test_examples_of_the_document(tiny, monkeypatch):
    """All Python blocks, one after the other, on the tiny model."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert len(blocks) >= 4
    monkeypatch.setattr(dcache, "load", functools.partial(lambda lm, *_: lm, tiny))
    names: dict = {}
    for block in blocks:
        exec(compile(block, "docs/composing.md", "exec"), names)


def test_descriptions_of_the_document():
    """What stands in the tables and commands can be parsed."""
    found = re.findall(rf"`((?:{'|'.join(REGISTRY)})[(@][^`\n]*)`", DOCUMENT)
    assert len(found) >= 6
    for text in found:
        parse(text)
