"""The cheap clients, against what servers may send and however it is cut."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.wire_clients import (
    CLOSE,
    PING,
    TEXT,
    ConnectionFailed,
    encode_frame,
    split_chunks,
    split_frames,
)

payloads = st.lists(
    st.one_of(st.binary(max_size=300), st.just(b"x" * 70_000)), min_size=1, max_size=5
)


def server_frame(payload: bytes, opcode: int = TEXT) -> bytes:
    length = len(payload)
    if length < 126:
        return struct.pack(">BB", 0x80 | opcode, length) + payload
    if length < 65536:
        return struct.pack(">BBH", 0x80 | opcode, 126, length) + payload
    return struct.pack(">BBQ", 0x80 | opcode, 127, length) + payload


@given(payloads, st.integers(0, 200_000))
def test_frames_are_whole_however_they_were_cut(sent: list[bytes], cut: int) -> None:
    wire = b"".join(map(server_frame, sent))
    first, rest = split_frames(wire[:cut])
    second, left = split_frames(rest + wire[cut:])
    assert [payload for _, payload in first + second] == sent
    assert left == b""


def test_control_frames_keep_their_kind() -> None:
    frames, _ = split_frames(server_frame(b"p", PING) + server_frame(b"\x03\xe9", CLOSE))
    assert frames == [(PING, b"p"), (CLOSE, b"\x03\xe9")]


def test_a_fragment_is_refused() -> None:
    with pytest.raises(ConnectionFailed, match="fragment"):
        split_frames(bytes([TEXT, 1]) + b"x")


@pytest.mark.parametrize("length", [0, 125, 126, 65_535, 65_536])
def test_a_clients_frame_is_masked_with_zeros(length: int) -> None:
    payload = b"y" * length
    wire = encode_frame(payload)
    assert wire[0] == 0x80 | TEXT
    assert wire[1] & 0x80
    assert wire.endswith(bytes(4) + payload)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.integers(0, 400))
def test_chunks_are_whole_however_they_were_cut(sent: list[bytes], cut: int) -> None:
    wire = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in sent) + b"0\r\n\r\n"
    first, rest = split_chunks(wire[:cut])
    second, left = split_chunks(rest + wire[cut:])
    assert first + second == [*sent, b""]
    assert left == b""
