"""RULER's prompts by their properties, its metrics by hand, its task files through the harness."""

import json
import os
import pathlib
import random
import re

import numpy as np
import pytest

from dcache.data import ruler
from dcache.data.ruler import counting, filler, fitting, niah, questions, source
from dcache.errors import ConfigError, LoadError
from dcache.load import find_directory
from dcache.tokenizer import ByteTokenizer, load_tokenizer

NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\.")


class WordTokenizer:
    """Runs of letters, single digits and single signs, much like a real tokenizer; a chat template of 12 tokens."""

    bos_id = None
    eos_ids = ()
    vocab_size = 1

    def encode(self, text):
        return np.zeros(len(re.findall(r" ?[^\W\d]{1,6}|\d| ?[^\w\s]|\s", text)), np.int32)

    def chat(self, message):
        return np.zeros(12 + len(self.encode(message)), np.int32)


def _squad():
    articles = []
    for a in range(6):
        paragraphs = []
        for p in range(3):
            context = f"Town {a}{p} was founded in year {1000 + 10 * a + p}. " + f"It lies in region {a}. " * (
                5 + 3 * p
            )
            qas = [
                {
                    "id": f"{a}{p}",
                    "question": f"When was town {a}{p} founded?",
                    "answers": [{"text": f"year {1000 + 10 * a + p}", "answer_start": 0}] * 2
                    + [{"text": f"{1000 + 10 * a + p}", "answer_start": 0}],
                },
                {"id": "none", "question": "Unanswerable?", "answers": [], "is_impossible": True},
            ]
            paragraphs.append({"context": context.strip(), "qas": qas})
        articles.append({"title": f"t{a}", "paragraphs": paragraphs})
    return {"version": "1", "data": articles}


def _hotpot():
    items = []
    for i in range(8):
        context = [[f"Title {i}.{k}", [f"Fact {i}.{k} is stated.", f" More words on {k}." * 8]] for k in range(10)]
        items.append(
            {
                "_id": str(i),
                "question": f"Which fact is {i}?",
                "answer": f"Fact {i}.3",
                "supporting_facts": [[f"Title {i}.3", 0], [f"Title {i}.7", 1], [f"Title {i}.3", 1]],
                "context": context,
            }
        )
    return items


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "ruler").mkdir()
    text = " ".join(f"On day {i} we walked to the river. Was it far? It was {i % 7} miles away!" for i in range(900))
    (folder / "ruler" / "essays.json").write_text(json.dumps({"text": text}))
    (folder / "ruler" / "xquad.en.json").write_text(json.dumps(_squad()))
    (folder / "ruler" / "hotpotqa60.json").write_text(json.dumps(_hotpot()))
    return folder


def _check_length(sample, tokenizer):
    tokens = len(tokenizer.chat(sample.input)) + len(tokenizer.encode(sample.answer_prefix))
    assert sample.tokens == tokens
    total = tokens + ruler.ANSWER_TOKENS[sample.task]
    assert 0.98 * sample.max_length <= total <= sample.max_length


def _check_needles(sample):
    settings = niah.SETTINGS[sample.task]
    found = NEEDLE.findall(sample.input)
    by_key = {}
    for kind, key, value in found:
        assert kind == settings.value
        by_key.setdefault(key, []).append(value)
    own = settings.keys * settings.values
    assert len(found) == own if settings.haystack != "needle" else len(found) > own
    question = sample.input.rpartition("\n")[2]
    asked = [key for key in by_key if key in question]
    assert len(asked) == settings.queries
    assert sorted(value for key in asked for value in by_key[key]) == sorted(sample.outputs)
    assert len({value for values in by_key.values() for value in values}) == len(found)
    for output in sample.outputs:
        assert sample.input.count(output) == 1
    one = len(sample.outputs) == 1
    kind = settings.value[: -1 if one else None]
    assert question.startswith(f"What {'is' if one else 'are all'} the special magic {kind} for ")
    assert sample.answer_prefix.startswith(f"The special magic {kind} for ")
    assert sample.answer_prefix.endswith("text is" if one else "text are")


def _check_vt(sample):
    example, _, text = sample.input.rpartition("\n\n\n\n")
    names = "".join(f"VAR {name} = .*" for name in sample.outputs)
    assert re.search(names, text, re.S)  # in the order of the chain
    assert len(re.findall(r"VAR \w{5} = ", text)) == 5
    value = re.search(r"assigned the value (\d{5}) in", text).group(1)
    assert text.count(f"VAR {sample.outputs[0]} = {value}") == 1
    assert value not in example
    solution = example.rpartition("they are: ")[2].split()
    assert len(solution) == 5 and all(f"VAR {name} =" in example for name in solution)


def _check_cwe(sample):
    example, _, text = sample.input.rpartition(" Answer: ")
    entries = re.findall(r"(\d+)\. (\S+)", text.partition("Memorize")[2])
    numbers = [int(number) for number, _ in entries]
    assert numbers == list(range(1, len(numbers) + 1))
    counts = {}
    for _, word in entries:
        counts[word] = counts.get(word, 0) + 1
    often, seldom = (6, 1) if sample.max_length < 4096 else (30, 3)
    assert {word for word, count in counts.items() if count == often} == set(sample.outputs)
    assert {count for word, count in counts.items() if word not in sample.outputs} == {seldom}
    assert "10. " in text.partition("Memorize")[0].partition("\n")[0]  # the example's answer


def _check_fwe(sample):
    text = sample.input.partition("coded words. ")[2].rpartition("\nQuestion")[0].split()
    counts = sorted(((text.count(word), word) for word in set(text) if word != "..."), reverse=True)
    assert [word for _, word in counts[:3]] == list(sample.outputs)
    assert counts[2][0] > counts[3][0] and text.count("...") > counts[0][0]


def _check_qa(sample, data):
    asked, _ = questions.questions(sample.task, data)
    (question,) = [q for q in asked if sample.input.endswith(f"Question: {q.text}")]
    for document in question.gold:
        assert sample.input.count(document) == 1
    assert sample.outputs == question.answers
    numbers = [int(n) for n in re.findall(r"^Document (\d+):$", sample.input, re.M)]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > len(question.gold)


def _check(sample, data):
    if sample.task in niah.SETTINGS:
        _check_needles(sample)
    elif sample.task in questions.FILES:
        _check_qa(sample, data)
    else:
        {"vt": _check_vt, "cwe": _check_cwe, "fwe": _check_fwe}[sample.task](sample)


@pytest.mark.parametrize("task", ruler.TASKS)
def test_prompts_have_the_official_properties(task, data):
    tokenizer = WordTokenizer()
    for length, count in ((1280, 4), (2048, 4), (8192, 1)):
        found = ruler.samples(task, tokenizer, length, count, data_dir=data)
        assert len(found) == count and len({sample.input for sample in found}) == count
        for sample in found:
            assert (sample.task, sample.max_length) == (task, length)
            _check_length(sample, tokenizer)
            _check(sample, data)


@pytest.mark.parametrize("task", ruler.TASKS)
def test_the_seed_decides(task, data):
    def inputs(count, seed):
        return [s.input for s in ruler.samples(task, WordTokenizer(), 1280, count, seed, data)]

    three = inputs(3, 1)
    assert three == inputs(3, 1)
    assert three[:2] == inputs(2, 1)
    assert not set(three) & set(inputs(3, 2))


@pytest.mark.parametrize("task", ruler.TASKS)
def test_lengths_without_room_are_refused_and_the_smallest_is_told(task, data):
    with pytest.raises(ruler.NoRoomError, match="ask for at least") as caught:
        ruler.samples(task, WordTokenizer(), 60, 1, data_dir=data)
    smallest = caught.value.smallest
    # Other lengths draw other needles, so that a few tokens may be lacking.
    (sample,) = ruler.samples(task, WordTokenizer(), smallest + 40, 1, data_dir=data)
    assert sample.tokens + ruler.ANSWER_TOKENS[task] <= smallest + 40


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_3", "qa_2"])
def test_a_tokenizer_of_characters(task, data):
    for sample in ruler.samples(task, ByteTokenizer(), 2048, 2, data_dir=data):
        _check_length(sample, ByteTokenizer())


def test_the_default_models_tokenizer(data):
    tokenizer = load_tokenizer(find_directory("smollm2"))
    for task in ruler.TASKS:
        for sample in ruler.samples(task, tokenizer, 1024, 2, data_dir=data):
            _check_length(sample, tokenizer)
            _check(sample, data)


def test_whole_lines_from_4096_tokens_on(data):
    for sample in ruler.samples("niah_multikey_3", WordTokenizer(), 4096, 3, data_dir=data):
        assert all(NEEDLE.fullmatch(line) for line in sample.input.split("\n")[1:-1])
    for sample in ruler.samples("niah_single_1", WordTokenizer(), 4096, 3, data_dir=data):
        lines = sample.input.split("\n")[1:-1]
        assert len({line for line in lines if not NEEDLE.fullmatch(line)}) == 1


def test_needles_stand_at_all_depths(data):
    places = []
    for sample in ruler.samples("niah_single_2", WordTokenizer(), 1280, 60, data_dir=data):
        places.append(NEEDLE.search(sample.input).start() / len(sample.input))
    assert min(places) < 0.25 and max(places) > 0.75 and 0.35 < np.mean(places) < 0.65


def test_long_word_lists_are_made_of_pairs(data):
    (sample,) = ruler.samples("cwe", WordTokenizer(), 32768, 1, data_dir=data)
    _check_length(sample, WordTokenizer())
    _check_cwe(sample)
    assert all("-" in word for word in sample.outputs)


def test_frequencies_follow_zipfs_law():
    words = counting.frequent_words(random.Random(0), 5000).render(1000, 0).partition("coded words. ")[2].split("\n")[0]
    found = sorted((words.split().count(word) for word in set(words.split())), reverse=True)
    assert found[:4] == [607, 151, 67, 37]  # 1000 / 1.6449 divided by 1, 4, 9, 16, rounded down


def test_documents_begin_again_where_there_are_too_few(data):
    (sample,) = ruler.samples("qa_1", WordTokenizer(), 8192, 1, data_dir=data)
    _check_qa(sample, data)
    assert len(re.findall(r"^Document \d+:$", sample.input, re.M)) > 18


def test_questions_are_asked_once(data):
    assert len(ruler.samples("qa_2", WordTokenizer(), 2048, 500, data_dir=data)) == 8


def test_questions_with_long_documents_are_counted(data, tmp_path, caplog):
    (tmp_path / "ruler").mkdir()
    items = _hotpot()
    items[0]["context"][3][1][0] += " word" * 900
    (tmp_path / "ruler" / "hotpotqa60.json").write_text(json.dumps(items))
    assert len(ruler.samples("qa_2", WordTokenizer(), 1024, 500, data_dir=tmp_path)) == 7
    assert "1 questions need more than 1024 tokens" in caplog.text


def test_needles_without_the_essays(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(filler, "_installed_words", lambda: ("Some", "words", "here.") * 50)
    (sample,) = ruler.samples("niah_single_2", WordTokenizer(), 1024, 1)
    assert sample.filler == "installed_text" and not caplog.text
    _check_length(sample, WordTokenizer())
    (again,) = ruler.samples("niah_single_2", WordTokenizer(), 1024, 1, data_dir=tmp_path)
    assert again == sample and "essays.json" in caplog.text


def test_errors(tmp_path):
    with pytest.raises(ConfigError, match="no task 'niah'"):
        ruler.samples("niah", WordTokenizer(), 1024, 1)
    with pytest.raises(ConfigError, match="length is 0"):
        ruler.samples("vt", WordTokenizer(), 0, 1)
    with pytest.raises(ConfigError, match="count is 1.5"):
        ruler.samples("vt", WordTokenizer(), 1024, 1.5)
    with pytest.raises(LoadError, match=r"qa_1 needs <data_dir>/ruler/dev-v2.0.json or .*xquad.en.json"):
        ruler.samples("qa_1", WordTokenizer(), 1024, 1)
    folder = tmp_path / "ruler"
    folder.mkdir()
    for name, task in (("essays", "niah_single_2"), ("xquad.en", "qa_1"), ("hotpotqa60", "qa_2")):
        for content in ("[3", "[3]", '{"data": 3}'):
            (folder / f"{name}.json").write_text(content)
            with pytest.raises(LoadError, match=re.escape(str(folder / f"{name}.json"))):
                ruler.samples(task, WordTokenizer(), 1024, 1, data_dir=tmp_path)
            filler._words.cache_clear()


def test_the_harness_has_the_texts():
    assert NEEDLE.fullmatch(source.constant("prepare_niah", "NEEDLE").format(type_needle_v="uuids", key="k", value="v"))
    with pytest.raises(LoadError, match="does not define NOTHING"):
        source.constant("niah_utils", "NOTHING")
    with pytest.raises(LoadError, match="Cannot read RULER's prompts"):
        source.constant("no_module", "NOTHING")


def test_fit_never_hangs_and_finds_the_best():
    calls = []

    def draft(step):
        def render(units, pieces):
            calls.append(units)
            return "x" * (step * units + pieces)

        return fitting.Draft(render, "", (), 1, 10**6, lambda _: step - 1)

    assert len(fitting.fit(draft(1), len, 1000, 100)) in range(885, 901)
    assert len(fitting.fit(draft(300), len, 1000, 50)) in range(930, 951)
    assert len(calls) < 60
    with pytest.raises(fitting.NoRoomError, match="at least 400"):
        fitting.fit(draft(300), len, 399, 100)
    # A size that jumps: interpolation fails, halving finds the edge.
    jump = fitting.Draft(lambda n, _: "x" * (n // 777 * 500), "", (), 1, 10**6, lambda _: 0)
    assert len(fitting.fit(jump, len, 1400, 0)) == 1000


def test_metrics_by_hand():
    assert ruler.string_match_all("the Apple\x00and PEAR", ["apple", "pear", "plum", "fig"]) == 0.5
    assert ruler.string_match_part("the Apple", ["apple", "pear"]) == 1.0
    assert ruler.string_match_part("nothing", ["apple", "pear"]) == 0.0
    assert ruler.string_match_all("two\twords", ["two words"]) == 0.0  # a control character becomes a line end
    assert ruler.score("qa_1", "1066", ["1066", "in 1066"]) == 1.0
    assert ruler.score("niah_multivalue", "12, 34", ["12", "34", "56", "78"]) == 0.5
    with pytest.raises(ConfigError, match="no references"):
        ruler.string_match_all("a", [])


def test_the_shape_of_official_prompts():
    folder = pathlib.Path(os.environ.get("DCACHE_SHARED", ""), "data", "ruler")
    path = folder / "niah_multikey_3_4096.jsonl"
    if not os.environ.get("DCACHE_SHARED") or not path.is_file():
        pytest.skip("DCACHE_SHARED names no folder with data/ruler/niah_multikey_3_4096.jsonl")
    key = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    shape = re.compile(
        r"A special magic uuid is hidden within the following text\. Make sure to memorize it\. "
        r"I will quiz you about the uuid afterwards\.\n"
        rf"((?:One of the special magic uuids for {key} is: {key}\.\n)+)"
        rf"What is the special magic uuid for ({key}) mentioned in the provided text\? "
        r"The special magic uuid for \2 mentioned in the provided text is"
    )
    official = [json.loads(line) for line in path.read_text().splitlines()]
    mine = ruler.samples("niah_multikey_3", WordTokenizer(), 4096, 20)
    texts = [item["input"] for item in official] + [f"{s.input} {s.answer_prefix}" for s in mine]
    outputs = [item["outputs"] for item in official] + [list(s.outputs) for s in mine]
    for text, (output,) in zip(texts, outputs, strict=True):
        match = shape.fullmatch(text)
        assert f"for {match.group(2)} is: {output}." in match.group(1)


def test_task_files_in_the_harness(data, tiny):
    pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    from dcache.tasks import PATH

    metadata = {"tokenizer": tiny.tokenizer, "data_dir": str(data), "count": 2, "max_seq_lengths": [2560, 3072]}
    manager = TaskManager(include_path=PATH, include_defaults=False, metadata=metadata)
    loaded = manager.load(["dcache_ruler"])["tasks"]
    assert set(loaded) == {f"dcache_ruler_{task}" for task in ruler.TASKS}
    for name, task in loaded.items():
        base = name.removeprefix("dcache_ruler_")
        docs = list(task.test_docs())
        assert [doc["max_length"] for doc in docs] == [2560, 2560, 3072, 3072]
        task.build_all_requests(rank=0, world_size=1)
        requests = task.instances
        assert len(requests) == 4
        prompt, options = requests[0].args
        assert prompt == f"{docs[0]['input']} {docs[0]['gen_prefix']}"
        assert options["max_gen_toks"] == ruler.ANSWER_TOKENS[base] and options["until"] == []
        assert task.config.metadata["chat"] is True
        assert task.process_results(docs[0], [" ".join(docs[0]["outputs"])]) == {"score": 1.0}
        assert task.process_results(docs[0], ["?"]) == {"score": 0.0}


def test_task_files_need_a_tokenizer():
    from dcache.tasks.ruler import utils

    with pytest.raises(ConfigError, match="no tokenizer"):
        utils.prompts(dataset="vt")
    with pytest.raises(ConfigError, match="max_seq_lengths is '4096'"):
        utils.prompts(dataset="vt", tokenizer="tiny", max_seq_lengths="4096")
    docs = utils.prompts(dataset="niah_single_1", model="tiny", max_seq_lengths=[1024], count=1)["test"]
    assert docs[0]["filler"] == "repeat" and docs[0]["tokens"] + 128 <= 1024
