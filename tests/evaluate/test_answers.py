import pytest

from dcache.evaluate import answers


def record(task, full, ours, length=1000, doc_length=None):
    """An example with (score, answer, ended, answer tokens) of the full cache and of h2o at 25%."""

    def cell(score, answer, ended, tokens):
        return {"score": score, "answer": answer, "ended": ended, "answer_tokens": tokens}

    arms = {"full": {"100%": cell(*full)}, "h2o": {"25%": cell(*ours)}}
    return {"name": f"{task}@0", "task": task, "length": length, "doc_length": doc_length, "arms": arms}


@pytest.mark.parametrize(
    "text,expected",
    [
        ("", False),
        ("The cat sat on the mat and looked at the dog for a very long time.", False),
        ("no no no", False),  # three copies, but three words
        ("no " * 11, False),
        ("no " * 12, True),
        ("I think that it is the cat. " * 2, False),  # 16 words and signs, two copies
        ("I think that it is the cat. " * 3, True),
        ("It began well. " + "the dog ran and " * 3, True),  # a block of four, twelve words
        ("the dog ran " * 3, False),  # nine words
        ("one two three four five " * 3 + "one two", True),  # the last copy is cut off
        ("no " * 20 + "The answer is Paris, the capital of France.", False),  # a loop that ended
        ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15", False),
        ("a b c d e f g h a b c d e f g h a b c d e f g X", False),  # the last word breaks it
    ],
)
def test_repetitive(text, expected):
    assert answers.repetitive(text) is expected


def test_right_depends_on_the_task():
    assert answers.right("dcache_longbench_qasper", 0.5) and not answers.right("dcache_longbench_qasper", 0.49)
    for task in ("gsm8k_cot", "bbh_fewshot_snarks", "boolq", "dcache_ruler_vt"):
        assert answers.right(task, 1.0) and not answers.right(task, 0.9)


GOOD = (1.0, "Paris", True, 2)


@pytest.mark.parametrize(
    "full,ours,expected",
    [
        (GOOD, (0.8, "Paris, France", True, 4), "right"),
        (GOOD, (0.1, "London", True, 2), "incorrect"),
        (GOOD, (0.1, "well " * 40, False, 40), "repetitive"),  # a loop that ran into the limit is a loop
        (GOOD, (0.1, "London is the capital of", False, 40), "overlength"),
        (
            (1.0, "Paris is", False, 40),
            (0.1, "London is", False, 40),
            "incorrect",
        ),  # the full cache's did not end either
        ((0.3, "Rome", True, 2), (0.1, "London", True, 2), None),
        ((None, "Rome", True, 2), (0.1, "London", True, 2), None),
    ],
)
def test_modes(full, ours, expected):
    assert answers.mode(record("dcache_longbench_qasper", full, ours), "h2o", "25%") == expected


def test_lengths():
    assert answers.lengths(record("t", GOOD, (0.0, "x", True, 5)), "h2o", "25%") == (5.0, 2.0)
    assert answers.lengths(record("t", (1.0, "", True, 0), (0.0, "x", True, 5)), "h2o", "25%") is None


@pytest.mark.parametrize(
    "task,length,doc,expected",
    [
        ("dcache_longbench_qasper", 1448, 9000, "1K"),  # sqrt(2) times 1,024 is 1,448.2
        ("dcache_longbench_qasper", 1449, 9000, "2K"),
        ("dcache_longbench_qasper", 2896, None, "2K"),
        ("dcache_longbench_qasper", 5793, None, "8K"),
        ("dcache_longbench_qasper", 300, None, "256"),
        ("dcache_ruler_vt", 3000, 4096, "4K"),  # what it was made for
        ("dcache_ruler_vt", 2000, None, "2K"),
    ],
)
def test_length_bins(task, length, doc, expected):
    assert answers.length_bin(record(task, GOOD, GOOD, length, doc)) == expected


def test_bins_are_in_order():
    assert answers.bins([record("t", GOOD, GOOD, n) for n in (16384, 500, 2000, 4000, 2100)]) == [
        "512",
        "2K",
        "4K",
        "16K",
    ]
