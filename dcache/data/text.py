"""Real English text, from what every installation has or from a directory of .txt files; cleaned, split by document."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dcache.errors import ConfigError, LoadError

PACKAGES = ("numpy", "scipy", "matplotlib", "jax", "flax", "optax", "tqdm", "datasets")
"""Dependencies of this project whose docstrings and guides serve as text; a missing one is skipped."""

_PACKAGE_CHARACTERS = 250_000  # Of each package, so that none dominates and reading stays at a second or two.
_MIN_DOCSTRING = 800  # Shorter docstrings are mostly signatures.
_MIN_DOCUMENT = 1_500
_PIECE_CHARACTERS = 20_000
_LONG_DOCUMENT = 60_000


@dataclasses.dataclass(frozen=True)
class Document:
    """A cleaned text with a unique name. Paragraphs are separated by one blank line; prose paragraphs are one line."""

    name: str
    text: str


def installed_text(packages: Sequence[str] = PACKAGES) -> list[Document]:
    """English that every installation has: Python's language reference, then long docstrings and guides of `packages`.

    The topics of `pydoc_data` overlap (one contains another), and so do docstrings: a paragraph stays only where it
    is met first, otherwise the same text could stand in training and test documents. Program listings are left out.

    Returns:
      Documents in an order that depends only on the installed versions.
    """
    return list(_installed_text(tuple(packages)))


@functools.cache
def _installed_text(packages: tuple[str, ...]) -> tuple[Document, ...]:
    seen: set[bytes] = set()
    documents = []
    for name, raw in _topics():
        documents.append(Document(name, clean_text(_prose(raw, seen))))
    for package in packages:
        characters = 0
        for name, raw in _package_text(package):
            text = clean_text(_prose(raw, seen))
            if len(text) < _MIN_DOCUMENT:
                continue
            documents.append(Document(name, text))
            characters += len(text)
            if characters > _PACKAGE_CHARACTERS:
                break
    return tuple(document for document in documents if len(document.text) >= _MIN_DOCUMENT)


def _topics() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # Some distributions strip Python's documentation.
        return
    # Longest first: a short topic that a long one contains then vanishes, and the long text stays whole.
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        yield f"python/{name}", topics[name]


def _package_text(package: str) -> Iterator[tuple[str, str]]:
    """Yields the package's description, then one text per module, without importing anything."""
    try:
        guide = importlib.metadata.metadata(package).json.get("description")
    except importlib.metadata.PackageNotFoundError:
        return
    if isinstance(guide, str) and guide:
        yield f"{package}/README", guide
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return
    root = Path(next(iter(spec.submodule_search_locations)))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if {"tests", "testing", "_vendor"} & set(relative.parts):
            continue
        docstrings = _docstrings(path)
        if docstrings:
            yield f"{package}/{relative.as_posix()}", "\n\n".join(docstrings)


# A long string right after a line that ends in a colon, at the start of a file, or as an argument (numpy's add_newdoc).
# A regular expression, because parsing the same files takes ten seconds.
_DOCSTRING = re.compile(r'(?:\A|:[ ]*\n|[(,]\s*\n)\s*[rR]?"""(.*?)"""', re.S)


def _docstrings(path: Path) -> list[str]:
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    return [inspect.cleandoc(text) for text in _DOCSTRING.findall(source) if len(text) >= _MIN_DOCSTRING]


_FUNCTION_WORDS = frozenset("the a an of to in is are and or that this it for with be as by if not can".split())
_HEADING = re.compile(r"^[^\n]*\n *[-=~*^]{3,} *(\n|\Z)", re.M)  # A line that is underlined.
_MARKUP = re.compile(
    r"^\s*(>>>|\.\. |[<`|+]|import |from [\w.]+ import |(Returns|Yields|Args|Raises|See [Aa]lso):\s*$)|::=|\]\(|\]\[",
    re.M,
)
_PARAMETER = re.compile(r"\s*[*`\w][\w*`~, .]{0,60} : ")
_DEFINITION = re.compile(r"^ *[*`\w][\w*`~, .()\[\]\"']{0,60}:( |$)", re.M)  # Two of these are a parameter list, too.


def _prose(raw: str, seen: set[bytes]) -> str:
    """Paragraphs of `raw` that are English and not in `seen`, which it extends. Headings are left out."""
    kept: list[str] = []
    introduces = False  # Whether the last paragraph was kept and only announces the next one.
    for paragraph in re.split(r"\n[ \t]*\n", _HEADING.sub("\n", inspect.cleandoc(raw).replace("\t", "    "))):
        words = re.findall(r"[A-Za-z]+", paragraph)
        # Listings, tables and grammars have few words, few letters among their characters, or few words of grammar.
        letters = sum(map(len, words)) / max(1, len(re.sub(r"\s", "", paragraph)))
        is_list = _PARAMETER.match(paragraph) or len(_DEFINITION.findall(paragraph)) > 1
        grammar = sum(word.lower() in _FUNCTION_WORDS for word in words)
        if len(words) < 8 or letters < 0.8 or 8 * grammar < len(words) or is_list or _MARKUP.search(paragraph):
            if introduces:
                kept.pop()  # "For example:" without its example.
            introduces = False
            continue
        key = hashlib.blake2b(" ".join(words).lower().encode(), digest_size=12).digest()
        introduces = key not in seen and paragraph.endswith(":") and len(paragraph) < 200
        if key not in seen:
            seen.add(key)
            kept.append(paragraph)
    return "\n\n".join(kept)


def directory_text(path: str | Path) -> list[Document]:
    """Reads the .txt files of a directory (novels, WikiText), sorted by name.

    The licence text around a Project Gutenberg book is cut off. A WikiText file becomes one document per article.

    Raises:
      LoadError: no such directory, no .txt file in it, a file that is not UTF-8, or no text in any.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise LoadError(f"There is no directory {str(directory)!r}; give one that holds .txt files.")
    files = sorted(directory.glob("*.txt"))
    if not files:
        raise LoadError(f"The directory {str(directory)!r} holds no .txt file; put the texts there, one file each.")
    documents = []
    for file in files:
        try:
            raw = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise LoadError(
                f"Cannot read {str(file)!r} as UTF-8 text ({error}); convert or remove the file."
            ) from error
        documents += [Document(name, text) for name, text in _articles(file.stem, raw) if text]
    if not documents:
        raise LoadError(f"The .txt files of {str(directory)!r} are empty; put texts there.")
    return documents


def _articles(stem: str, raw: str) -> Iterator[tuple[str, str]]:
    # WikiText marks an article by a line " = Title = " and spaces out its punctuation.
    parts = re.split(r"^ ?= ([^=\n]+) = *$", raw, flags=re.M)
    if len(parts) > 1:
        for number, (title, body) in enumerate(zip(parts[1::2], parts[2::2], strict=True)):
            # Each line of WikiText is a paragraph of its own.
            text = re.sub(r" @(.)@ ", r"\1", body).replace("\n", "\n\n")
            text = re.sub(r" ([,.;:!?)\]]|'s\b|n't\b)", r"\1", re.sub(r"([(\[]) ", r"\1", text))
            yield f"{stem}/{number}-{title.strip()}", clean_text(text)
        return
    start = re.search(r"\*\*\* ?START OF.*\n", raw)
    end = re.search(r"\*\*\* ?END OF", raw)
    yield stem, clean_text(raw[start.end() if start else 0 : end.start() if end else len(raw)])


_LIST_ITEM = re.compile(r" *([-*+] |\d+[.)] |[-=~^*]{3,}$)")  # Or the line under a heading.


def clean_text(raw: str) -> str:
    """Removes control characters and surplus blank lines, dedents, and puts each prose paragraph on one line."""
    text = re.sub(r"\r\n?", "\n", raw).expandtabs(4)
    text = "".join(c for c in text if c == "\n" or c.isprintable())
    paragraphs = []
    for paragraph in re.split(r"\n[ ]*\n\s*?(?=\S|[ ])", inspect.cleandoc(text)):
        # Dedented one by one: a nested description is a paragraph like any other.
        lines = inspect.cleandoc("\n" + paragraph).splitlines()
        # Lists, definitions and listings keep their lines; wrapped prose does not.
        hanging = (
            bool(lines) and len(lines[0]) > 50 and len({len(line) - len(line.lstrip()) for line in lines[1:]}) == 1
        )
        flush = not any(line.startswith(" ") for line in lines)
        if (flush or hanging) and not any(_LIST_ITEM.match(line) for line in lines):
            lines = [re.sub(r" {2,}", " ", " ".join(line.strip() for line in lines))]
        paragraphs.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph.strip())


# A full stop, question mark or exclamation mark ends a sentence if what follows looks like a beginning.
_SENTENCE_END = re.compile(r"([.!?][\"'”’)\]*`]*)(\s+)(?=[A-Z\"'“‘(\[`*:])|(\n\n)")
_ABBREVIATION = re.compile(r"(\b(e\.g|i\.e|cf|vs|etc|Mr|Mrs|Ms|Dr|St|Prof|Jr|No|Vol|Fig|Eq|Ref|al|pp|ca)|\b[A-Z])\.$")


def sentences(text: str) -> list[str]:
    """Splits text into sentences that keep the white space after them, so that joined they give the text again."""
    pieces = []
    start = 0
    for match in _SENTENCE_END.finditer(text):
        if match.group(3) is None and "\n\n" not in match.group(2):
            if _ABBREVIATION.search(text, max(0, match.start() - 8), match.start() + 1):
                continue
        pieces.append(text[start : match.end()])
        start = match.end()
    if start < len(text):
        pieces.append(text[start:])
    return pieces


def split_documents(
    documents: Sequence[Document], held_out: float = 0.3, seed: int = 0
) -> tuple[list[Document], list[Document]]:
    """Splits into training and test documents.

    A document's side follows from a hash of its name and the seed, so it does not change when others are added. A
    document longer than 60,000 characters (a novel) is too large for one side: its first part is training and its
    last `held_out` part test text, each in pieces of about 20,000 characters named `name#number`. If a side would be
    empty, the largest document is cut in this way too.

    Args:
      held_out: share of the test text, in (0, 1); kept exactly for long documents and on average for the others.

    Raises:
      ConfigError: `held_out` outside (0, 1), two documents of one name, or too little text to split.
    """
    if not 0.0 < held_out < 1.0:
        raise ConfigError(f"held_out is {held_out}; the share of held-out text must lie between 0 and 1.")
    names = [document.name for document in documents]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"Two documents are named {twice!r}; names must differ, since the split follows from them.")

    def cut(document: Document) -> None:
        head, tail = _head_and_tail(document, held_out)
        train.extend(head)
        test.extend(tail)

    train: list[Document] = []
    test: list[Document] = []
    for document in documents:
        if len(document.text) > _LONG_DOCUMENT:
            cut(document)
        else:
            digest = hashlib.blake2b(f"{seed}/{document.name}".encode(), digest_size=8).digest()
            (test if int.from_bytes(digest, "big") < held_out * 2**64 else train).append(document)
    if documents and not (train and test):
        largest = max(documents, key=lambda document: len(document.text))
        full = train or test
        full.remove(largest)
        cut(largest)
    if not train or not test:
        raise ConfigError(f"{len(documents)} document(s) cannot be split into training and test text; give more text.")
    return train, test


def _head_and_tail(document: Document, held_out: float) -> tuple[list[Document], list[Document]]:
    paragraphs = document.text.split("\n\n")
    if len(paragraphs) == 1:
        paragraphs = [sentence.strip() for sentence in sentences(document.text)]
    boundary = (1.0 - held_out) * len(document.text)
    sides: tuple[list[list[str]], list[list[str]]] = ([], [])
    position = size = 0
    for paragraph in paragraphs:
        side = sides[position + len(paragraph) / 2 > boundary]
        if not side or size > _PIECE_CHARACTERS:
            side.append([])
            size = 0
        side[-1].append(paragraph)
        size += len(paragraph) + 2
        position += len(paragraph) + 2
    numbers = itertools.count()
    head, tail = (
        [Document(f"{document.name}#{next(numbers)}", "\n\n".join(piece)) for piece in pieces] for pieces in sides
    )
    return head, tail
