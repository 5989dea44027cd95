"""A prompt that comes in pieces: what came, what the model has of it, and how full that is."""

from __future__ import annotations

from collections import deque

import msgspec

from protocol.errors import InputTooLarge, InvalidRequest
from protocol.frames import InferReq, InputLevel
from protocol.parse import ChatMessage

HIGH_SHARE = 0.8
"""From this share of its capacity on a buffer is high."""
OK_SHARE = 0.5
"""Under this share it is not high any more."""


class InputExceeded(InputTooLarge):
    """The pieces together are too long: there can be no such request."""


class InputBuffer:
    """The pieces of one prompt, in order.

    They go on with the text of `req`: that of its last message, which must be the user's, or
    its `prompt`; without either they are the one user message.

    Args:
        capacity: bytes that may wait for the model.
        max_bytes: bytes of all pieces together.

    Attributes:
        next_id: number of the next piece.
        taken_id: number of the last piece that the model has taken, -1 for none.
        num_bytes: bytes of all pieces that came.
        buffered: bytes that came and were not taken.
        level: `high` tells the client to pause.

    Raises:
        InvalidRequest: `req` has nothing that text could go on with; `param` names the field.
    """

    def __init__(self, req: InferReq, *, capacity: int, max_bytes: int) -> None:
        self._req = msgspec.structs.replace(req, input=None)
        self._before = _opening(req)
        self._pieces: list[str] = []
        self._waiting: deque[int] = deque()
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self.capacity = capacity
        self.next_id = 0
        self.taken_id = -1
        self.buffered = 0
        self.level: InputLevel = "ok"

    @property
    def has_prefix(self) -> bool:
        """Whether the request had something to begin with before any piece."""
        return bool(self._req.messages) or bool(self._before)

    def add(self, input_id: int, text: str) -> bool:
        """Takes in a piece; False when it came before.

        Raises:
            InvalidRequest: a piece before it is missing.
            InputTooLarge: it does not fit in now.
            InputExceeded: all of them together are too long.
        """
        if input_id < self.next_id:
            return False
        if input_id > self.next_id:
            raise InvalidRequest(
                f"input_id is {input_id}, the next piece is {self.next_id}",
                param="input_id",
                limit=self.next_id,
            )
        size = len(text) if text.isascii() else len(text.encode())
        if self.num_bytes + size > self._max_bytes:
            raise InputExceeded(
                f"the input has over {self._max_bytes} bytes, the limit",
                param="text",
                limit=self._max_bytes,
            )
        if self.buffered + size > self.capacity:
            if self.buffered:
                # It may fit in when the model has taken the others: `ok` will tell.
                self.level = "high"
            raise InputTooLarge(
                f"text has {size} bytes, of the {self.capacity} of the buffer "
                f"{self.capacity - self.buffered} are free",
                param="text",
                limit=self.capacity,
            )
        self._pieces.append(text)
        self._waiting.append(size)
        self.num_bytes += size
        self.next_id += 1
        self._count(size)
        return True

    def take(self, input_id: int) -> bool:
        """The model has the pieces up to this one; False when it had them before."""
        if input_id <= self.taken_id:
            return False
        for _ in range(input_id - self.taken_id):
            self._count(-self._waiting.popleft())
        self.taken_id = input_id
        return True

    @property
    def so_far(self) -> InferReq:
        """The request with what came, as if it had been sent whole."""
        text = self._before + "".join(self._pieces)
        # Joined once, however often it is asked for.
        self._before, self._pieces = text, []
        req = self._req
        if req.prompt is not None:
            return msgspec.structs.replace(req, prompt=text)
        turns = req.messages or [ChatMessage(role="user")]
        last = turns[-1]
        content = last.content
        if isinstance(content, list):
            part = msgspec.structs.replace(content[-1], text=text)
            last = msgspec.structs.replace(last, content=[*content[:-1], part])
        else:
            last = msgspec.structs.replace(last, content=text)
        return msgspec.structs.replace(req, messages=[*turns[:-1], last])

    def _count(self, size: int) -> None:
        self.buffered += size
        if self.buffered >= HIGH_SHARE * self.capacity:
            self.level = "high"
        elif self.buffered < OK_SHARE * self.capacity:
            self.level = "ok"


def _opening(req: InferReq) -> str:
    """The text that the pieces go on with."""
    if req.prompt is not None and req.messages is None:
        if not isinstance(req.prompt, str):
            raise InvalidRequest("prompt must be text with chunked input", param="prompt")
        return req.prompt
    if req.messages is None:
        return ""
    if not req.messages:
        raise InvalidRequest("messages must hold at least one message", param="messages", limit=1)
    at, last = f"messages[{len(req.messages) - 1}]", req.messages[-1]
    if last.role != "user":
        raise InvalidRequest(
            f"{at}.role is {last.role}: chunked input goes on with a user's message",
            param=f"{at}.role",
        )
    content = last.content
    if isinstance(content, list):
        content = content[-1].text if content and content[-1].type == "text" else None
    if content is None:
        raise InvalidRequest(f"{at}.content must be text with chunked input", param=f"{at}.content")
    return content
