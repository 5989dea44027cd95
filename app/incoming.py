"""A request whose prompt still comes: the model prefills what is there while its client goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import msgspec

from protocol.errors import InvalidRequest
from protocol.events import Event
from protocol.frames import InferReq
from protocol.session import Session


class IncomingRequest:
    """The input of one request, from its INFER_REQ to its last piece.

    Args:
        check: raises `InvalidRequest` for what can be no request.
        warm: has the model prefill a request as far as it goes; returns when that is done.
        apply: takes what the session has to tell.
    """

    def __init__(
        self,
        opening: InferReq,
        session: Session,
        *,
        check: Callable[[InferReq], object],
        warm: Callable[[InferReq], Awaitable[None]],
        apply: Callable[[list[Event]], None],
    ) -> None:
        self._opening = opening
        self._session = session
        self._check = check
        self._warm = warm
        self._apply = apply
        self._has_news = asyncio.Event()
        self._whole: InferReq | None = None
        self._warming: asyncio.Task[None] | None = None

    def arrive(self, whole: InferReq | None = None) -> None:
        """A piece came; with the last one, the whole request."""
        self._whole = whole
        self._has_news.set()

    async def whole(self) -> InferReq:
        """Waits for the last piece. One prefill runs at a time, with all that came before it.

        Raises:
            InvalidRequest: there can be no such request, whatever is still to come.
        """
        id = self._opening.id
        so_far, _ = self._session.input_so_far(id)
        # Only what is still to come may be missing.
        prompt = None if so_far.prompt is None else "-"
        self._check(msgspec.structs.replace(so_far, prompt=prompt))
        warmed_id = -1
        if self._opening.messages or self._opening.prompt:
            self._start(so_far, -1)
        while self._whole is None:
            if self._warming is None:
                so_far, last_id = self._session.input_so_far(id)
                if last_id > warmed_id:
                    warmed_id = last_id
                    self._start(so_far, last_id)
            self._has_news.clear()
            await self._has_news.wait()
        # What is being prefilled is of use to the whole request too: it goes on.
        return self._whole

    def close(self) -> list[asyncio.Task[None]]:
        """Gives up what is being prefilled; returns what is still to end."""
        if self._warming is None:
            return []
        self._warming.cancel()
        return [self._warming]

    def _start(self, so_far: InferReq, last_id: int) -> None:
        self._warming = asyncio.create_task(self._prefill(so_far, last_id))

    async def _prefill(self, so_far: InferReq, last_id: int) -> None:
        with contextlib.suppress(InvalidRequest):  # nothing but empty pieces
            await self._warm(so_far)
        self._warming = None
        self._apply(self._session.take_input(self._opening.id, last_id))
        self._has_news.set()
