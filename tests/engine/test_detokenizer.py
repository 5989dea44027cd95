from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deployments.engine.detokenizer import (
    MAX_HELD_BYTE_TOKENS,
    ByteDetokenizer,
    WindowDetokenizer,
)
from tests.engine import tokenizers_zoo as zoo

every_tokenizer = pytest.mark.parametrize("make", zoo.ZOO, ids=lambda make: make.__name__)

TEXT = "Hello, world! naïve café 東京は大きい 👩‍👩‍👧‍👦 e\u0301 नमस्ते العربية \ufffd\n\n  two  spaces\t1234 don't ."


def stream(tokenizer, ids):
    detokenizer = tokenizer.detokenizer()
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


@every_tokenizer
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_joined_pieces_equal_decoding_at_once(make, data):
    tokenizer = make()
    beyond = len(tokenizer.hf) + 3
    ids = data.draw(st.lists(st.integers(0, beyond), max_size=MAX_HELD_BYTE_TOKENS - 1))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@every_tokenizer
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
@example(text=TEXT)
@example(text=" leading and trailing ")
@example(text="\ufffd")
@example(text="a\ufffd\ufffd b")
def test_text_survives_token_by_token(make, text):
    tokenizer = make()
    ids = tokenizer.encode_prompt(text)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("make", [zoo.bytes_only, zoo.byte_level], ids=lambda make: make.__name__)
@given(text=st.text())
def test_byte_level_vocabularies_carry_every_text(make, text):
    tokenizer = make()
    assert "".join(stream(tokenizer, tokenizer.encode_prompt(text))) == text


@every_tokenizer
def test_no_piece_has_half_a_character(make):
    tokenizer = make()
    pieces = stream(tokenizer, tokenizer.encode_prompt(TEXT.replace("\ufffd", "")))
    assert not any("\ufffd" in piece for piece in pieces)


@every_tokenizer
def test_text_without_spaces_arrives_token_by_token(make):
    tokenizer = make()
    ids = tokenizer.encode_prompt("https://example.org/a/b/c/" * 6)
    pieces = [piece for piece in stream(tokenizer, ids)[:-1] if piece]
    assert len(pieces) >= len(ids) // 2


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=20))
@example([b"\xe0\x80\x80", b"\xf0\x9f", b"\x98", b"a"])
@example([b"\xed\xa0\x80"])
@example([b"\xf4\x90\x80\x80"[:3], b"\x80"])
@example([b"\xc3"])
def test_invalid_bytes_are_replaced_as_tokenizers_does(pieces):
    tokenizer = zoo.bytes_only()
    detokenizer = ByteDetokenizer(pieces)
    text = "".join(detokenizer.push(i) for i in range(len(pieces))) + detokenizer.flush()
    assert text == tokenizer.decode(list(b"".join(pieces)))


def test_an_unfinished_character_is_flushed_as_one_replacement():
    detokenizer = zoo.bytes_only().detokenizer()
    assert [detokenizer.push(byte) for byte in "é😀".encode()[:-1]] == ["", "é", "", "", ""]
    assert detokenizer.flush() == "\ufffd"


def byte_ids(tokenizer, data):
    vocabulary = tokenizer.hf.get_vocab()
    return [vocabulary[f"<0x{byte:02X}>"] for byte in data]


def test_a_run_of_byte_tokens_is_held_until_it_is_known_to_be_valid():
    tokenizer = zoo.byte_fallback()
    good = byte_ids(tokenizer, "é".encode())
    assert stream(tokenizer, [*good, *byte_ids(tokenizer, b"\xff")]) == ["", "", "", "\ufffd" * 3]
    letter = tokenizer.hf.get_vocab()["a"]
    assert stream(tokenizer, [*good, letter]) == ["", "", "éa", ""]


def test_a_long_run_of_byte_tokens_does_not_hold_the_stream_up():
    tokenizer = zoo.byte_fallback()
    vocabulary = tokenizer.hf.get_vocab()
    text = "😀" * MAX_HELD_BYTE_TOKENS
    ids = [vocabulary["▁the"] if "▁the" in vocabulary else vocabulary["a"]]
    ids += [*byte_ids(tokenizer, text.encode()), vocabulary["▁"], vocabulary["a"]]
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "".join(pieces[: MAX_HELD_BYTE_TOKENS + 2]).count("😀") >= MAX_HELD_BYTE_TOKENS // 4


def test_a_decoder_that_shows_unfinished_characters_is_held_while_it_does():
    pieces = [b"a", "é".encode()[:1], "é".encode()[1:], "\ufffd".encode(), b"b"]
    detokenizer = WindowDetokenizer(
        lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace"),
        shown_ids=range(5),
        holds_replacement=True,
    )
    assert [detokenizer.push(i) for i in range(5)] == ["a", "", "é", "", "\ufffdb"]
    assert detokenizer.flush() == ""


@pytest.mark.model
@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 49_151), max_size=60))
def test_the_default_model_streams_what_it_decodes(chat_tokenizer, ids):
    assert "".join(stream(chat_tokenizer, ids)) == chat_tokenizer.decode(ids)
