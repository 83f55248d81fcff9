"""LongBench and GSM8K from small local files in the benchmarks' formats."""

import json
import logging
import re

import numpy as np
import pytest

from dcache.data.benchmarks import gsm8k_prompts, longbench_prompts
from dcache.errors import ConfigError, LoadError


class WordTokenizer:
    """Words with the white space before them, numbered as they come."""

    bos_id = None
    eos_ids = ()
    vocab_size = 1 << 20

    def __init__(self):
        self.words = []

    def encode(self, text):
        found = re.findall(r"\s*\S+|\s+$", text)
        self.words += [word for word in dict.fromkeys(found) if word not in self.words]
        return np.array([self.words.index(word) for word in found], np.int32)

    def decode(self, ids):
        return "".join(self.words[i] for i in ids)

    def chat(self, message):
        return self.encode(f"<user> {message} <assistant>")


def _item(number, words=20):
    context = f"Passage {number}: " + " ".join(f"w{i}" for i in range(words)) + " {input} end"
    return {
        "input": f"Who wrote book {number}?",
        "context": context,
        "answers": [f"Author {number}", "Another"],
        "length": words,
        "dataset": "2wikimqa",
        "language": "en",
        "all_classes": None,
        "_id": str(number),
    }


@pytest.fixture
def longbench(tmp_path):
    lines = [json.dumps(_item(0)), json.dumps(_item(1, words=200))]
    (tmp_path / "2wikimqa_e.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "trec.jsonl").write_text(json.dumps(_item(2)) + "\n")
    (tmp_path / "config").mkdir()
    templates = {"2wikimqa": "Passages.\n{context}\n\nQuestion: {input}\nAnswer:", "trec": "{context}\n{input}"}
    (tmp_path / "config" / "dataset2prompt.json").write_text(json.dumps(templates))
    return tmp_path


def test_longbench_prompts_are_filled_and_cut_in_the_middle(longbench, caplog):
    tokenizer = WordTokenizer()
    with caplog.at_level(logging.WARNING):
        short, long = longbench_prompts("2wikimqa", tokenizer, 60, longbench)
    message = f"Passages.\n{_item(0)['context']}\n\nQuestion: Who wrote book 0?\nAnswer:"
    assert tokenizer.decode(short.tokens) == f"<user> {message} <assistant>"
    assert short.answers == ("Author 0", "Another") and tokenizer.decode(short.continuation) == "Author 0"
    assert short.kind == "retrieval" and short.task == "2wikimqa" and short.name != long.name
    text = tokenizer.decode(long.tokens)
    assert len(long.tokens) <= 60
    assert text.startswith("<user> Passages.\nPassage 1: w0 w1") and text.endswith(
        "Who wrote book 1?\nAnswer: <assistant>"
    )
    assert "1 of 2 prompts are longer than 60 tokens" in caplog.text
    assert len(longbench_prompts("2wikimqa", tokenizer, 60, longbench, count=1)) == 1


def test_longbench_tasks_without_chat_template(longbench):
    tokenizer = WordTokenizer()
    bos = tokenizer.encode("<s>")
    (prompt,) = longbench_prompts("trec", tokenizer, 30, longbench, prefix=bos)
    assert prompt.tokens[0] == bos[0] and "<user>" not in tokenizer.decode(prompt.tokens)


def test_longbench_errors(longbench, tmp_path):
    tokenizer = WordTokenizer()
    with pytest.raises(LoadError, match="holds no hotpotqa.jsonl"):
        longbench_prompts("hotpotqa", tokenizer, 60, longbench)
    with pytest.raises(LoadError, match="no directory"):
        longbench_prompts("2wikimqa", tokenizer, 60, tmp_path / "no" / "where")
    with pytest.raises(ConfigError, match="chat template"):
        longbench_prompts("2wikimqa", tokenizer, 2, longbench)
    templates = longbench / "config" / "dataset2prompt.json"
    templates.write_text("{}")
    with pytest.raises(LoadError, match="no prompt for the LongBench task '2wikimqa'"):
        longbench_prompts("2wikimqa", tokenizer, 60, longbench)
    templates.unlink()
    with pytest.raises(LoadError, match="dataset2prompt.json"):
        longbench_prompts("2wikimqa", tokenizer, 60, longbench)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"input": "q", "context": ', "not JSON"),
        ('{"input": "q", "context": "c"}', "'answers' is missing"),
        ('{"input": "q", "context": 3, "answers": ["a"]}', "'context' is missing or not a str"),
        ('["a", "list"]', "expected an object"),
    ],
)
def test_a_malformed_line_is_named(longbench, line, problem):
    path = longbench / "2wikimqa_e.jsonl"
    path.write_text(json.dumps(_item(0)) + "\n\n" + line + "\n")
    with pytest.raises(LoadError, match=f"2wikimqa_e.jsonl, line 3: .*{problem}"):
        longbench_prompts("2wikimqa", WordTokenizer(), 60, longbench)


def test_an_empty_file_is_an_error(longbench):
    (longbench / "2wikimqa_e.jsonl").write_text("")
    with pytest.raises(LoadError, match="2wikimqa_e.jsonl"):
        longbench_prompts("2wikimqa", WordTokenizer(), 60, longbench)


def test_an_unreachable_hub_is_one_clear_error(monkeypatch):
    import datasets

    def fail(*args, **kwargs):
        raise ConnectionError("no network\nand a long trace")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(LoadError, match=r"'main' of 'openai/gsm8k' from the hub \(no network\)"):
        gsm8k_prompts("train", WordTokenizer(), 60)


def test_hub_rows_are_checked(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: [{"question": "q"}])
    with pytest.raises(LoadError, match="item 1: the field 'answer' is missing"):
        gsm8k_prompts("train", WordTokenizer(), 60)


@pytest.fixture
def gsm8k(tmp_path):
    rows = [
        {
            "question": "Ann has 2 bags of 600 nuts. How many nuts?",
            "answer": "2*600 = <<2*600=1200>>1,200 nuts.\n#### 1,200",
        },
        {"question": "Ben has 3 cats. How many?", "answer": "He has 3.\n#### 3"},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_gsm8k_prompts(gsm8k):
    tokenizer = WordTokenizer()
    first, second = gsm8k_prompts("train", tokenizer, 40, gsm8k)
    assert tokenizer.decode(first.tokens) == "<user> Ann has 2 bags of 600 nuts. How many nuts? <assistant>"
    assert tokenizer.decode(first.continuation) == "2*600 = 1,200 nuts.\nThe answer is 1200."
    assert first.answers == ("1200",) and first.task == "gsm8k" and first.name != second.name


def test_gsm8k_leaves_out_exemplars(gsm8k):
    (prompt,) = gsm8k_prompts(
        "train", WordTokenizer(), 40, gsm8k, exclude=["ann has 2 bags of 600 nuts!  how many nuts?"]
    )
    assert prompt.answers == ("3",)
    assert len(gsm8k_prompts("train", WordTokenizer(), 40, gsm8k, count=1)) == 1


def test_gsm8k_errors(gsm8k):
    with pytest.raises(ConfigError, match="no split"):
        gsm8k_prompts("validation", WordTokenizer(), 40, gsm8k)
    with pytest.raises(LoadError, match="holds no test.jsonl"):
        gsm8k_prompts("test", WordTokenizer(), 40, gsm8k)
    (gsm8k / "train.jsonl").write_text('{"question": "q", "answer": "no mark"}\n')
    with pytest.raises(LoadError, match="item 1: the answer lacks"):
        gsm8k_prompts("train", WordTokenizer(), 40, gsm8k)
