"""Prompts: lengths, hidden facts, streams, cuts and the check of answers."""

import logging
import re

import numpy as np
import pytest

from dcache.data.facts import KINDS, templates
from dcache.data.prompts import (
    Prompt,
    PromptStream,
    is_correct,
    retrieval_prompts,
    text_prompts,
    truncate_middle,
    warn_truncated,
)
from dcache.data.text import Document, split_documents
from dcache.errors import ConfigError


class WordTokenizer:
    """Words with the white space before them, numbered as they come: decoding gives back every text."""

    bos_id = None
    eos_ids = ()
    vocab_size = 1 << 20

    def __init__(self):
        self.words = []
        self.ids = {}

    def encode(self, text):
        found = re.findall(r"\s*\S+|\s+$", text)
        for word in found:
            if word not in self.ids:
                self.ids[word] = len(self.words)
                self.words.append(word)
        return np.array([self.ids[word] for word in found], np.int32)

    def decode(self, ids):
        return "".join(self.words[i] for i in ids)

    def chat(self, message):
        return self.encode(f"<user> {message} <assistant>")


NOUNS = "river stone cloud engine window garden letter shadow market bridge".split()
VERBS = "follows carries meets leaves finds covers passes watches turns keeps".split()


def _documents(number=24, count=120):
    documents = []
    for d in range(number):
        rng = np.random.default_rng(d)
        parts = []
        for i in range(count):
            noun, verb, other = rng.choice(NOUNS), rng.choice(VERBS), rng.choice(NOUNS)
            tail = " and the old road behind it" * int(rng.integers(0, 3))
            parts.append(f"The {noun} quietly {verb} the {other}{tail}." + ("\n\n" if i % 7 == 6 else " "))
        documents.append(Document(f"d{d}", "".join(parts).strip()))
    return documents


@pytest.fixture(scope="module")
def tokenizer():
    return WordTokenizer()


@pytest.fixture(scope="module")
def documents():
    return _documents()


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("length", [160, 512, 1500])
def test_retrieval_prompts(documents, tokenizer, split, length):
    prompts = retrieval_prompts(documents, tokenizer, length, 25, 3, split)
    assert len({prompt.name for prompt in prompts}) == 25
    for prompt in prompts:
        assert prompt.kind == "retrieval"
        assert prompt.tokens.dtype == np.int32 and prompt.continuation.dtype == np.int32
        assert 0.93 * length <= len(prompt.tokens) <= length
        text = tokenizer.decode(prompt.tokens)
        assert text.startswith("<user>")
        message, lead = text.split("<assistant>")
        (answer,) = prompt.answers
        # What is marked as the question is the question, not the passage; all of it comes at the end.
        asked = tokenizer.decode(prompt.tokens[-prompt.question :])
        assert "?" in asked and lead in asked and answer.lower() not in asked.lower() and prompt.question < 60
        assert "?" not in tokenizer.decode(prompt.tokens[: -prompt.question])[-30:]
        assert message.lower().count(answer.lower()) == 1
        # The assistant's turn is opened up to the value: some wording of the fact, cut off before it.
        assert answer.lower() not in lead.lower()
        openings = [s.split("{value}")[0].rstrip() for s in templates(prompt.task.removeprefix("fact/"), split)[0]]
        assert any(re.fullmatch(_plain_pattern(opening), _plain_end(lead.strip())) for opening in openings if opening)
        assert is_correct(prompt, tokenizer.decode(prompt.continuation))


def _pattern(template):
    return re.sub(r"\\\{(\w+)\\\}", lambda match: f"(?P<{match[1]}>[\\w :-]+?)", re.escape(template))


def _plain_pattern(opening):
    return _pattern(_plain_end(opening))


def _plain_end(text):
    return re.sub(r"\b([Aa])n$", r"\1", text)  # The article before the value fits the value.


def _plain(text):
    return re.sub(r"\b([Aa])n (?=[aeiouAEIOU])", r"\1 ", text)  # Articles fit the next word.


def test_question_asks_about_the_fact_that_holds_the_answer(documents, tokenizer):
    for prompt in retrieval_prompts(documents, tokenizer, 300, 40, 0, "test"):
        text = tokenizer.decode(prompt.tokens)
        kind = prompt.task.removeprefix("fact/")
        sentences, questions = templates(kind, "test")
        question = next(m for q in questions if (m := re.search(_pattern(q), text)))
        stated = [s.format(value=prompt.answers[0], **question.groupdict()) for s in sentences]
        assert any(_plain(sentence) in _plain(text) for sentence in stated)


def test_number_of_facts(documents, tokenizer):
    patterns = [re.compile(_pattern(_plain(s))) for kind in KINDS for s in templates(kind, "train")[0]]

    def facts(prompt):
        text = _plain(tokenizer.decode(prompt.tokens))
        # By where they end, for one wording may be the end of another.
        return len({match.end() for pattern in patterns for match in pattern.finditer(text)})

    counts = [facts(prompt) for prompt in retrieval_prompts(documents, tokenizer, 400, 40, 1, "train", (2, 5))]
    assert set(counts) == {2, 3, 4, 5}


def test_facts_that_leave_no_room_are_drawn_again(documents, tokenizer):
    prompts = retrieval_prompts(documents, tokenizer, 80, 20, 0, "train", (1, 8))
    assert all(0.93 * 80 <= len(prompt.tokens) <= 80 for prompt in prompts)
    with pytest.raises(ConfigError, match="No passage"):
        retrieval_prompts(documents, tokenizer, 60, 1, 0, "train", (8, 8))


def test_prompts_depend_on_the_seed_alone(documents, tokenizer):
    def tokens(seed):
        prompts = retrieval_prompts(documents, tokenizer, 300, 5, seed, "train")
        prompts += text_prompts(documents, tokenizer, 200, 20, 5, seed)
        return [prompt.tokens.tolist() for prompt in prompts]

    assert tokens(0) == tokens(0)
    assert tokens(0) != tokens(1)


def test_text_prompts(documents, tokenizer):
    prompts = text_prompts(documents, tokenizer, 200, 20, 30, 0)
    text = "\n\n".join(document.text for document in documents)
    assert len({prompt.name for prompt in prompts}) == 30
    assert len({prompt.name.split("@")[0] for prompt in prompts}) > 10
    for prompt in prompts:
        assert prompt.kind == "text" and prompt.answers == () and prompt.task == "text"
        assert prompt.tokens.shape == (200,) and prompt.continuation.shape == (20,)
        assert tokenizer.decode(np.concatenate([prompt.tokens, prompt.continuation])) in text


def test_text_prompts_count_the_prefix(documents, tokenizer):
    bos = int(tokenizer.encode("<s>")[0])
    (prompt,) = text_prompts(documents, tokenizer, 100, 8, 1, 0, prefix=(bos,))
    assert prompt.tokens[0] == bos and prompt.tokens.shape == (100,) and prompt.continuation.shape == (8,)


def test_prompts_longer_than_a_document_join_documents(tokenizer):
    documents = _documents(number=12, count=20)
    prompts = retrieval_prompts(documents, tokenizer, 500, 4, 0, "train")
    assert all(0.93 * 500 <= len(prompt.tokens) <= 500 for prompt in prompts)


def test_splits_share_no_document(documents, tokenizer):
    train, test = split_documents(documents)
    names = [
        {prompt.name.split("@")[0] for prompt in text_prompts(side, tokenizer, 100, 10, 40, 0)}
        for side in (train, test)
    ]
    assert names[0] and names[1] and not names[0] & names[1]


def test_stream_by_position_equals_stream_in_order(documents, tokenizer):
    stream = PromptStream(documents, tokenizer, 250, seed=7, continuation=16)
    in_order = [prompt for prompt, _ in zip(stream, range(12), strict=False)]
    fresh = PromptStream(documents, tokenizer, 250, seed=7, continuation=16)
    for step in (11, 3, 0, 7):
        assert fresh[step].name == in_order[step].name
        np.testing.assert_array_equal(fresh[step].tokens, in_order[step].tokens)
        np.testing.assert_array_equal(fresh[step].continuation, in_order[step].continuation)
    assert {prompt.kind for prompt in in_order} == {"retrieval", "text"}
    assert len({prompt.name for prompt in in_order}) == 12


def test_stream_shares(documents, tokenizer):
    for share, kind in ((0.0, "text"), (1.0, "retrieval")):
        stream = PromptStream(documents, tokenizer, 250, retrieval=share)
        assert {stream[step].kind for step in range(6)} == {kind}


def test_truncate_middle():
    tokens = np.arange(10)
    assert truncate_middle(tokens, 4).tolist() == [0, 1, 8, 9]
    assert truncate_middle(tokens, 5).tolist() == [0, 1, 7, 8, 9]
    assert truncate_middle(tokens, 1).tolist() == [9]
    assert truncate_middle(tokens, 10) is tokens
    with pytest.raises(ConfigError, match="at least 1"):
        truncate_middle(tokens, 0)


def test_cuts_are_logged_once(caplog):
    with caplog.at_level(logging.WARNING):
        warn_truncated("x", 0, 5, 100)
        assert not caplog.records
        warn_truncated("x", 2, 5, 100)
    assert "2 of 5 prompts" in caplog.text


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("KT-4821", "The code is kt 4821.", True),
        ("37", "It costs 137 dollars.", False),
        ("37", "It costs 37 dollars.", True),
        ("1250", "1,250 people", True),
        ("copper lantern", "A Copper, lantern!", True),
        ("the old mill", "an old mill", True),
        ("7:45", "At 7:45.", True),
        ("Brindlemoor", "", False),
        ("...", "anything", False),
    ],
)
def test_is_correct(answer, text, right):
    empty = np.zeros(0, np.int32)
    assert is_correct(Prompt(empty, "retrieval", empty, (answer,), "n", "fact/x"), text) is right


def test_is_correct_of_gsm8k_takes_the_last_number():
    empty = np.zeros(0, np.int32)
    prompt = Prompt(empty, "retrieval", empty, ("1200",), "n", "gsm8k")
    assert is_correct(prompt, "2 x 600 = 1,200.")
    assert not is_correct(prompt, "1200 - 1 = 1199")
    assert not is_correct(prompt, "no number")


def test_bad_arguments(documents, tokenizer):
    with pytest.raises(ConfigError, match="no text"):
        retrieval_prompts([], tokenizer, 100, 1, 0, "train")
    with pytest.raises(ConfigError, match="32 tokens"):
        retrieval_prompts(documents, tokenizer, 8, 1, 0, "train")
    with pytest.raises(ConfigError, match="facts_per_prompt"):
        retrieval_prompts(documents, tokenizer, 100, 1, 0, "train", (3, 2))
    with pytest.raises(ConfigError, match="No passage"):
        retrieval_prompts(documents[:1], tokenizer, 50_000, 1, 0, "train")
    with pytest.raises(ConfigError, match="No document"):
        text_prompts(documents[:1], tokenizer, 50_000, 1, 1, 0)
    with pytest.raises(ConfigError, match="different prompts"):
        text_prompts([Document("d", "One short sentence here. " * 30)], tokenizer, 32, 1, 200, 0)
    with pytest.raises(ConfigError, match="cannot be negative"):
        text_prompts(documents, tokenizer, 100, -1, 1, 0)
    with pytest.raises(ConfigError, match="share between"):
        PromptStream(documents, tokenizer, 100, retrieval=1.5)
    with pytest.raises(ConfigError, match="counted from 0"):
        PromptStream(documents, tokenizer, 100)[-1]
