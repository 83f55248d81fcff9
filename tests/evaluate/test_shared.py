"""Answers and log-likelihoods of many arms at once, against one arm at a time."""

import jax
import numpy as np
import pytest

import dcache
from dcache.errors import ConfigError
from dcache.evaluate import shared
from dcache.evaluate.fidelity import heuristic, make_arms

METHODS = ("h2o", "snapkv", "keydiff")
PROMPT = np.random.default_rng(10).integers(2, 64, 150).astype(np.int32)
TEXT = [5, 9, 33, 17, 60, 2, 8]


def arms_of(names=METHODS, budget=48):
    return make_arms({name: heuristic(name) for name in names}, [budget], 100)


@pytest.mark.parametrize("evict_every", [0, 8])
def test_answers_are_those_of_generate(lm, evict_every):
    found = shared.answers(lm, PROMPT, arms_of(), new_tokens=24, evict_every=evict_every)
    for arm, answer in zip(arms_of(), found, strict=True):
        alone = dcache.generate(lm, [PROMPT], arm.policy, arm.budget, max_new_tokens=24, evict_every=evict_every)
        assert answer.text == alone.texts[0]
        assert answer.tokens == len(alone.tokens[0])
    assert found[0].kl == pytest.approx(0.0, abs=1e-6) and found[0].top1 == 1.0 and found[0].kept == 1.0
    assert all(answer.kl > 1e-4 for answer in found[1:])
    assert all(answer.kept == pytest.approx(48 / 150, abs=0.01) for answer in found[1:])


def test_answers_after_reading_in_chunks_are_those_of_generate(lm):
    found = shared.answers(lm, PROMPT, arms_of(), new_tokens=24, prefill_chunk=64)
    whole = shared.answers(lm, PROMPT, arms_of(()), new_tokens=24)[0]
    assert found[0].text == whole.text and found[0].kept == 1.0 and set(found[0].retained) == {1.0}
    for arm, answer in zip(arms_of(), found, strict=True):
        alone = dcache.generate(
            lm, [PROMPT], arm.policy, arm.budget, max_new_tokens=24, evict_every=0, prefill_chunk=64
        )
        assert answer.text == alone.texts[0]
        assert answer.kept == pytest.approx(1.0 if arm.method == "full" else 48 / 150)
        assert np.mean(answer.retained) == pytest.approx(answer.kept, abs=0.02)
    assert found[0].kl == pytest.approx(0.0, abs=1e-6) and all(answer.kl > 1e-4 for answer in found[1:])


def test_texts_after_reading_in_chunks(lm):
    (whole,) = shared.scores(lm, PROMPT, [TEXT], arms_of(budget=0.999))
    (parts,) = shared.scores(lm, PROMPT, [TEXT], arms_of(budget=0.999), prefill_chunk=64)
    (small,) = shared.scores(lm, PROMPT, [TEXT], arms_of(), prefill_chunk=64)
    assert parts[0].nats == pytest.approx(whole[0].nats, abs=1e-3) and small[0].nats == parts[0].nats
    assert all(result.nats != small[0].nats and result.kl > 1e-4 for result in small[1:])


def test_an_answer_ends_at_a_text(lm):
    whole = shared.answers(lm, PROMPT, arms_of(()), new_tokens=24)[0]
    words = whole.text.split()
    stop = f" {words[3]} {words[4]}"
    cut = shared.answers(lm, PROMPT, arms_of(()), new_tokens=24, stop=[stop, "never"])[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.ended and cut.tokens <= 5
    assert dcache.generate(lm, [PROMPT], "full", 1.0, max_new_tokens=24, stop=[stop]).texts[0] == cut.text


def test_given_texts_are_those_of_fidelity(lm):
    (found,) = shared.scores(lm, PROMPT, [TEXT], arms_of())
    for arm, result in zip(arms_of(), found, strict=True):
        alone = dcache.fidelity(lm, PROMPT[:-1], [int(PROMPT[-1]), *TEXT], arm.policy, arm.budget)
        assert result.nats == pytest.approx(-float(alone.nll[1:].sum()), abs=1e-3)
        assert result.kl == pytest.approx(float(alone.kl[:-1].mean()), abs=1e-5)
        assert result.tokens == len(TEXT)


def test_the_full_caches_log_likelihood_by_hand(lm):
    choices = [[4, 5], [6, 7, 8]]
    found = shared.scores(lm, PROMPT, choices, arms_of(()))
    for text, (result,) in zip(choices, found, strict=True):
        log_p = np.asarray(jax.nn.log_softmax(dcache.logits(lm, [*PROMPT, *text])))
        at = range(len(PROMPT) - 1, len(PROMPT) + len(text) - 1)
        assert result.nats == pytest.approx(sum(log_p[i, t] for i, t in zip(at, text, strict=True)), abs=1e-3)
        assert not result.greedy
    best = int(np.argmax(dcache.logits(lm, PROMPT)[-1]))
    assert shared.scores(lm, PROMPT, [[best]], arms_of(()))[0][0].greedy


def test_a_window_is_read_once_for_both_halves(lm):
    second = list(TEXT)
    opening, found = shared.window(lm, list(PROMPT), second, arms_of())
    log_p = np.asarray(jax.nn.log_softmax(dcache.logits(lm, PROMPT)))
    assert opening == pytest.approx(sum(log_p[i, t] for i, t in enumerate(PROMPT[1:])), abs=1e-2)
    assert found == shared.scores(lm, PROMPT, [second], arms_of())[0]
    alone, nothing = shared.window(lm, list(PROMPT), [], arms_of())
    assert alone == pytest.approx(opening, abs=1e-3) and nothing == []


def test_what_is_withheld_decides_nothing(lm):
    other = PROMPT.copy()
    other[-10:] = other[-10:][::-1]
    first, second = (shared.answers(lm, p, arms_of(), new_tokens=8, withheld=10) for p in (PROMPT, other))
    for a, b in zip(first, second, strict=True):
        assert a.retained == b.retained
    # Ten tokens are rounded up to sixteen; budgets count what was seen.
    assert first[1].kept == pytest.approx(48 / 134, abs=0.01)
    assert first[0].text == shared.answers(lm, PROMPT, arms_of(()), new_tokens=8)[0].text


def test_a_withheld_end_is_fed_after_the_eviction(lm):
    answers = shared.answers(lm, PROMPT, arms_of(("h2o",)), new_tokens=1, withheld=16)
    policy = arms_of(("h2o",))[1].policy
    alone = dcache.fidelity(lm, PROMPT[:-16], PROMPT[-16:], policy, 48)
    # One token's answer: the KL after the question and after the answer.
    full_answer = int(answers[0].text.split()[0])
    longer = dcache.fidelity(lm, PROMPT[:-16], [*PROMPT[-16:], full_answer], policy, 48)
    assert longer.kl[15] == pytest.approx(alone.kl[15], abs=1e-5)
    assert answers[1].kl == pytest.approx(float(longer.kl[15:17].mean()), abs=1e-5)


def test_the_draws_of_random_depend_on_the_name_alone(lm):
    def kept(names, name):
        return shared.answers(lm, PROMPT, arms_of(names), new_tokens=2, name=name)[-1].retained

    assert kept(("random",), "a") == kept(("h2o", "random"), "a") != kept(("random",), "b")


@pytest.mark.parametrize(
    "call",
    [
        lambda lm: shared.answers(lm, PROMPT, arms_of(()), new_tokens=lm.config.max_positions),
        lambda lm: shared.answers(lm, PROMPT, arms_of(()), new_tokens=4, withheld=150),
        lambda lm: shared.answers(lm, PROMPT, arms_of(()), new_tokens=4, withheld=16, evict_every=8),
        lambda lm: shared.answers(lm, PROMPT, arms_of(()), new_tokens=4, prefill_chunk=64, evict_every=8),
        lambda lm: shared.answers(lm, PROMPT, arms_of(("snapkv",), 200), new_tokens=4, prefill_chunk=16),
        lambda lm: shared.scores(lm, PROMPT[:1], [TEXT], arms_of(())),
        lambda lm: shared.scores(lm, PROMPT, [TEXT, []], arms_of(())),
    ],
)
def test_errors(lm, call):
    with pytest.raises(ConfigError):
        call(lm)
