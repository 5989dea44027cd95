"""Frames to bytes and back, in two forms: JSON text, and a 6-byte header before the JSON.

    offset 0  version u8   = 1
    offset 1  flags   u8   bit 0 is_final · bit 1 has_usage · bit 2 is_error · bits 3-7 zero
    offset 2  seq     u32  big-endian: as in the JSON form; 0 for frames that have none
    offset 6  payload      UTF-8 JSON object: the frame without `seq`

The kind of the WebSocket message (text or binary) decides which form it is. The
header lets a relay order frames, drop doubled ones and find the end of an answer
without parsing. `seq` and the three flags of client frames are ignored.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from protocol.errors import InvalidFrame, InvalidRequest, ServingError, UnsupportedVersion
from protocol.frames import (
    BINARY_VERSION,
    IN_HEADER,
    MAX_ID_CHARS,
    Ack,
    Anchor,
    Cancel,
    ClientFrame,
    Drain,
    ErrorFrame,
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
    ServerFrame,
    type_of,
)
from protocol.parse import convert_fields
from protocol.strict_json import MalformedJson, check_text, decode_body, scan_string, show

FrameT = TypeVar("FrameT", bound=Frame)

HEADER = struct.Struct(">BBI")
IS_FINAL, HAS_USAGE, IS_ERROR = 1, 2, 4
RESERVED_FLAGS = 0b1111_1000

CLIENT_FRAMES: dict[str, type[ClientFrame]] = {
    type_of(cls): cls for cls in (InferReq, InputChunk, Resume, Ack, Cancel, Ping, Pong)
}
SERVER_FRAMES: dict[str, type[ServerFrame]] = {
    type_of(cls): cls
    for cls in (
        Hello,
        InferAck,
        InferChunk,
        Anchor,
        InferDone,
        ErrorFrame,
        InputState,
        Drain,
        Ping,
        Pong,
    )
}

_ENCODER = msgspec.json.Encoder()
_CLIENT_DECODER = msgspec.json.Decoder(ClientFrame)
_SERVER_DECODER = msgspec.json.Decoder(ServerFrame)


def encode(frame: Frame, *, binary: bool = False, buffer: bytearray | None = None) -> str | bytes:
    """The frame as a WebSocket message: text, or bytes with the header.

    Args:
        buffer: memory to build the binary form in, for callers that encode often.
    """
    if not binary:
        return _ENCODER.encode(frame).decode()
    seq = 0
    if isinstance(frame, InferChunk | InferDone):
        seq = frame.seq
        frame = msgspec.structs.replace(frame, seq=IN_HEADER)
    if buffer is None:
        buffer = bytearray()
    _ENCODER.encode_into(frame, buffer, HEADER.size)
    HEADER.pack_into(buffer, 0, BINARY_VERSION, _flags(frame), seq)
    return bytes(buffer)


def decode(data: str | bytes) -> ClientFrame:
    """Reads a client's WebSocket message.

    Raises:
        InvalidFrame: no frame could be read.
        UnsupportedVersion: the binary header has another version.
        InvalidRequest: a field of the frame is at fault; `param` names it.

        All have `request_id` set when the frame tells its id.
    """
    payload = data if isinstance(data, str) else data[HEADER.size :]
    try:
        if not isinstance(data, str):
            _read_header(data)
        try:
            check_text(payload)
            return _CLIENT_DECODER.decode(payload)
        except (ValueError, RecursionError):
            return _decode_slowly(payload, CLIENT_FRAMES)
    except InvalidRequest as error:
        error.request_id = _read_id(payload)
        raise


def decode_server(data: str | bytes) -> ServerFrame:
    """Reads a server's WebSocket message; `seq` is set in both forms.

    Raises:
        InvalidFrame: no frame could be read; `param` is `type` when only its type is unknown.
    """
    try:
        payload = data if isinstance(data, str) else data[HEADER.size :]
        seq = None if isinstance(data, str) else _read_header(data)
        try:
            frame = _SERVER_DECODER.decode(payload)
        except (ValueError, RecursionError):
            frame = _decode_slowly(payload, SERVER_FRAMES)
    except ServingError as error:
        raise InvalidFrame(error.message, param=error.param) from None
    if isinstance(frame, InferChunk | InferDone):
        if seq is not None:
            return msgspec.structs.replace(frame, seq=seq)
        if frame.seq == IN_HEADER:
            raise InvalidFrame("seq is required", param="seq")
    return frame


def _decode_slowly(payload: bytes | str, types: dict[str, type[FrameT]]) -> FrameT:
    """Finds out what is wrong with a payload; returns the frame if only nulls stood in the way."""
    try:
        fields = decode_body(payload)
    except MalformedJson as error:
        raise InvalidFrame(f"the frame is {error.message}") from None
    name = fields.get("type")
    frame_type = types.get(name) if isinstance(name, str) else None
    if frame_type is None:
        what = f"{show(name)} is not a frame type here" if name is not None else "is required"
        raise InvalidFrame(
            f"type: {what}; known are {', '.join(types)}",
            param="type",
        )
    return convert_fields(fields, frame_type)


def _read_header(data: bytes) -> int:
    """Checks the binary header and returns its `seq`."""
    if len(data) < HEADER.size:
        raise InvalidFrame(
            f"a binary frame has a header of {HEADER.size} bytes, got {len(data)} in all",
            limit=HEADER.size,
        )
    version, flags, seq = HEADER.unpack_from(data)
    if version != BINARY_VERSION:
        raise UnsupportedVersion(
            f"version {version} of the binary form is not supported, only {BINARY_VERSION}",
            limit=BINARY_VERSION,
        )
    if flags & RESERVED_FLAGS:
        raise InvalidFrame(f"flags {flags:#010b} set bits that are reserved: bits 3 to 7 must be 0")
    assert isinstance(seq, int)
    return seq


def _read_id(payload: bytes | str) -> str | None:
    name = scan_string(payload, "id")
    return name if name and len(name) <= MAX_ID_CHARS else None


def _flags(frame: Frame) -> int:
    if isinstance(frame, InferDone):
        return IS_FINAL | HAS_USAGE | (IS_ERROR if frame.error is not None else 0)
    return IS_ERROR if isinstance(frame, ErrorFrame) else 0
