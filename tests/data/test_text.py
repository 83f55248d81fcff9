"""Sources of text: cleaning, sentences, and splits without a common document."""

import string

import pytest

from dcache.data.text import (
    Document,
    clean_text,
    directory_text,
    installed_text,
    sentences,
    split_documents,
)
from dcache.errors import ConfigError, LoadError


def test_installed_text_is_long_english_and_repeatable():
    documents = installed_text()
    text = "".join(document.text for document in documents)
    assert len(text) > 400_000
    assert sum(c in string.printable for c in text) / len(text) > 0.98
    assert not any(ord(c) < 32 and c != "\n" for c in text)
    assert text.lower().count(" the ") > 5_000
    assert len({document.name for document in documents}) == len(documents)
    assert installed_text() == documents


def test_installed_text_skips_missing_packages_and_repeats_no_paragraph():
    documents = installed_text(("no_such_package_at_all", "numpy"))
    assert {document.name.split("/")[0] for document in documents} == {"python", "numpy"}
    paragraphs = [p for document in documents for p in document.text.split("\n\n") if len(p) > 200]
    assert len(set(paragraphs)) > 0.999 * len(paragraphs)


def test_clean_text_unwraps_prose_and_keeps_lists():
    raw = "    One line\n    and the next.\x07\r\n\n\n\n    * an item\n      goes on\n"
    assert clean_text(raw) == "One line and the next.\n\n* an item\n  goes on"
    assert clean_text("") == ""


def test_sentences_join_to_the_text():
    text = 'Mr. Smith came, e.g. On foot. "Why?" He said so! No. 5 is open.\n\nA heading\n\nThe end'
    parts = sentences(text)
    assert "".join(parts) == text
    assert parts[:3] == ["Mr. Smith came, e.g. On foot. ", '"Why?" ', "He said so! "]
    assert parts[-2:] == ["A heading\n\n", "The end"]


def _document(name: str, characters: int) -> Document:
    paragraph = f"This is a sentence of {name}. And here is one more."
    count = characters // len(paragraph) + 1
    return Document(name, "\n\n".join(f"{paragraph} It has the number {i}." for i in range(count)))


def test_split_is_disjoint_stable_and_of_the_right_size():
    documents = [_document(f"document {i}", 2_000) for i in range(400)]
    train, test = split_documents(documents, 0.3, seed=1)
    assert not {document.name for document in train} & {document.name for document in test}
    assert len(train) + len(test) == 400
    assert 0.22 < len(test) / 400 < 0.38
    fewer_train, fewer_test = split_documents(documents[:200], 0.3, seed=1)
    assert set(fewer_train) <= set(train) and set(fewer_test) <= set(test)
    assert split_documents(documents, 0.3, seed=2)[1] != test


def test_a_novel_is_cut_into_a_first_and_a_last_part():
    novel = _document("novel", 200_000)
    train, test = split_documents([novel], 0.3)
    assert [document.name for document in train + test] == [f"novel#{i}" for i in range(len(train + test))]
    assert "\n\n".join(document.text for document in train + test) == novel.text
    assert sum(len(document.text) for document in test) / len(novel.text) == pytest.approx(0.3, abs=0.02)
    assert max(len(document.text) for document in train + test) < 22_000


def test_a_single_short_document_is_cut_too():
    train, test = split_documents(
        [Document("one", "First sentence here. Second one is here. A third follows. And a fourth.")]
    )
    assert train and test


def test_split_refuses_bad_arguments():
    with pytest.raises(ConfigError, match="between 0 and 1"):
        split_documents([_document("a", 100)], 1.0)
    with pytest.raises(ConfigError, match="Two documents"):
        split_documents([_document("a", 100), _document("a", 200)])
    with pytest.raises(ConfigError, match="cannot be split"):
        split_documents([])


def test_directory_text_reads_books_and_wikitext(tmp_path):
    (tmp_path / "book.txt").write_text(
        "Licence\n*** START OF THIS BOOK ***\nA line\nwraps.\n\n*** END OF THIS BOOK ***\nmore"
    )
    wiki = " = First title = \n\n It cost 1 @,@ 000 pounds , they say . \n = = Part = = \n More . \n"
    wiki += " = Second = \n\n Text here . \n"
    (tmp_path / "wiki.txt").write_text(wiki)
    documents = directory_text(tmp_path)
    assert [document.name for document in documents] == ["book", "wiki/0-First title", "wiki/1-Second"]
    assert documents[0].text == "A line wraps."
    assert "It cost 1,000 pounds, they say." in documents[1].text


def test_directory_text_says_what_is_missing(tmp_path):
    with pytest.raises(LoadError, match="no directory"):
        directory_text(tmp_path / "nowhere")
    with pytest.raises(LoadError, match="no .txt file"):
        directory_text(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(LoadError, match="UTF-8"):
        directory_text(tmp_path)
    (tmp_path / "a.txt").write_text("  \n")
    with pytest.raises(LoadError, match="empty"):
        directory_text(tmp_path)
