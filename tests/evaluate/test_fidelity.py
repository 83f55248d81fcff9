import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LENGTH, Numbers, make_prompt

import dcache
from dcache import cache as kv
from dcache import model, rollout
from dcache.attention import StatsRequest
from dcache.budget import encode, tokens_kept
from dcache.errors import BudgetError, ConfigError, DcacheError
from dcache.evaluate import fidelity
from dcache.policies import REGISTRY, make
from dcache.policies.base import Trained, keep_set
from dcache.policies.distillcache import DistillCache
from dcache.policies.protected import Protected

SETTINGS = fidelity.Settings(length=LENGTH, horizon=8, new_tokens=6, batch=2)
NAMES = ("random", "streaming_llm", "h2o", "snapkv", "tova", "keydiff", "h2o@sequence")

prefill = jax.jit(model.prefill, static_argnums=(1, 4))
extend = jax.jit(model.extend, static_argnums=1)
unembed = jax.jit(model.unembed, static_argnums=2)


@functools.partial(jax.jit, static_argnames=("policy", "kept"))
def compacted(policy, params, cache, budget, kept):
    """The cache after one eviction, with room for 24 tokens."""
    keep = keep_set(policy, params, cache, budget, jax.random.key(0))
    return kv.compact(kv.restrict(cache, StatsRequest()), keep, kept, 24)


@pytest.fixture(scope="module")
def methods():
    policy = DistillCache(hidden=16)
    params = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape), policy.init(jax.random.key(0))
    )
    return {name: fidelity.heuristic(name) for name in NAMES} | {"learnt": Trained(policy, params)}


@pytest.fixture(scope="module")
def arms(methods, prompts):
    """The full cache, all methods with 12 tokens, and two with a ratio."""
    shortest = min(len(p.tokens) for p in prompts)
    by_ratio = {name: methods[name] for name in ("random", "snapkv")}
    return fidelity.make_arms(methods, [12], shortest) + fidelity.make_arms(by_ratio, [0.75], shortest)[1:]


@pytest.fixture(scope="module")
def records(lm, prompts, arms):
    return list(fidelity.evaluate(lm, prompts, arms, SETTINGS))


def cells(record):
    """(method, budget) -> cell."""
    return {(m, b): cell for m, budgets in record["arms"].items() for b, cell in budgets.items()}


def same(a, b, tolerance=1e-4):
    """Whether two cells hold the same numbers, and the same text."""
    return a.keys() == b.keys() and all(
        np.allclose(a[k], b[k], atol=tolerance) if isinstance(a[k], float | list) else a[k] == b[k] for k in a
    )


def decode(lm, cache, tokens):
    """Feeds tokens one by one; log-probabilities f32[T, V]."""
    rows = []
    for token in tokens:
        hidden, cache = extend(lm.params, lm.config, jnp.full((1, 1), int(token), jnp.int32), cache)
        rows.append(jax.nn.log_softmax(unembed(lm.params, hidden[0, 0], lm.config)))
    return np.asarray(jnp.stack(rows))


def prompt_cache(lm, prompt, request):
    """Logits after the prompt f32[V] and the cache of the prompt alone, without padding."""
    tokens = jnp.asarray(prompt.tokens)[None]
    length = jnp.asarray([len(prompt.tokens)], jnp.int32)
    hidden, cache = prefill(lm.params, lm.config, tokens, length, request)
    return unembed(lm.params, hidden[0, -1], lm.config), cache


def greedy(lm, cache, first, count):
    """Greedy tokens, one decode step after the other."""
    tokens = [int(first)]
    for _ in range(count - 1):
        hidden, cache = extend(lm.params, lm.config, jnp.full((1, 1), tokens[-1], jnp.int32), cache)
        tokens.append(int(jnp.argmax(unembed(lm.params, hidden[0, 0], lm.config))))
    return tokens


def until_stop(lm, tokens):
    """The tokens before the first stop token."""
    return list(itertools.takewhile(lambda token: token not in lm.tokenizer.eos_ids, tokens))


def bare(cache, room):
    return kv.grow(kv.restrict(cache, StatsRequest()), room)


def test_against_one_arm_at_a_time_with_compaction(lm, prompts, arms, records):
    """The naive way: every arm reads its prompt alone and unpadded, compacts its cache, and decodes token by token."""
    assert [record["name"] for record in records] == [prompt.name for prompt in prompts]
    for prompt, record in ((prompts[i], records[i]) for i in (0, 1, 3)):
        assert record["length"] == len(prompt.tokens)
        for arm in arms:
            if arm.method == "random":
                continue  # its random numbers depend on the shape of the cache
            logits, cache = prompt_cache(lm, prompt, arm.policy.needs)
            budget = tokens_kept(arm.budget, len(prompt.tokens))
            small = compacted(arm.policy, arm.params, cache, jnp.asarray([budget], jnp.int32), budget)
            full = bare(cache, 8)
            tokens = greedy(lm, full, jnp.argmax(logits), 8) if prompt.kind == "retrieval" else prompt.continuation[:8]
            counted = len(until_stop(lm, tokens)) if prompt.kind == "retrieval" else 8
            p, q = decode(lm, full, tokens)[:counted], decode(lm, small, tokens)[:counted]
            assert record["counted"] == counted > 1
            cell = cells(record)[arm.method, fidelity.budget_name(arm.budget)]
            assert np.isclose(cell["kl"], np.mean(np.sum(np.exp(p) * (p - q), axis=-1)), atol=2e-5), arm
            assert np.isclose(cell["top1"], np.mean(p.argmax(-1) == q.argmax(-1)))
            assert np.isclose(cell["nll"], -np.mean(q[np.arange(counted - 1), tokens[1:counted]]), atol=1e-4)
            assert np.isclose(cell["kept"], budget / len(prompt.tokens), atol=1e-4)
            if prompt.kind == "retrieval":
                assert cell["answer"] == lm.tokenizer.decode(until_stop(lm, greedy(lm, small, tokens[0], 6)))
            else:
                assert "answer" not in cell


def test_a_hidden_question(lm, prompts, methods):
    """The naive way: the policy compresses the prompt without its last 16 tokens, then these and the answer are decoded."""
    asked = [dataclasses.replace(p, question=11) for p in prompts[:2]]
    arms = fidelity.make_arms({name: methods[name] for name in ("snapkv", "h2o", "learnt")}, [12], 28)
    settings = dataclasses.replace(SETTINGS, unseen=16)
    for prompt, record in zip(
        [*asked, prompts[3]], fidelity.evaluate(lm, [*asked, prompts[3]], arms, settings), strict=True
    ):
        if prompt.kind == "text":
            (alone,) = fidelity.evaluate(lm, [prompt], arms, SETTINGS)
            mine, others = cells(record), cells(alone)
            assert all(same(mine[arm], others[arm]) for arm in mine)  # nothing is asked there
            continue
        context = dataclasses.replace(prompt, tokens=prompt.tokens[:-16])
        logits, whole = prompt_cache(lm, prompt, StatsRequest())
        own = greedy(lm, bare(whole, 8), jnp.argmax(logits), 8)
        counted = len(until_stop(lm, own)) + 1
        fed = [*prompt.tokens[-16:].tolist(), *own]
        assert record["counted"] == counted and record["length"] == len(prompt.tokens)
        for arm in arms:
            _, cache = prompt_cache(lm, context, arm.policy.needs)
            budget = tokens_kept(arm.budget, len(context.tokens))
            small = compacted(arm.policy, arm.params, cache, jnp.asarray([budget], jnp.int32), budget)
            p, q = (decode(lm, c, fed)[15 : 15 + counted] for c in (bare(cache, 24), small))
            cell = cells(record)[arm.method, fidelity.budget_name(arm.budget)]
            assert np.isclose(cell["kl"], np.mean(np.sum(np.exp(p) * (p - q), axis=-1)), atol=2e-5), arm
            assert np.isclose(cell["kept"], budget / len(context.tokens), atol=1e-4)
            answer = [int(q[0].argmax())]
            for _ in range(5):
                again = decode(lm, small, [*prompt.tokens[-16:].tolist(), *answer])
                answer.append(int(again[-1].argmax()))
            assert cell["answer"] == lm.tokenizer.decode(until_stop(lm, answer))
    for question, unseen, says in ((20, 16, "its question 20"), (0, 16, "does not say"), (11, 48, "fewer than all")):
        with pytest.raises(ConfigError, match=says):
            bad = [dataclasses.replace(prompts[0], question=question)]
            next(fidelity.evaluate(lm, bad, arms, dataclasses.replace(SETTINGS, unseen=unseen)))
    with pytest.raises(ConfigError, match="evict once"):
        dataclasses.replace(SETTINGS, unseen=16, evict_every=4)


def test_full_cache_is_its_own_teacher(records):
    for record in records:
        cell = record["arms"]["full"]["100%"]
        assert abs(cell["kl"]) < 1e-6 and cell["top1"] == 1.0 and cell["kept"] == 1.0 and cell["retained"] == [1.0] * 20
    differ = [c["kl"] for record in records for (m, _), c in cells(record).items() if m != "full"]
    assert min(differ) > 1e-5  # eviction shows: the comparison above is not one of equals


def test_whole_budget_changes_nothing(lm, prompts, methods):
    arms = fidelity.make_arms({name: methods[name] for name in ("h2o", "learnt")}, [1.0], 40)
    for record in fidelity.evaluate(lm, prompts[1:3], arms, SETTINGS):
        full = record["arms"]["full"]["100%"]
        for cell in cells(record).values():
            assert abs(cell["kl"]) < 1e-6 and np.isclose(cell["nll"], full["nll"], atol=1e-5)
            assert cell.get("answer") == full.get("answer")


def test_arms_alone_equal_arms_together(lm, prompts, arms, records):
    for arm in (arms[1], arms[-1]):  # random with 12 tokens, SnapKV with 75%
        for record, together in zip(
            fidelity.evaluate(lm, prompts[:2], [arms[0], arm], SETTINGS), records, strict=False
        ):
            key = arm.method, fidelity.budget_name(arm.budget)
            assert same(cells(record)[key], cells(together)[key])


def test_order_and_batch_do_not_matter(lm, prompts, arms, records):
    by_name = {record["name"]: record for record in records}
    settings = dataclasses.replace(SETTINGS, batch=3)
    shuffled = list(fidelity.evaluate(lm, [prompts[i] for i in (4, 2, 0, 3, 1)], arms, settings))
    assert {record["name"] for record in shuffled} == set(by_name)
    for record in shuffled:
        for key, cell in cells(record).items():
            assert same(cell, cells(by_name[record["name"]])[key]), key


def test_deterministic_and_seeded(lm, prompts, arms, records):
    chosen = arms[:2]
    first, again = (list(fidelity.evaluate(lm, prompts[3:], chosen, SETTINGS)) for _ in range(2))
    other = list(fidelity.evaluate(lm, prompts[3:], chosen, dataclasses.replace(SETTINGS, seed=1)))
    assert first == again
    assert first[0]["arms"]["random"]["12 tokens"]["kl"] != other[0]["arms"]["random"]["12 tokens"]["kl"]
    assert first[0]["arms"]["random"]["12 tokens"]["retained"] != first[1]["arms"]["random"]["12 tokens"]["retained"]


# With 8, a cache is evicted from again only after the last token, and an answer of 6 tokens never.
@pytest.mark.parametrize(("every", "names"), [(2, ("full", "snapkv", "learnt")), (8, ("full", "learnt"))])
def test_repeated_eviction_against_rollout(lm, prompts, arms, every, names):
    settings = dataclasses.replace(SETTINGS, evict_every=every)
    chosen = [arm for arm in arms if arm.method in names]
    follow = jax.jit(functools.partial(rollout.follow, evict_every=every), static_argnames=("config", "policy"))
    request = functools.reduce(lambda a, b: a | b, (arm.policy.needs for arm in chosen))
    for prompt, record in zip(
        (prompts[1], prompts[3]), fidelity.evaluate(lm, (prompts[1], prompts[3]), chosen, settings), strict=True
    ):
        logits, cache = prompt_cache(lm, prompt, request)
        full = bare(cache, 8)
        tokens = prompt.continuation[:8]
        if prompt.kind == "retrieval":
            tokens = np.asarray(greedy(lm, full, jnp.argmax(logits), 8), np.int32)
        p = decode(lm, full, tokens)
        for arm in chosen[1:]:
            budget, key = jnp.asarray([encode(arm.budget)], jnp.float32), jax.random.key(0)
            q, keep = follow(lm.params, lm.config, arm.policy, arm.params, cache, jnp.asarray(tokens), budget, key)
            cell = cells(record)[arm.method, fidelity.budget_name(arm.budget)]
            kl = np.mean(np.sum(np.exp(p) * (p - np.asarray(q[0])), axis=-1))
            assert np.isclose(cell["kl"], kl, atol=2e-5), arm
            assert np.isclose(cell["kept"], float(keep.mean()), atol=1e-4)
            if prompt.kind == "retrieval":
                # Each token of the answer is the most likely one when the tokens before it are fed.
                answer = lm.tokenizer.encode(cell["answer"])
                fed = jnp.asarray(np.concatenate([answer, [0, 0]]), jnp.int32)
                q, _ = follow(lm.params, lm.config, arm.policy, arm.params, cache, fed, budget, key)
                assert np.array_equal(answer[1:], np.asarray(q[0]).argmax(-1)[: len(answer) - 1])


def test_eviction_after_every_token_differs_from_once(lm, prompts, arms, records):
    settings = dataclasses.replace(SETTINGS, evict_every=1)
    chosen = [arms[0], next(arm for arm in arms if arm.method == "tova" and arm.budget == 12)]
    (record,) = fidelity.evaluate(lm, prompts[:1], chosen, settings)
    once = records[0]["arms"]["tova"]["12 tokens"]
    again = record["arms"]["tova"]["12 tokens"]
    assert again["kept"] == once["kept"] and again["kl"] != pytest.approx(once["kl"], abs=1e-6)


def test_stop_token_ends_trajectory_and_answer(lm, prompts, arms):
    prompt = prompts[0]
    logits, cache = prompt_cache(lm, prompt, StatsRequest())
    own = greedy(lm, bare(cache, 8), jnp.argmax(logits), 8)
    assert len(set(own[:4])) == 4  # so that the third token is a stop that comes first in place 2
    stopping = dataclasses.replace(lm, tokenizer=Numbers(eos_ids=(own[2],)))
    right = dataclasses.replace(prompt, answers=(f"{own[0]} {own[1]}",))
    (record,) = fidelity.evaluate(stopping, [right], arms[:2], SETTINGS)
    assert record["counted"] == 2
    assert record["arms"]["full"]["100%"]["answer"] == f"{own[0]} {own[1]}"
    assert record["arms"]["full"]["100%"]["correct"]
    p = decode(lm, bare(cache, 8), own)
    assert np.isclose(record["arms"]["full"]["100%"]["nll"], -p[0, own[1]], atol=1e-4)

    silent = dataclasses.replace(lm, tokenizer=Numbers(eos_ids=(own[0],)))
    (record,) = fidelity.evaluate(silent, [right], arms[:2], SETTINGS)
    cell = record["arms"]["random"]["12 tokens"]
    assert record["counted"] == 0 and cell["kl"] is None and cell["nll"] is None and cell["answer"] == ""
    assert not cell["correct"]


def test_short_continuation_counts_only_its_tokens(lm, prompts, arms):
    text = dataclasses.replace(prompts[3], continuation=prompts[3].continuation[:3])
    (record,) = fidelity.evaluate(lm, [text], arms[:2], SETTINGS)
    (whole,) = fidelity.evaluate(lm, [prompts[3]], arms[:2], SETTINGS)
    assert record["counted"] == 3
    assert record["arms"]["random"]["12 tokens"]["kl"] != whole["arms"]["random"]["12 tokens"]["kl"]


def test_no_answers(lm, prompts, arms):
    (record,) = fidelity.evaluate(lm, prompts[:1], arms[:3], dataclasses.replace(SETTINGS, new_tokens=0))
    assert "answer" not in record["arms"]["full"]["100%"]


def test_retained_share_by_position(lm):
    """60 tokens in 20 bins of 3; StreamingLLM keeps 0-3 and 49-59 of them."""
    arms = fidelity.make_arms({"streaming_llm": fidelity.heuristic("streaming_llm")}, [15], 60)
    settings = fidelity.Settings(length=64, horizon=2, new_tokens=0, batch=1)
    (record,) = fidelity.evaluate(lm, [make_prompt(7, "text", 60)], arms, settings)
    third = round(1 / 3, 4)
    expected = [1.0, third, *[0.0] * 14, round(2 / 3, 4), 1.0, 1.0, 1.0]
    assert np.allclose(record["arms"]["streaming_llm"]["15 tokens"]["retained"], expected, atol=1e-4)


def test_skipped_prompts_leave_the_others_unchanged(lm, prompts, arms, records):
    rest = list(fidelity.evaluate(lm, prompts, arms, SETTINGS, skip=frozenset({"retrieval0", "retrieval2", "text3"})))
    assert rest == [records[1], records[4]]


def test_fitted_to_the_shortest_prompt(methods):
    arms = fidelity.make_arms({"snapkv": methods["snapkv"]}, [0.5, 200], 100)
    assert [arm.policy.window for arm in arms[1:]] == [12, 25]  # a quarter of 50, and of the 100 that there are at most


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h3o", "Unknown policy"),
        ("tova@sequence", "no setting granularity"),
        ("h2o@token", "granularity"),
        ("distillcache", "trained first"),
    ],
)
def test_unknown_heuristics(name, message):
    with pytest.raises(ConfigError, match=message):
        fidelity.heuristic(name)


def test_bad_budgets(methods):
    for wrong in (0, 1.5, True):
        with pytest.raises(BudgetError, match="budget is"):
            fidelity.make_arms(methods, [wrong], 100)
    with pytest.raises(BudgetError, match="streaming_llm always keeps 4"):
        fidelity.make_arms({"streaming_llm": methods["streaming_llm"]}, [3], 100)
    for wrong in ([], [0.5, 0.5]):
        with pytest.raises(ConfigError, match="different budgets"):
            fidelity.make_arms(methods, wrong, 100)


def test_bad_prompts_are_refused_before_any_work(lm, prompts, arms):
    def run(prompts, arms=arms):
        next(iter(fidelity.evaluate(lm, prompts, arms, SETTINGS)))

    with pytest.raises(ConfigError, match="has 49 tokens"):
        run([make_prompt(0, "text", LENGTH + 1)])
    with pytest.raises(ConfigError, match="has 0 tokens"):
        run([dataclasses.replace(prompts[0], tokens=np.zeros(0, np.int32))])
    with pytest.raises(ConfigError, match="same name"):
        run([prompts[0], prompts[0]])
    with pytest.raises(ConfigError, match="full cache"):
        run(prompts, arms[1:])


def test_bad_settings():
    for wrong in (dict(length=0), dict(batch=0), dict(new_tokens=-1), dict(horizon=8, evict_every=3)):
        with pytest.raises(ConfigError):
            fidelity.Settings(**{"length": 8, **wrong})


def test_damaged_weights_are_named(lm, prompts, arms):
    damaged = dataclasses.replace(lm, params=jax.tree.map(lambda x: x * jnp.nan, lm.params))
    with pytest.raises(DcacheError, match="'text3' is not finite"):
        next(iter(fidelity.evaluate(damaged, prompts[3:], arms[:2], SETTINGS)))


def test_few_arms_at_once_give_the_same(lm, prompts, arms, records, monkeypatch):
    """With little memory for logits the arms are compared in groups, the last one smaller."""
    monkeypatch.setattr(fidelity, "_LOGIT_BYTES", 2.5 * 4 * 8 * lm.config.vocab_size)
    fidelity.score_students.clear_cache()
    (record,) = fidelity.evaluate(lm, prompts[3:4], arms[:6], SETTINGS)
    fidelity.score_students.clear_cache()
    for key, cell in cells(record).items():
        assert same(cell, cells(records[3])[key])


def test_registered_policies_are_all_usable():
    for name in sorted(name for name, cls in REGISTRY.items() if not hasattr(cls, "init")):
        assert fidelity.heuristic(name).policy.name == name


def test_policies_that_look_themselves_agree_with_the_api(lm, prompts):
    """The oracle sees the part of the continuation that counts; KVzip reads each prompt of the batch again."""
    names = ("oracle", "oracle@layer", "expected_attention", "criticalkv")
    methods = {name: fidelity.heuristic(name) for name in names}
    methods["kvzip"] = Trained(make("kvzip", instructions=((3, 5, 7), (4,), (6, 2))), ())
    protected = Protected(make("knorm"), first=1, boundaries=2, chat=True, markers=((7,), (9,), (12, 3)))
    methods["protected"] = Trained(protected, ())
    text = [p for p in prompts if p.kind == "text"]
    arms = fidelity.make_arms(methods, [12], min(len(p.tokens) for p in text))
    for prompt, record in zip(text, fidelity.evaluate(lm, text, arms, SETTINGS), strict=True):
        for arm in arms[1:]:
            continuation = prompt.continuation[: SETTINGS.horizon]
            want = dcache.fidelity(lm, prompt.tokens, continuation, arm.policy, 12).kl.mean()
            assert record["arms"][arm.method]["12 tokens"]["kl"] == pytest.approx(want, abs=1e-4)
