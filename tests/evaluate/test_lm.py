"""dcache as a model of lm-evaluation-harness."""

import logging

import jax
import numpy as np
import pytest
from lm_eval.api.instance import Instance

import dcache
from dcache.errors import ConfigError
from dcache.evaluate import lm as module
from dcache.evaluate.lm import DCacheLM
from dcache.tasks import WITHHELD

WORDS = [" ".join(map(str, np.random.default_rng(i).integers(2, 64, 40 + 7 * i))) for i in range(5)]


def requests(kind, arguments):
    return [Instance(kind, {}, args, i, ("task", i, 1)) for i, args in enumerate(arguments)]


def until(**kwargs):
    return {"until": [], "max_gen_toks": 12, "do_sample": False} | kwargs


@pytest.mark.parametrize("chunk", [0, 24])
def test_a_batch_answers_like_one_prompt_at_a_time(lm, chunk):
    asked = requests("generate_until", [(words, until()) for words in WORDS])
    models = [DCacheLM(lm, "snapkv", 32, batch_size=size, prefill_chunk=chunk) for size in (1, 4)]
    answers = [model.generate_until(asked, disable_tqdm=True) for model in models]
    assert answers[0] == answers[1]
    ids = [np.array([int(w) for w in words.split()]) for words in WORDS]
    settings = dict(max_new_tokens=12, evict_every=0, prefill_chunk=chunk)
    alone = [dcache.generate(lm, [i], "snapkv", 32, **settings).texts[0] for i in ids]
    assert answers[0] == alone


def test_answers_end_where_the_task_says(lm):
    (whole,) = DCacheLM(lm, "full").generate_until(requests("generate_until", [(WORDS[0], until())]), disable_tqdm=True)
    stop = whole.split()[2]
    (cut,) = DCacheLM(lm, "full").generate_until(
        requests("generate_until", [(WORDS[0], until(until=f" {stop}"))]), disable_tqdm=True
    )
    assert cut == whole[: whole.index(f" {stop}")]


def test_choices_are_scored_under_the_evicted_context(lm):
    context = WORDS[4]
    texts = [" 5 9", " 11"]
    found = DCacheLM(lm, "h2o", 32).loglikelihood(
        requests("loglikelihood", [(context, text) for text in texts]), disable_tqdm=True
    )
    ids = [int(w) for w in context.split()]
    for text, (value, greedy) in zip(texts, found, strict=True):
        alone = dcache.fidelity(lm, ids[:-1], [ids[-1], *map(int, text.split())], "h2o", 32)
        assert value == pytest.approx(-float(alone.nll[1:].sum()), abs=1e-3)
        assert not greedy


def test_texts_after_the_same_context_are_read_together():
    pairs = [([1, 2, 3], [9]), ([4], [5, 6, 7]), ([1, 2, 3], [8, 8])]
    assert list(module.by_context(pairs, 4)) == [([0, 2], [2, 3], True), ([1], [4], False)]


def test_a_texts_log_likelihood(lm):
    text = WORDS[3]
    (full,) = DCacheLM(lm, "full").loglikelihood_rolling(
        requests("loglikelihood_rolling", [(text,)]), disable_tqdm=True
    )
    ids = [int(w) for w in text.split()]
    log_p = np.asarray(jax.nn.log_softmax(dcache.logits(lm, [1, *ids])))
    assert full == pytest.approx(sum(log_p[i, token] for i, token in enumerate(ids)), abs=1e-2)
    (cut,) = DCacheLM(lm, "random", 8).loglikelihood_rolling(
        requests("loglikelihood_rolling", [(text,)]), disable_tqdm=True
    )
    assert abs(cut - full) > 1e-3


def test_the_withheld_end_is_found():
    class Letters:
        adds_bos, bos_id = True, 0

        def encode(self, text):
            return np.array([ord(c) for c in text], np.int32)

    tokens, hidden = module.encode(Letters(), f"ab{WITHHELD}cde")
    assert tokens == [0, *map(ord, "abcde")] and hidden == 3
    assert module.encode(Letters(), "\0ab") == ([0, *map(ord, "ab")], 0)  # a template may write it itself


def test_long_prompts_lose_their_beginning(lm, caplog):
    model = DCacheLM(lm, "full", max_length=30)
    with caplog.at_level(logging.WARNING):
        (found,) = model.generate_until(requests("generate_until", [(WORDS[0], until())]), disable_tqdm=True)
    ids = [int(w) for w in WORDS[0].split()][-18:]
    assert found == dcache.generate(lm, [ids], "full", 1.0, max_new_tokens=12).texts[0]
    assert "1 prompts were longer" in caplog.text
    with pytest.raises(ConfigError, match="no room"):
        model.generate_until(requests("generate_until", [("5 6", until(max_gen_toks=30))]), disable_tqdm=True)


def test_only_greedy_answers():
    assert module.longest_answer({"max_gen_toks": 7, "temperature": 0.0}, 3) == 7
    assert module.longest_answer({"do_sample": False, "temperature": 1}, 3) == 3
    for asked in ({"do_sample": True}, {"temperature": 0.7}):
        with pytest.raises(ConfigError, match="greedily"):
            module.longest_answer(asked, 3)


def test_chat_templates_and_prefixes():
    tiny = DCacheLM("tiny")
    history = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the answer"}]
    assert tiny.apply_chat_template(history, add_generation_prompt=False).endswith("the answer")
    assert tiny.tok_encode("ab", add_special_tokens=False) == tiny.tok_encode("ab")[1:]
    assert tiny.prefix_token_id == 0 and tiny.eot_token_id == 1
    assert tiny.tokenizer_name and tiny.chat_template(True) and tiny.chat_template(False) is None
