"""LongBench's metrics on items worked out by hand, and against the official scores where they are at hand."""

import json
import os
import pathlib

import pytest

from dcache.errors import ConfigError
from dcache.evaluate import longbench


def test_qa_f1_counts_words_after_normalisation():
    # "cat sat" of two words, "cat sat down" of three: two in common, so 2 * 2 / (2 + 3).
    assert longbench.score("qasper", "The cat, sat!", ["A cat sat down"]) == pytest.approx(0.8)
    assert longbench.score("qasper_e", "dog", ["cat", "the dog"]) == 1.0  # the best of the answers
    assert longbench.score("hotpotqa", "no no no", ["no"]) == pytest.approx(2 / 4)  # with multiplicity
    assert longbench.score("musique", "", ["a"]) == 0.0


def test_rouge_l_is_about_distinct_words_of_sentences():
    # The longest common subsequence is "the big mat": 3 of 4 distinct words on either side.
    assert longbench.rouge_l("the big red mat", "the mat is big mat") == pytest.approx(2 * 3 / (4 + 4))
    # "a b" and "c d" are matched separately, whatever their order, and a repeated word counts once.
    assert longbench.score("gov_report", "c d. a b. a b", ["a b. c d"]) == 1.0
    assert longbench.rouge_l("b a", "a b") == 0.5
    assert longbench.rouge_l("...", "a") == 0.0 and longbench.rouge_l("", "a") == 0.0
    # White space between two full stops is a sentence with one empty word: 1 of 2 words.
    assert longbench.rouge_l("a. .", "a") == pytest.approx(2 * 1 / (2 + 1))
    assert longbench.rouge_l("A", "a") == 0.0  # case matters


def test_classes_share_the_score_unless_they_are_part_of_the_answer():
    classes = ["Food", "Date", "City", "Other location", "location"]
    assert longbench.score("trec", "\nCity\nDate", ["City"], classes) == 1.0  # only the first line counts
    assert longbench.score("trec", "City or Date", ["City"], classes) == 0.5
    assert longbench.score("trec", "Other location", ["Other location"], classes) == 1.0
    assert longbench.score("trec", "Food", ["City"], classes) == 0.0
    with pytest.raises(ConfigError, match="all_classes"):
        longbench.score("trec", "City", ["City"])


def test_numbers_share_the_score():
    assert longbench.score("passage_retrieval_en", "Paragraph 3 or 12", ["Paragraph 12"]) == 0.5
    assert longbench.score("passage_retrieval_en", "the last", ["Paragraph 12"]) == 0.0
    assert longbench.score("passage_count_e", "7, 7, 6, 5", ["7"]) == 0.5
    with pytest.raises(ConfigError, match="does not name a paragraph"):
        longbench.score("passage_retrieval_en", "3", ["twelve"])


def test_code_similarity_is_that_of_the_first_line_of_code():
    # "abcd" and "bcde" share "bcd": 2 * 3 / 8; both are strings of one line.
    assert longbench.score("lcc", "\n```python\n# say\n// so\nabcd\nxyz", ["bcde"]) == 0.75
    assert longbench.score("repobench-p", "abc", ["abcdefg"]) == 0.6
    assert longbench.score("lcc", "# only a comment", ["x"]) == 0.0


def test_only_few_shot_tasks_are_scored_on_their_first_line():
    assert longbench.score("triviaqa", "\n\nParis\nLondon", ["Paris"]) == 1.0
    assert longbench.score("samsum", "a b\nc d", ["a b"]) == 1.0
    assert longbench.score("narrativeqa", "Paris\nLondon", ["Paris"]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("dataset", ["dureader", "multifieldqa_zh", "hotpot", "_e"])
def test_unknown_datasets_are_named(dataset):
    with pytest.raises(ConfigError, match=f"{dataset}.*known: narrativeqa"):
        longbench.score(dataset, "a", ["a"])


def test_paper_score_is_rouge_l_of_the_whole_answer():
    assert longbench.paper_score("a b\nc d", ["a b", "a b c"]) == pytest.approx(2 * 3 / (4 + 3))


def test_averages_by_task_group_and_overall():
    found = longbench.averages({"qasper": [1 / 3, 0.0, 0.0], "narrativeqa_e": [0.5], "lcc": [1.0]})
    assert found.tasks == {"qasper": 11.11, "narrativeqa_e": 50.0, "lcc": 100.0}
    assert found.groups == {"single-document": pytest.approx(30.555), "code": 100.0}
    assert found.overall == pytest.approx((11.11 + 50 + 100) / 3)
    for scores in ({}, {"lcc": []}, {"lcc": [1.0], "lcc_e": [1.0]}, {"vcsum": [1.0]}):
        with pytest.raises(ConfigError):
            longbench.averages(scores)


def test_scores_by_length():
    found = longbench.by_length([1.0, 0.0, 0.5, 0.25], [0, 3999, 4000, 8000])
    assert found == {"0-4k": 50.0, "4-8k": 50.0, "8k+": 25.0}
    assert longbench.by_length([0.5], [7999]) == {"4-8k": 50.0}
    with pytest.raises(ConfigError, match="1 scores but 2 lengths"):
        longbench.by_length([1.0], [1, 2])


def test_official_scores():
    shared = os.environ.get("DCACHE_SHARED")
    if not shared:
        pytest.skip("DCACHE_SHARED does not say where LongBench's reference scores are")
    lines = (pathlib.Path(shared) / "longbench" / "reference_scores.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines):
        found = longbench.score(row["dataset"], row["prediction"], row["answers"], row["all_classes"])
        tolerance = 0.02 if row["dataset"] in ("lcc", "repobench-p") else 0.005
        assert found == pytest.approx(row["score"], abs=tolerance), row["dataset"]
