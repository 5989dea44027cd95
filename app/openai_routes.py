"""The OpenAI-compatible HTTP API: routes over a `StreamOpener`.

Plain FastAPI, no Ray: the Serve shell hands in the graph, a test a fake one.
Bodies are read and decoded here, because FastAPI would put its own rules (lax
numbers, 422) in place of ours.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from app.openai_errors import name_request
from app.openai_exchange import Exchange
from app.openai_replies import ChatWriter, CompletionWriter, Heading
from app.openai_requests import Caller, Plan, cache_policy, plan_chat, plan_completion
from app.openai_types import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    ModelEntry,
    ModelList,
    inline_schema,
)
from app.outcomes import RequestOutcomes, RequestRecord
from app.serving import ModelInfo, StreamOpener
from protocol.errors import InputTooLarge, InvalidRequest, ModelNotFound
from protocol.parse import decode_struct

DEFAULT_MAX_BODY_BYTES = 2**20
DRAIN_FACTOR = 16
"""A body over the limit is read on, and thrown away, up to this many times the limit: a client
that is still sending would see a reset connection and not the 413."""

BodyType = TypeVar("BodyType", bound=GenerationBody)


def build_router(
    opener: Callable[[], StreamOpener] | StreamOpener,
    tenant_of: Callable[[Request], str],
    *,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    heartbeat_s: float = 15.0,
    unread_timeout_s: float = 30.0,
    exchanges: set[Exchange] | None = None,
    outcomes: RequestOutcomes | None = None,
    clock: Callable[[], float] = time.time,
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
) -> APIRouter:
    """The routes of the API. Errors need `install_error_handlers` on the app.

    Args:
        opener: the graph, or what gives it once it is there.
        tenant_of: tells who asks; raises `Unauthorized`.
        heartbeat_s: longest silence on an event stream.
        unread_timeout_s: a client that takes nothing for so long is given up.
        exchanges: holds those that run now.
        outcomes: counts them.
    """
    api = OpenAIApi(
        opener if callable(opener) else lambda: opener,
        tenant_of,
        max_body_bytes=max_body_bytes,
        heartbeat_s=heartbeat_s,
        unread_timeout_s=unread_timeout_s,
        exchanges=set() if exchanges is None else exchanges,
        outcomes=outcomes or RequestOutcomes(),
        clock=clock,
        new_id=new_id,
    )
    router = APIRouter(tags=["OpenAI"])
    for path, endpoint, body in (
        ("/v1/chat/completions", api.create_chat_completion, ChatBody),
        ("/v1/completions", api.create_completion, CompletionBody),
    ):
        router.add_api_route(
            path, endpoint, methods=["POST"], response_model=None, openapi_extra=_describe(body)
        )
    router.add_api_route("/v1/models", api.list_models, methods=["GET"], response_model=None)
    # Ids hold slashes, as they do on the hub.
    router.add_api_route(
        "/v1/models/{model_id:path}", api.show_model, methods=["GET"], response_model=None
    )
    return router


class OpenAIApi:
    """The endpoints; one instance an ingress replica."""

    def __init__(
        self,
        opener: Callable[[], StreamOpener],
        tenant_of: Callable[[Request], str],
        *,
        max_body_bytes: int,
        heartbeat_s: float,
        unread_timeout_s: float,
        exchanges: set[Exchange],
        outcomes: RequestOutcomes,
        clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._opener = opener
        self._tenant_of = tenant_of
        self._max_body_bytes = max_body_bytes
        self._heartbeat_s = heartbeat_s
        self._unread_timeout_s = unread_timeout_s
        self._exchanges = exchanges
        self._outcomes = outcomes
        self._clock = clock
        self._new_id = new_id

    async def create_chat_completion(self, request: Request) -> Response:
        """Answers a chat, whole or as server-sent events."""
        record = self._outcomes.begin()
        with record.preparing():
            body, caller, info = await self._receive(request, ChatBody, "chatcmpl")
            plan = plan_chat(body, caller)
            writer = ChatWriter(self._heading(caller, info), include_usage=plan.include_usage)
        return self._exchange(request, plan, writer, record)

    async def create_completion(self, request: Request) -> Response:
        """Continues one or several prompts, whole or as server-sent events."""
        record = self._outcomes.begin()
        with record.preparing():
            body, caller, info = await self._receive(request, CompletionBody, "cmpl")
            plan = plan_completion(body, caller)
            writer = CompletionWriter(self._heading(caller, info), include_usage=plan.include_usage)
        return self._exchange(request, plan, writer, record)

    async def list_models(self, request: Request) -> Response:
        """Lists the one model that is served."""
        self._tenant_of(request)
        info = await self._opener().model_info()
        return _json(request, ModelList(data=[_entry(info)]))

    async def show_model(self, request: Request, model_id: str) -> Response:
        """Describes the model."""
        self._tenant_of(request)
        return _json(request, _entry(await self._model(model_id)))

    async def _receive(
        self, request: Request, body_type: type[BodyType], prefix: str
    ) -> tuple[BodyType, Caller, ModelInfo]:
        """Reads who asks for what; the cheap refusals come first."""
        tenant = self._tenant_of(request)
        policy = cache_policy(request.headers)
        body = decode_struct(await read_json(request, self._max_body_bytes), body_type)
        info = await self._model(body.model)
        reply_id = f"{prefix}-{self._new_id()}"
        caller = Caller(reply_id=reply_id, tenant=tenant, model=info.id, cache=policy)
        return body, caller, info

    async def _model(self, asked: str | None) -> ModelInfo:
        info = await self._opener().model_info()
        if asked is not None and asked != info.id:
            raise ModelNotFound(
                f"model {asked[:200]!a} is not served here, {info.id!a} is", param="model"
            )
        return info

    def _heading(self, caller: Caller, info: ModelInfo) -> Heading:
        return Heading(
            id=caller.reply_id,
            created=int(self._clock()),
            model=info.id,
            revision=info.revision,
        )

    def _exchange(
        self,
        request: Request,
        plan: Plan,
        writer: ChatWriter | CompletionWriter,
        record: RequestRecord,
    ) -> Exchange:
        return Exchange(
            self._opener(),
            plan,
            writer,
            name=name_request(request),
            heartbeat_s=self._heartbeat_s,
            unread_timeout_s=self._unread_timeout_s,
            live=self._exchanges,
            record=record,
        )


async def read_json(request: Request, max_bytes: int) -> bytes:
    """The body of a request that says it is JSON.

    Raises:
        InputTooLarge: it is longer than `max_bytes`.
        InvalidRequest: it is something else, or ends early.
    """
    _check_content_type(request)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size <= max_bytes:
                parts.append(part)
            elif size > max_bytes * DRAIN_FACTOR:
                break
            else:
                parts.clear()
    except ClientDisconnect as error:
        raise InvalidRequest("the connection ended within the body") from error
    if size > max_bytes:
        raise InputTooLarge(
            f"the body has {'over ' if size > max_bytes * DRAIN_FACTOR else ''}{size} bytes, "
            f"the limit is {max_bytes}",
            limit=max_bytes,
        )
    return b"".join(parts)


def _check_content_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "application/json").lower()
    kind, _, parameters = (part.strip() for part in content_type.partition(";"))
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        raise InvalidRequest(
            f"content-type must be application/json, got {content_type[:60]!a}",
            param="content-type",
        )
    charset = parameters.removeprefix("charset=").strip('"')
    if parameters.startswith("charset=") and charset not in ("utf-8", "utf8", "us-ascii"):
        raise InvalidRequest(f"charset must be utf-8, got {charset[:60]!a}", param="content-type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise InvalidRequest(
            f"content-encoding {encoding[:60]!a} is not supported", param="content-encoding"
        )


def _entry(info: ModelInfo) -> ModelEntry:
    return ModelEntry(id=info.id, created=info.created, context_length=info.context_length)


def _json(request: Request, reply: msgspec.Struct) -> Response:
    headers = {"x-request-id": name_request(request)}
    return Response(msgspec.json.encode(reply), headers=headers, media_type="application/json")


def _describe(body: type[GenerationBody]) -> dict[str, Any]:
    """What FastAPI's document says of a body that FastAPI does not read itself."""
    content = {"application/json": {"schema": inline_schema(body)}}
    return {"requestBody": {"required": True, "content": content}}
