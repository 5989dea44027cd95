"""docs/protocol.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from protocol.codec import CLIENT_FRAMES, SERVER_FRAMES, encode
from protocol.errors import ERROR_BY_CODE
from protocol.events import CLOSE_CODES
from protocol.frames import InferChunk, InferReq, Resume
from protocol.token_log import TokenDelta

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text("utf-8")


def test_the_binary_vector_is_what_the_codec_makes() -> None:
    frame = InferChunk.of("r1", TokenDelta(258, "né"), with_token_ids=False)
    hexes = re.search(r"^01 00 00 00 01 02[0-9a-f \n]+", PAGE, re.MULTILINE)
    assert hexes is not None
    assert encode(frame, binary=True) == bytes.fromhex(hexes[0])
    assert f"`{encode(frame)!s}`" in PAGE


def test_every_frame_and_every_field_of_a_request_is_described() -> None:
    for name in (
        *CLIENT_FRAMES,
        *SERVER_FRAMES,
        *InferReq.__struct_fields__,
        *Resume.__struct_fields__,
    ):
        assert f"`{name}`" in PAGE


@pytest.mark.parametrize("code", sorted(ERROR_BY_CODE))
def test_every_error_code_is_described_with_its_status(code: str) -> None:
    assert re.search(rf"^\| `{code}` \| {ERROR_BY_CODE[code].http_status} \|", PAGE, re.MULTILINE)


def test_the_close_codes_are_those_of_the_table() -> None:
    for code, (meaning, should_reconnect) in CLOSE_CODES.items():
        assert f"| {code} | {meaning} | {'yes' if should_reconnect else 'no'} |" in PAGE
