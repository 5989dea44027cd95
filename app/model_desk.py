"""What is asked of any model replica, beside answers: what it serves, tokens, work ahead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from app.model_bus import Spawn
from app.ports import ModelPort
from deployments import wire
from deployments.prompt_chain import prompt_chain
from deployments.wire import ModelInfo
from protocol.errors import Overloaded, ServingError
from protocol.request import InferenceRequest

logger = logging.getLogger(__name__)

INFO_MAX_AGE_S = 10.0
"""A rollout may bring another model: after this time the replicas are asked again what they serve."""
INFO_PATIENCE_S = 1.0
INFO_TIMEOUT_S = 2.0
"""A replica tells it at once: while none is there, probes and first requests hear so and do not hang."""
WARM_TIMEOUT_S = 10.0
"""What was computed until then stays, and the next piece of the prompt goes on behind it."""


class ModelDesk:
    """Asks, and remembers what the model is.

    Args:
        accept_timeout_s: a call for less than `INFO_TIMEOUT_S`.
    """

    def __init__(
        self,
        model: ModelPort,
        *,
        accept_timeout_s: float,
        spawn: Spawn,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._timeout_s = min(INFO_TIMEOUT_S, accept_timeout_s)
        self._spawn = spawn
        self._clock = clock
        self._info: ModelInfo | None = None
        self._info_at_s = 0.0
        self._asking: asyncio.Task[None] | None = None

    async def info(self) -> ModelInfo:
        """What the model replicas serve, as of a few seconds ago.

        Raises:
            ServingError: no model replica answers.
        """
        if self._info is None:
            return await self.ask_info()
        if self._clock() - self._info_at_s >= INFO_MAX_AGE_S:
            if self._asking is None:
                self._asking = self._spawn(self._renew_info())
            # One that hangs is not waited for: the others still serve what was told before.
            await asyncio.wait((self._asking,), timeout=INFO_PATIENCE_S)
        return self._info

    async def ask_info(self) -> ModelInfo:
        """What the model replicas serve now.

        Raises:
            ServingError: no model replica answers.
        """
        self._info = wire.decode_info(await self._answer_of(self._model.info()))
        self._info_at_s = self._clock()
        return self._info

    async def tokenize(self, call: wire.TokenizeCall) -> wire.TokenizeReply:
        """See `serving.ApiGraph.tokenize`."""
        reply = wire.decode_tokenize_reply(
            await self._answer_of(self._model.tokenize(wire.encode(call)))
        )
        if reply.refused is not None:
            raise ServingError.from_info(reply.refused)
        return reply

    def may_serve(self, model: str) -> bool:
        """Whether no replica has told that it serves another model."""
        return self._info is None or model == self._info.id

    async def warm(self, request: InferenceRequest) -> None:
        """Has the replica that the request will go to compute what is known of its prompt.

        Returns when that is done or given up.
        """
        try:
            route = wire.Route(chain=prompt_chain(request), is_warm_up=True)
            async with asyncio.timeout(WARM_TIMEOUT_S):
                await self._model.warm(wire.encode(request), route)
        except Exception as error:
            # The request itself will tell, if anything is wrong.
            logger.info("request %s is not computed ahead: %r", request.request_id, error)

    async def _renew_info(self) -> None:
        try:
            await self.ask_info()
        except ServingError as error:
            logger.warning("no model replica tells what it serves: %s", error.message)
        finally:
            self._asking = None

    async def _answer_of(self, call: Awaitable[bytes]) -> bytes:
        """The model's reply.

        Raises:
            ServingError: `overloaded` when no replica answers in time or at all.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except TimeoutError:
            raise Overloaded(
                f"no model replica answered within {self._timeout_s:g} s", retry_after_s=1
            ) from None
        except ServingError:
            raise
        except Exception as error:
            logger.warning("model call failed: %r", error)
            raise Overloaded("no model replica is ready", retry_after_s=1) from error
