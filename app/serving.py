"""From a request to a stream: the one interface that both transports are built on.

`open_stream(request)` answers with a `Stream`: a `TokenLog` that fills (or is
full already, after a cache hit) and a way to cancel. Whoever serves a client
reads the log with a cursor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from deployments.wire import EmbedReply, ModelInfo, TokenizeCall, TokenizeReply
from protocol.request import InferenceRequest
from protocol.token_log import CacheOutcome, TokenLog

__all__ = ["ApiGraph", "ModelInfo", "Stream", "StreamOpener"]


@dataclass
class Stream:
    """One running or finished answer. `cancel` may be called at any time, more than once.

    Attributes:
        park: stops the computation while nobody waits; `unpark` goes on from there. Both are
            harmless at any time.
        token: names the stream for `resume_stream` on any ingress; signed, so it cannot be
            guessed. Empty for one that cannot be resumed.
        is_counted: whether its usage is, or will be, in the ledger.
    """

    request: InferenceRequest
    log: TokenLog
    cache: CacheOutcome = field(default_factory=CacheOutcome)
    queue_position: int | None = None
    prompt_tokens: int = 0
    cancel: Callable[[], None] = lambda: None
    park: Callable[[], None] = lambda: None
    unpark: Callable[[], None] = lambda: None
    token: str = ""
    is_counted: bool = False


class StreamOpener(Protocol):
    """What the transports need of the graph."""

    async def model_info(self) -> ModelInfo:
        """The model being served.

        Raises:
            ServingError: no model replica answers.
        """
        ...

    async def open_stream(self, request: InferenceRequest) -> Stream:
        """Starts a request; returns once it is queued or answered from the cache.

        Raises:
            ServingError: the request was refused.
        """
        ...

    async def warm(self, request: InferenceRequest) -> None:
        """Prefills the prefix that this request has so far, of whose last message more may come.

        Returns when a replica has done that, or at once when it cannot be of use; raises
        nothing but `CancelledError`.
        """
        ...

    async def resume_stream(self, token: str, tenant: str) -> Stream:
        """A stream that another ingress had opened and lost, with its log from the beginning.

        Raises:
            ResumeExpired: there is none of that name for this tenant, or none any more.
        """
        ...


class ApiGraph(StreamOpener, Protocol):
    """What the OpenAI API needs beside streams."""

    async def tokenize(self, call: TokenizeCall) -> TokenizeReply:
        """Tokens of a prompt, or the text of tokens.

        Raises:
            ServingError: they are refused, or no model replica answers.
        """
        ...

    async def embed(self, texts: tuple[str, ...]) -> EmbedReply:
        """The vectors of the cache's embedder.

        Raises:
            ServingError: a text is refused, there is no embedder, or it does not answer.
        """
        ...
