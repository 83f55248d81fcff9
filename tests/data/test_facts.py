"""Hidden facts: many kinds and wordings, and no common values between training and held-out facts."""

import numpy as np
import pytest

from dcache.data.facts import KINDS, WORDS, sample_fact, templates, words
from dcache.errors import ConfigError


def test_there_are_many_kinds_and_wordings():
    assert len(KINDS) >= 8
    for kind in KINDS:
        sentences, questions = templates(kind, "train")
        assert len(sentences) >= 4 and len(questions) >= 2
        all_sentences, all_questions = templates(kind, "test")
        assert set(sentences) < set(all_sentences) and set(questions) < set(all_questions)
    for entries in WORDS.values():
        assert len(set(entries)) == len(entries)


@pytest.mark.parametrize("kind", KINDS)
def test_fact_states_its_answer_and_the_question_does_not(kind):
    for split in ("train", "test"):
        rng = np.random.default_rng(0)
        for _ in range(60):
            fact = sample_fact(rng, split, kind)
            assert fact.kind == kind
            assert fact.sentence.count(fact.answer) == 1
            assert fact.answer not in fact.question
            assert "{" not in fact.sentence + fact.question + fact.answer + fact.lead
            # The lead names everything that the fact is about, and stops right before the value.
            assert fact.answer not in fact.lead and len(fact.lead.split()) >= 3
            assert all(word in fact.lead for word in fact.subject.split()[1:])
            assert fact.sentence.endswith(".") and fact.question.endswith("?")
            assert " a a" not in fact.sentence and "  " not in fact.sentence


@pytest.mark.parametrize("kind", KINDS)
def test_training_and_held_out_values_are_disjoint(kind):
    answers = {}
    for split in ("train", "test"):
        rng = np.random.default_rng(1)
        answers[split] = {sample_fact(rng, split, kind).answer for _ in range(300)}
    assert not answers["train"] & answers["test"]
    assert len(answers["test"]) >= 4


def test_names_are_disjoint_and_draws_repeatable():
    for name in ("first", "last", "place"):
        assert not set(words(name, "train")) & set(words(name, "test"))
        assert set(words(name, "train")) | set(words(name, "test")) == set(WORDS[name])
    draw = [sample_fact(np.random.default_rng(5)) for _ in range(2)]
    assert draw[0] == draw[1]


def test_unknown_split_and_kind():
    with pytest.raises(ConfigError, match="split"):
        sample_fact(np.random.default_rng(0), "validation")
    with pytest.raises(ConfigError, match="no facts of kind"):
        sample_fact(np.random.default_rng(0), "train", "weather")
