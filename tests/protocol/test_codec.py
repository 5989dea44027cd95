from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import CLIENT_FRAMES, SERVER_FRAMES, decode, decode_server, encode
from protocol.errors import (
    ContextLengthExceeded,
    InvalidFrame,
    InvalidRequest,
    ServingError,
    UnsupportedVersion,
)
from protocol.frames import (
    Ack,
    Anchor,
    Cancel,
    ClientFrame,
    Drain,
    ErrorFrame,
    FinalUsage,
    Frame,
    Hello,
    InferAck,
    InferChunk,
    InferDone,
    InferReq,
    InputChunk,
    InputState,
    Ping,
    Pong,
    Resume,
)
from protocol.parse import ChatMessage, ContentPart
from protocol.schemas import frame_schemas
from protocol.token_log import CacheOutcome, Timing, TokenDelta, TokenLogprob
from tests.protocol.fakes import framed, infer_req

CHUNK = InferChunk.of("r1", TokenDelta(258, "né🙂", (4, 5)), with_token_ids=True)
LOGPROBS = InferChunk.of(
    "r1",
    TokenDelta(0, "a", (4,), (TokenLogprob(4, "a", -0.25, ((4, "a", -0.25), (5, "b", -1.5))),)),
    with_token_ids=False,
)
DONE = InferDone(
    id="r1",
    seq=3,
    is_final=True,
    finish_reason="stop",
    usage=FinalUsage(prompt_tokens=5, completion_tokens=3, cached_tokens=4, total_tokens=8),
    timing=Timing(queue_ms=1.0, ttft_ms=2.5, total_ms=9.0),
    cache=CacheOutcome(outcome="semantic", tier="memory", similarity=0.97, age_s=3.0),
)
REFUSAL = ErrorFrame.of(
    "r1", ContextLengthExceeded("prompt has 9000 tokens, the model takes 8192", limit=8192).info
)
FAILED = msgspec.structs.replace(DONE, finish_reason="error", error=REFUSAL.info)
SERVER_EXAMPLES: list[Frame] = [
    Hello(session="s", model="m", limits={"a": 1}, heartbeat_s=15.0, resume_window_s=0.0),
    InferAck(id="r1", stream="x", cache=CacheOutcome()),
    InferAck(id="r1", stream="x", cache=CacheOutcome(), queue_position=2),
    CHUNK,
    LOGPROBS,
    DONE,
    FAILED,
    REFUSAL,
    ErrorFrame.of(None, InvalidFrame("no frame").info),
    Anchor(id="r1", input_id=-1, offset=0, ts=5),
    Anchor(id="r1", input_id=3, offset=2**32 - 1, ts=2**62, sha256="0" * 64),
    InputState(id="r1", buffered=7, capacity=8, level="high"),
    Drain(deadline_s=0.0),
    Ping(ts=5),
    Pong(),
]
CLIENT_EXAMPLES: list[ClientFrame] = [
    InferReq(id="r1", prompt="hi"),
    InferReq(
        id="é" * 64,
        messages=[
            ChatMessage(role="user", content=[ContentPart(type="text", text="hi")]),
            ChatMessage(role="assistant", content="ho"),
        ],
        temperature=0.5,
        stop=["a"],
        logit_bias={5: -1.0},
        logprobs=True,
        top_logprobs=2,
        cache="bypass",
        input="whole",
        boundary="utf8",
        anchor="sha256",
        window=65_536,
    ),
    InferReq(id="r1", prompt="", input="chunked", boundary="grapheme", anchor="none", window=1),
    InputChunk(id="r1", input_id=0, text=""),
    InputChunk(id="r1", input_id=2**32 - 1, text="né🙂", is_last=True),
    Ack(id="r1", seq=-1),
    Ack(id="r1", seq=2**32 - 1),
    Resume(id="r1", stream="t", last_seq=-1),
    Resume(id="r1", stream="t", last_seq=2**32 - 1, return_token_ids=True),
    Resume(id="r1", stream="t", last_seq=0, boundary="utf8", anchor="plain", window=64),
    Cancel(id="r1"),
    Ping(ts=1.5),
    Pong(ts=7),
]


def test_a_chunk_is_these_bytes() -> None:
    # The vector of docs/protocol.md.
    frame = InferChunk.of("r1", TokenDelta(258, "né"), with_token_ids=False)
    payload = b'{"type":"INFER_CHUNK","id":"r1","text":"n\xc3\xa9"}'
    assert encode(frame, binary=True) == bytes.fromhex("01 00 00 00 01 02") + payload
    assert encode(frame) == '{"type":"INFER_CHUNK","id":"r1","seq":258,"text":"né"}'


@pytest.mark.parametrize(
    ("frame", "header"),
    [
        (CHUNK, "01 00 00 00 01 02"),
        (DONE, "01 03 00 00 00 03"),
        (FAILED, "01 07 00 00 00 03"),
        (REFUSAL, "01 04 00 00 00 00"),
        (Ping(ts=5), "01 00 00 00 00 00"),
        (msgspec.structs.replace(DONE, seq=2**32 - 1), "01 03 ff ff ff ff"),
    ],
)
def test_the_header_tells_the_end_and_the_order_without_parsing(frame: Frame, header: str) -> None:
    assert encode(frame, binary=True)[:6] == bytes.fromhex(header)


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("frame", SERVER_EXAMPLES)
def test_a_server_frame_survives_the_wire(frame: Frame, binary: bool) -> None:
    assert decode_server(encode(frame, binary=binary)) == frame


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("frame", CLIENT_EXAMPLES)
def test_a_client_frame_survives_the_wire(frame: ClientFrame, binary: bool) -> None:
    assert decode(encode(frame, binary=binary)) == frame


def test_a_reused_buffer_does_not_reach_into_frames_already_made() -> None:
    buffer = bytearray()
    long = encode(CHUNK, binary=True, buffer=buffer)
    short = encode(Ping(ts=5), binary=True, buffer=buffer)
    assert decode_server(long) == CHUNK
    assert decode_server(short) == Ping(ts=5)


def test_a_chunk_gives_back_its_delta() -> None:
    logged = TokenDelta(0, "a", (4,), (TokenLogprob(4, "a", -0.25, ((4, "a", -0.25),)),))
    chunk = decode_server(encode(InferChunk.of("r1", logged, with_token_ids=True)))
    assert isinstance(chunk, InferChunk)
    assert chunk.delta == logged
    assert chunk.logprob == -0.25


def test_a_miss_is_said_and_not_left_out() -> None:
    ack = json.loads(encode(InferAck(id="a", stream="x", cache=CacheOutcome())))
    assert ack["cache"] == {"outcome": "miss"}
    assert json.loads(encode(REFUSAL))["retryable"] is False


@pytest.mark.parametrize("seq", [0, 1, 4294967295])
@pytest.mark.parametrize("flags", range(8))
def test_seq_and_known_flags_of_client_frames_are_ignored(seq: int, flags: int) -> None:
    data = framed('{"type":"CANCEL","id":"a"}', seq=seq, flags=flags)
    assert decode(data) == Cancel(id="a")


@pytest.mark.parametrize(
    ("data", "error", "id"),
    [
        (b"", InvalidFrame, None),
        (b"\x01", InvalidFrame, None),
        (b"\x01\x00\x00\x00\x00", InvalidFrame, None),
        (b"\x00\x00\x00\x00\x00", InvalidFrame, None),
        (b"\x01\x00\x00\x00\x00\x00", InvalidFrame, None),
        (framed(infer_req("a"), version=0), UnsupportedVersion, "a"),
        (framed(infer_req("a"), version=255), UnsupportedVersion, "a"),
        (framed(infer_req("a"), flags=0b0000_1000), InvalidFrame, "a"),
        (framed(infer_req("a"), flags=0b1000_0000), InvalidFrame, "a"),
        (framed(infer_req("a"), version=2, flags=0xFF), UnsupportedVersion, "a"),
        (framed(infer_req("a").encode("utf-16")), InvalidFrame, None),
        (framed(b'{"type":"INFER_REQ","id":"a","prompt":"caf\xe9"}'), InvalidRequest, "a"),
        (framed(b"\xff" + infer_req("a").encode()), InvalidFrame, "a"),
        (framed(infer_req("a")[:-1]), InvalidFrame, "a"),
        (framed(infer_req("a")[:-3]), InvalidFrame, "a"),
        (infer_req("a").encode(), UnsupportedVersion, None),
        (framed(infer_req("a")).decode("latin-1"), InvalidFrame, "a"),
        ("", InvalidFrame, None),
        ("[]", InvalidFrame, None),
        ("{}", InvalidFrame, None),
        ('{"type": null, "id": "a"}', InvalidFrame, "a"),
        ('{"type": 5, "id": "a"}', InvalidFrame, "a"),
        ('{"type": ["INFER_REQ"], "id": "a"}', InvalidFrame, "a"),
        ('{"type": "infer_req", "id": "a"}', InvalidFrame, "a"),
        ('{"type": "HELLO", "id": "a"}', InvalidFrame, "a"),
        ('{"type": "INFER_REQ", "id": "a", "tools": ' + "[" * 5000, InvalidRequest, "a"),
        ('{"tools": [{"id": "b"}], "type": "X"}', InvalidFrame, None),
        ('{"id": 5, "type": "X", "x": "y"}', InvalidFrame, None),
        ('{"id": {"id": "b"}, "type": "X"}', InvalidFrame, None),
        ('{"type": "X", "id": "\\ud800"}', InvalidRequest, None),
        (json.dumps({"type": "X", "id": "i" * 65}), InvalidFrame, None),
        ('{"type": "X", "id": "a\\u00e9"}', InvalidFrame, "aé"),
    ],
)
def test_a_bad_frame_is_refused_with_the_id_when_it_can_be_read(
    data: str | bytes, error: type[InvalidRequest], id: str | None
) -> None:
    with pytest.raises(error) as caught:
        decode(data)
    assert type(caught.value) is error
    assert caught.value.request_id == id
    msgspec.json.encode(caught.value.info)


@pytest.mark.parametrize("name", ["DRAIN", "INPUT_STATE", "ANCHOR", "HELLO", "x" * 999])
def test_a_frame_type_that_is_not_spoken_here_is_named(name: str) -> None:
    with pytest.raises(InvalidFrame) as caught:
        decode(json.dumps({"type": name, "id": "a"}))
    assert caught.value.param == "type"
    assert name[:50] in caught.value.message
    assert "INFER_REQ" in caught.value.message
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"input_id":-1,"text":"x"', "input_id"),
        ('"input_id":4294967296,"text":"x"', "input_id"),
        ('"input_id":null,"text":"x"', "input_id"),
        ('"text":"x"', "input_id"),
        ('"input_id":0', "text"),
        ('"input_id":0,"text":null', "text"),
        ('"input_id":0,"text":["x"]', "text"),
        ('"input_id":0,"text":"\\ud800"', "text"),
        ('"input_id":0,"text":"x","is_last":1', "is_last"),
    ],
)
def test_a_piece_that_cannot_be_is_refused_with_its_field(fields: str, param: str) -> None:
    raw = f'{{"type":"INPUT_CHUNK","id":"a",{fields}}}'
    for data in (raw, framed(raw)):
        with pytest.raises(InvalidRequest) as caught:
            decode(data)
        assert (caught.value.param, caught.value.request_id) == (param, "a")


@pytest.mark.parametrize("seq", ["-2", "4294967296", "null", "1.5", '"3"', "true"])
def test_an_ack_of_what_cannot_be_is_refused(seq: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(f'{{"type":"ACK","id":"a","seq":{seq}}}')
    assert caught.value.param == "seq"


@pytest.mark.parametrize("last_seq", ["-2", "4294967296", "null", "1.5", '"3"', "true"])
def test_a_last_seq_that_cannot_be_is_named(last_seq: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(f'{{"type":"RESUME","id":"a","stream":"t","last_seq":{last_seq}}}')
    assert (caught.value.param, caught.value.request_id) == ("last_seq", "a")


@pytest.mark.parametrize(
    ("field", "param", "words"),
    [
        ('"input": "some"', "input", '"whole", "chunked"'),
        ('"boundary": "word"', "boundary", '"grapheme", "utf8"'),
        ('"anchor": "md5"', "anchor", '"plain", "sha256", "none"'),
        ('"window": 0', "window", "at least 1"),
        ('"window": 65537', "window", "at most 65536"),
        ('"window": "64"', "window", "integer"),
        ('"temperature": NaN', "temperature", "finite"),
        ('"temperature": "0.5"', "temperature", "number"),
        ('"max_tokens": 1e12', "max_tokens", "integer"),
        ('"stop": 42', "stop", "string"),
        ('"logit_bias": {"x": 1}', "logit_bias", "integer"),
        ('"messages": [{"role": "robot", "content": "x"}]', "messages[0].role", "robot"),
        ('"prompt": "\\ud800"', "prompt", "Unicode"),
    ],
)
def test_a_bad_field_is_named_and_tells_its_request(field: str, param: str, words: str) -> None:
    raw = f'{{"type": "INFER_REQ", "id": "a", {field}}}'
    for data in (raw, framed(raw)):
        with pytest.raises(InvalidRequest) as caught:
            decode(data)
        assert caught.value.code == "invalid_request"
        assert (caught.value.param, caught.value.request_id) == (param, "a")
        assert words in caught.value.message


@pytest.mark.parametrize("id", ["", "i" * 65, "i" * 10_000, 5, None, True, ["a"], {"a": 1}])
@pytest.mark.parametrize("type", ["INFER_REQ", "CANCEL"])
def test_an_id_is_a_string_of_1_to_64_characters(type: str, id: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(json.dumps({"type": type, "id": id}))
    assert caught.value.code == "invalid_request"
    assert caught.value.param == "id"
    assert caught.value.request_id is None


def test_null_fields_of_a_frame_mean_the_default() -> None:
    nulls = {field.name: None for field in msgspec.structs.fields(InferReq) if not field.required}
    assert decode(infer_req("a", **(nulls | {"prompt": "hi"}))) == InferReq(id="a", prompt="hi")


def test_unknown_fields_are_ignored_in_both_directions() -> None:
    assert decode('{"type": "CANCEL", "id": "a", "window": 256}') == Cancel(id="a")
    assert decode_server('{"type": "PONG", "ts": 1, "load": 0.5}') == Pong(ts=1)


@pytest.mark.parametrize(
    "data",
    [
        "{",
        b"\x01",
        '{"type": "ANCHOR", "id": "a"}',
        '{"type": "INFER_CHUNK", "id": "a", "text": "x"}',
        '{"type": "INFER_CHUNK", "id": "a", "seq": -1, "text": "x"}',
        framed('{"type": "PONG"}', version=2),
    ],
)
def test_a_client_is_told_of_server_frames_it_cannot_read(data: str | bytes) -> None:
    with pytest.raises(InvalidFrame):
        decode_server(data)


MOSTLY_FRAMES = st.one_of(
    st.text(max_size=80),
    st.binary(max_size=80),
    st.builds(
        lambda fields, binary: framed(json.dumps(fields)) if binary else json.dumps(fields),
        st.dictionaries(
            st.sampled_from(["type", "id", "ts", *InferReq.__struct_fields__]),
            st.sampled_from([*CLIENT_FRAMES, *SERVER_FRAMES])
            | st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(st.text(max_size=3), inner, max_size=3)
                ),
                max_leaves=5,
            ),
            max_size=6,
        ),
        st.booleans(),
    ),
)


@given(MOSTLY_FRAMES)
def test_decoding_raises_nothing_but_serving_errors(data: str | bytes) -> None:
    for read in (decode, decode_server):
        try:
            read(data)
        except ServingError as error:
            encode(ErrorFrame.of(error.request_id, error.info))


@given(st.sampled_from(CLIENT_EXAMPLES), st.integers(0, 200), st.binary(max_size=4), st.booleans())
def test_a_damaged_frame_is_a_frame_or_an_error(
    frame: ClientFrame, at: int, damage: bytes, cut: bool
) -> None:
    data = encode(frame, binary=True)
    assert isinstance(data, bytes)
    try:
        decode(data[:at] + damage + (b"" if cut else data[at + len(damage) :]))
    except ServingError as error:
        encode(ErrorFrame.of(error.request_id, error.info))


def test_frames_fit_their_published_schemas() -> None:
    schema = frame_schemas()
    validator = jsonschema.Draft202012Validator(schema)
    for frame in (*SERVER_EXAMPLES, *CLIENT_EXAMPLES):
        validator.validate(json.loads(encode(frame)))
    assert not validator.is_valid({"type": "INFER_CHUNK", "id": "a", "text": "x"})
    assert not validator.is_valid({"type": "CANCEL", "id": ""})


def test_the_published_schemas_are_those_of_the_types() -> None:
    published = Path(__file__).parents[2] / "docs" / "schemas" / "seedance.v1.json"
    assert json.loads(published.read_text("utf-8")) == json.loads(json.dumps(frame_schemas()))
