"""Tokenizers: round trips, chat templates, stop tokens, streaming."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from dcache.errors import ConfigError, LoadError
from dcache.tokenizer import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    ByteTokenizer,
    StreamDecoder,
    byte_level_bpe,
    load_tokenizer,
    sentencepiece_bpe,
    stream,
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "1 2", "Ġ hello"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "hello", "12", "Ġhello"]
KINDS = [CONTROL] * 3 + [NORMAL] * (len(TOKENS) - 3)
TEXT = "hello  hello, Grüße 🙂 你好 123\n\n\tx <|im_end|>"
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(directory, split="smollm", prepend=None, **config):
    byte_level_bpe(TOKENS, KINDS, MERGES, split, prepend).save(str(directory / "tokenizer.json"))
    contents = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(contents))
    return directory


def ids(*tokens):
    return np.array([TOKENS.index(token) for token in tokens], np.int32)


def check(found, wanted):
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("split", ["smollm", "gpt-2", "llama-bpe"])
def test_round_trip(tmp_path, split):
    tokenizer = load_tokenizer(write(tmp_path, split))
    found = tokenizer.encode(TEXT)
    assert found.dtype == np.int32 and found.ndim == 1
    assert tokenizer.decode(found) == TEXT.removesuffix("<|im_end|>")
    check(tokenizer.encode(""), np.zeros(0, np.int32))
    assert tokenizer.decode([]) == ""
    assert tokenizer.vocab_size == len(TOKENS)


def test_splits(tmp_path):
    # Only SmolLM2 takes digits one by one; the others reach the merge "1 2".
    check(load_tokenizer(write(tmp_path, "smollm")).encode("hello hello12"), ids("hello", "Ġhello", "1", "2"))
    for split in ("gpt-2", "llama3"):
        check(load_tokenizer(write(tmp_path, split)).encode("hello hello12"), ids("hello", "Ġhello", "12"))


def test_llama3_keeps_whole_words(tmp_path):
    tokens = [*TOKENS, "xyz"]
    for split, count in (("llama-bpe", 1), ("gpt-2", 3)):
        write(tmp_path)
        tokenizer = byte_level_bpe(tokens, [*KINDS, NORMAL], MERGES, split, None)
        assert len(tokenizer.encode("xyz").ids) == count


def test_no_special_tokens_are_added(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, prepend="<|im_start|>", bos_token="<|im_start|>"))
    check(tokenizer.encode("hello"), ids("hello"))
    assert tokenizer.bos_id == 1


def test_chat(tmp_path):
    # The tokenizer would add a BOS itself: the template's must stay the only one.
    directory = write(tmp_path, prepend="<|im_start|>", bos_token="<|im_start|>", chat_template=TEMPLATE)
    tokenizer = load_tokenizer(directory)
    newline = "Ċ"
    wanted = ids("<|im_start|>", *"user", newline, "hello", "<|im_end|>", newline)
    wanted = np.concatenate([wanted, ids("<|im_start|>", *"assistant", newline)])
    check(tokenizer.chat("hello"), wanted)
    check(tokenizer.chat([{"role": "user", "content": "hello"}]), wanted)
    two = tokenizer.chat([{"role": "system", "content": "hello"}, {"role": "user", "content": "hello"}])
    assert tokenizer.decode(two) == "system\nhello\nuser\nhello\nassistant\n"
    with pytest.raises(ConfigError, match="template refuses these messages: no tools"):
        tokenizer.chat([{"role": "tool", "content": "x"}])


def test_chat_without_template(tmp_path):
    check(load_tokenizer(write(tmp_path)).chat("hello"), ids("hello"))
    with_bos = load_tokenizer(write(tmp_path, bos_token="<|im_start|>"))
    check(with_bos.chat("hello"), ids("<|im_start|>", "hello"))
    messages = [{"role": "user", "content": "hello"}, {"role": "user", "content": "he"}]
    check(with_bos.chat(messages), ids("<|im_start|>", "hello", "Ċ", "Ċ", "he"))


def test_stop_tokens(tmp_path):
    assert load_tokenizer(write(tmp_path)).eos_ids == (0, 2)  # <|im_end|> always counts
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load_tokenizer(tmp_path).eos_ids == (0, 2, 7)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 9}))
    assert load_tokenizer(tmp_path).eos_ids == (0, 2, 7, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert load_tokenizer(tmp_path).eos_ids == (0, 2, 9)


def test_byte_tokenizer():
    tokenizer = ByteTokenizer()
    text = "hello, world 0123456789!\n(a-z)"
    check(tokenizer.encode(text), tokenizer.encode(text.upper()))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("a~ü")) == "a??"
    every = tokenizer.encode(tokenizer.decode(range(64)))
    check(every, np.arange(2, 64))
    check(tokenizer.chat("ab"), [0, 2, 3])
    check(tokenizer.chat([{"role": "user", "content": "ab"}]), [0, 2, 3])
    assert tokenizer.decode([0, 2, 1]) == "a"
    assert tokenizer.vocab_size == 64 and tokenizer.bos_id == 0 and tokenizer.eos_ids == (1,)


def test_stream_yields_complete_characters(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path))
    found = tokenizer.encode(TEXT)
    pieces = list(stream(tokenizer, found))
    assert "".join(pieces) == tokenizer.decode(found)
    assert "🙂" in pieces and all(pieces) and not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 20  # as they come, not all at the end


def test_stream_decoder(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path))
    first, second = tokenizer.encode("ü")
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(first), decoder.push(second), decoder.flush()] == ["", "ü", ""]
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(2), decoder.push(first), decoder.flush(), decoder.flush()] == ["", "", "\ufffd", ""]
    assert decoder.push(TOKENS.index("hello")) == "hello"
    broken = np.array([first, *ids("he"), first, second, first], np.int32)
    assert "".join(stream(tokenizer, broken)) == tokenizer.decode(broken) == "\ufffdheü\ufffd"


def sentencepiece(spaced=True, prepend=None):
    pieces = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256))]
    kinds = [UNKNOWN, CONTROL] + [6] * 256
    words = [("▁", -9.0), ("a", -8.0), ("b", -7.0), ("ab", -3.0), ("ba", -1.0), ("▁ab", -2.0), ("aba", -4.0)]
    tokens = pieces + [word for word, _ in words]
    scores = [0.0] * len(pieces) + [score for _, score in words]
    return tokens, sentencepiece_bpe(tokens, kinds + [NORMAL] * len(words), scores, spaced, prepend)


def test_sentencepiece():
    tokens, tokenizer = sentencepiece(prepend="<s>")

    def pieces(text, **settings):
        return [tokens[i] for i in tokenizer.encode(text, **settings).ids]

    assert pieces("ab") == ["<s>", "▁ab"]
    plain = {"add_special_tokens": False}
    assert pieces("aba", **plain) == ["▁", "aba"]  # "ba" scores best; "ab" first would give "▁ab", "a"
    assert pieces("ab ab", **plain) == ["▁ab", "▁ab"]
    assert pieces("ü", **plain) == ["▁", "<0xC3>", "<0xBC>"]
    for text in ("ab ab", " aba  b", "ü ab"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_stream_keeps_sentencepiece_spaces(tmp_path):
    _, tokenizer = sentencepiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    loaded = load_tokenizer(tmp_path)
    assert list(stream(loaded, loaded.encode("ab ab ab"))) == ["ab", " ab", " ab"]
    assert loaded.bos_id is None and loaded.eos_ids == ()


def test_sentencepiece_without_space_in_front():
    tokens, tokenizer = sentencepiece(spaced=False)
    assert [tokens[i] for i in tokenizer.encode("ab ab").ids] == ["ab", "▁ab"]
    assert tokenizer.decode(tokenizer.encode(" ab").ids) == " ab"


def test_missing(tmp_path):
    with pytest.raises(LoadError, match="has no tokenizer.json; copy the model's tokenizer files"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "{}", '{"model": {"type": "BPE"}}'])
def test_damaged(tmp_path, text):
    write(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(LoadError, match="The tokenizer of .* cannot be read .*; fetch its files again"):
        load_tokenizer(tmp_path)


def test_damaged_generation_config(tmp_path):
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(LoadError, match="generation_config.json is not valid"):
        load_tokenizer(tmp_path)


def test_remote_code_is_not_run(tmp_path):
    write(tmp_path, tokenizer_class="Custom", auto_map={"AutoTokenizer": ["custom.Custom", None]})
    (tmp_path / "custom.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Custom: pass\n")
    try:
        load_tokenizer(tmp_path)
    except LoadError:
        pass  # refusing is as good as reading tokenizer.json alone
    assert not (tmp_path / "ran").exists()


def test_loading_prints_nothing(tmp_path):
    write(tmp_path)
    code = f"from dcache.tokenizer import load_tokenizer as f; print(f({str(tmp_path)!r}).encode('hello').tolist())"
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == f"{ids('hello').tolist()}\n"
    assert done.stderr == ""
