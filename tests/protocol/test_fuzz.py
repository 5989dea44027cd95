"""What a client may try: mutated frames, cases that a fuzzer found, and messages made to hurt."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import CLIENT_FRAMES, encode
from protocol.events import Close, StartRequest
from protocol.frames import InputChunk
from protocol.parse import inference_request
from protocol.session import SessionLimits
from protocol.strict_json import MAX_CONTAINERS
from tests.protocol import exchange
from tests.protocol.exchange import SEPARATOR, case_of, messages_of, play
from tests.protocol.fakes import framed, infer_req, only_error, open_session, sent

CORPUS = sorted((Path(__file__).parent / "corpus").iterdir())
PATIENCE_S = 10 * exchange.MAX_SECONDS

IDS = st.sampled_from(["a", "b", "c", "d", "e", "é", "i" * 64, ""])
VALUES = st.one_of(
    st.none() | st.booleans() | st.integers(-3, 300) | st.integers() | st.floats() | st.text(),
    st.sampled_from(["whole", "chunked", "utf8", "grapheme", "none", "sha256", "auto", "x" * 300]),
    st.sampled_from([[], {}, [{"role": "user", "content": "x"}], ["x"], "\ud800", 2**70, "\x1e"]),
)
FIELDS = sorted({name for frame in CLIENT_FRAMES.values() for name in frame.__struct_fields__})
LIKELY = {"prompt": "x", "seq": 1, "input_id": 0, "text": "y", "stream": "s", "last_seq": -1}


@st.composite
def frames(draw: st.DrawFn) -> str | bytes:
    """A frame of the right fields, of which some have any value, in either form, perhaps damaged."""
    name = draw(st.sampled_from([*CLIENT_FRAMES, "HELLO", ""]))
    fields: dict[str, Any] = {"type": name, "id": draw(IDS)}
    if name in CLIENT_FRAMES:
        known = CLIENT_FRAMES[name].__struct_fields__
        fields |= {key: value for key, value in LIKELY.items() if key in known}
    fields |= draw(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
    text = json.dumps(fields, ensure_ascii=draw(st.booleans()) or "\\ud800" in json.dumps(fields))
    data = text if draw(st.booleans()) else framed(text)
    if draw(st.integers(0, 4)) == 0:
        at, damage = draw(st.integers(0, len(data))), draw(st.binary(max_size=4))
        if isinstance(data, str):
            return data[:at] + damage.decode("latin-1") + data[at + len(damage) :]
        return data[:at] + damage + data[at + len(damage) :]
    return data


@settings(max_examples=200, deadline=None)
@given(st.lists(frames() | st.text(max_size=20) | st.binary(max_size=20), max_size=12))
def test_no_sequence_of_frames_breaks_a_session(messages: list[str | bytes]) -> None:
    play(case_of(messages))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_break_a_session(case: bytes) -> None:
    play(case)


@pytest.mark.parametrize("path", CORPUS, ids=[path.name for path in CORPUS])
def test_what_a_fuzzer_found_is_taken_quietly_and_soon(path: Path) -> None:
    started = time.thread_time()
    play(path.read_bytes())
    assert time.thread_time() - started < PATIENCE_S


def test_a_case_is_its_messages() -> None:
    messages: list[str | bytes] = ["", "é", b"", b"\x01\x00T", '{"type": "PING"}']
    assert messages_of(case_of(messages)) == messages
    assert messages_of(b"") == [b""]
    assert messages_of(b"T\xff" + SEPARATOR + b"x") == ["\ufffd", b""]


MIB = 1024 * 1024
MARKS = "e" + "\u0301" * 40_000
"""One character for a reader, and 80 KB for us."""


def hurt(field: str, value: str) -> str:
    return f'{{"type": "INFER_REQ", "id": "a", "prompt": "x", "{field}": {value}}}'


HOSTILE: dict[str, tuple[str, str, str | None]] = {
    "a bomb of lists": (hurt("tools", "[" * 500_000), "invalid_request", "tools"),
    "a bomb of objects": (hurt("x", '{"x":' * 150_000), "invalid_request", "x"),
    "a closed bomb": (hurt("x", "[" * 400_000 + "]" * 400_000), "invalid_request", "x"),
    "a bomb before the type": (
        '{"x":' + "[" * 400_000 + "]" * 400_000 + ',"type":"PING"}',
        "invalid_request",
        "x",
    ),
    "lists side by side": (
        hurt("tools", "[" + "[]," * 300_000 + "[]]"),
        "invalid_request",
        None,
    ),
    "NaN": (hurt("temperature", "NaN"), "invalid_request", "temperature"),
    "a NaN that nobody reads": (hurt("x", "[1, NaN]"), "invalid_request", "x[1]"),
    "an infinity": (hurt("top_p", "-Infinity"), "invalid_request", "top_p"),
    "a float without an end": (hurt("top_p", "1e999999999"), "invalid_request", "top_p"),
    "an integer of a million digits": (hurt("seed", "9" * 1_000_000), "invalid_request", "seed"),
    "a lone surrogate": (hurt("stop", '"\\ud800"'), "invalid_request", "stop"),
    "many lone surrogates": (
        hurt("stop", json.dumps("\udfff" * 150_000)),
        "invalid_request",
        "stop",
    ),
    "surrogates the wrong way round": (hurt("x", '"\\ude00\\ud83d"'), "invalid_request", "x"),
    "a surrogate in a name": (hurt("\\ud800", "1"), "invalid_request", None),
    "a long id": (infer_req(MARKS), "invalid_request", "id"),
    "stacked marks as a type": (json.dumps({"type": MARKS}), "invalid_frame", "type"),
    "stacked marks as a value": (hurt("cache", json.dumps(MARKS)), "invalid_request", "cache"),
    "names without an end": (
        '{"type": "PING"' + "".join(f',"{n}":0' for n in range(100_000)),
        "invalid_frame",
        None,
    ),
    "a string that is not closed": (
        '{"type": "PING", "x": "' + "\\\\" * 400_000,
        "invalid_frame",
        None,
    ),
    "zeros": ("\0" * 1_000_000, "invalid_frame", None),
}


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_message_is_refused_with_its_code_soon_and_cheaply(
    name: str, binary: bool
) -> None:
    message, code, param = HOSTILE[name]
    data = framed(message) if binary else message
    session = open_session()
    started = time.thread_time()
    error = only_error(session.receive(data))
    assert time.thread_time() - started < PATIENCE_S
    assert (error["code"], error.get("param")) == (code, param)
    assert len(error["message"]) < 300
    assert session.live_ids == ()
    tracemalloc.start()
    try:
        session.receive(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 32 * MIB
    assert sent(session.receive('{"type": "PING", "ts": 1}')) == [{"type": "PONG", "ts": 1}]


def test_a_message_may_have_so_many_lists_and_objects_and_no_more() -> None:
    # The frame itself is one of them; brackets in text are none.
    for num_lists, is_taken in ((MAX_CONTAINERS - 2, True), (MAX_CONTAINERS - 1, False)):
        fields = json.dumps({"x": [[]] * num_lists, "y": "[{" * 50_000})
        message = f'{{"type": "PING", "ts": 1, {fields[1:]}'
        (answer,) = sent(open_session().receive(message))
        assert (answer["type"] == "PONG") is is_taken
        assert answer.get("limit") == (None if is_taken else MAX_CONTAINERS)


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
@pytest.mark.parametrize("content", ["x", "é", '{"type":"PING"}', "["])
def test_sixteen_mebibytes_are_refused_unread(content: str, binary: bool) -> None:
    session = open_session()
    message = content * (16 * MIB // len(content.encode()))
    data = framed(message) if binary else message
    started = time.thread_time()
    *refused, closed = session.receive(data)
    assert time.thread_time() - started < PATIENCE_S
    error = only_error(refused)
    assert error["code"] == "input_too_large"
    assert error["limit"] == SessionLimits().max_message_bytes
    assert isinstance(closed, Close)
    assert closed.code == 1009
    assert session.receive(data) == []


def test_stacked_marks_are_a_prompt_like_any_other() -> None:
    session = open_session()
    started = time.thread_time()
    (whole,) = session.receive(infer_req("a", prompt=MARKS))
    assert isinstance(whole, StartRequest)
    request = inference_request(whole.req, request_id="r", tenant="t", model="m")
    assert request.prompt == MARKS
    session.receive(infer_req("b", prompt="", input="chunked"))
    for input_id, at in enumerate(range(0, len(MARKS), 1000)):
        piece = encode(
            InputChunk(id="b", input_id=input_id, text=MARKS[at : at + 1000]), binary=False
        )
        session.receive(piece)
    so_far, _ = session.input_so_far("b")
    assert so_far.prompt == MARKS
    assert time.thread_time() - started < PATIENCE_S
