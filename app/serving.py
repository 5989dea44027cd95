"""From a request to a stream: the one interface that both transports are built on.

`open_stream(request)` answers with a `Stream`: a `TokenLog` that fills (or is
full already, after a cache hit) and a way to cancel. Whoever serves a client
reads the log with a cursor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from deployments.wire import ModelInfo
from protocol.request import InferenceRequest
from protocol.token_log import CacheOutcome, TokenLog

__all__ = ["ModelInfo", "Stream", "StreamOpener"]


@dataclass
class Stream:
    """One running or finished answer. `cancel` may be called at any time, more than once."""

    request: InferenceRequest
    log: TokenLog
    cache: CacheOutcome = field(default_factory=CacheOutcome)
    queue_position: int | None = None
    cancel: Callable[[], None] = lambda: None


class StreamOpener(Protocol):
    """What a transport needs of the graph behind it."""

    async def open_stream(self, request: InferenceRequest) -> Stream:
        """Starts or finds the answer.

        Returns once the request is accepted (queued) or hit, before the first token.

        Raises:
            ServingError: the request cannot start; nothing is left running.
        """
        ...

    async def model_info(self) -> ModelInfo:
        """The served model.

        Raises:
            ServingError: no model replica answers.
        """
        ...
