"""The OpenAI-compatible HTTP API: routes over a `StreamOpener`.

Plain FastAPI, no Ray: the Serve shell hands in the graph, a test a fake one.
Bodies are read and decoded here, because FastAPI would put its own rules (lax
numbers, 422) in place of ours.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.openai_bodies import check_model, json_response, read_json
from app.openai_chat_writer import ChatWriter
from app.openai_completion_writer import CompletionWriter
from app.openai_document import (
    CACHE_CONTROL,
    EXAMPLES,
    GENERATING,
    RESUMPTION,
    describe,
    errors,
)
from app.openai_errors import name_request
from app.openai_exchange import Exchange
from app.openai_replies import Heading, Writer
from app.openai_requests import Caller, Plan, cache_policy, plan_chat, plan_completion
from app.openai_response_requests import plan_response
from app.openai_response_types import ResponseBody, ResponseReply
from app.openai_response_writer import ResponseWriter
from app.openai_source import (
    LAST_EVENT_HEADER,
    RESUMABLE_HEADER,
    FreshSource,
    LastEvent,
    ResumableSource,
    Source,
    read_last_event,
)
from app.openai_text_routes import TextApi
from app.openai_types import (
    ChatBody,
    ChatCompletion,
    Completion,
    CompletionBody,
    GenerationBody,
    ModelEntry,
    ModelList,
)
from app.outcomes import RequestOutcomes, RequestRecord
from app.serving import ApiGraph, ModelInfo
from app.stream_keeper import StreamKeeper
from deployments.wire import TokenizeCall
from protocol.errors import InvalidRequest
from protocol.parse import decode_struct

DEFAULT_MAX_BODY_BYTES = 2**20

BodyType = TypeVar("BodyType", GenerationBody, ChatBody, CompletionBody, ResponseBody)


def build_router(
    graph: Callable[[], ApiGraph] | ApiGraph,
    tenant_of: Callable[[Request], str],
    *,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    heartbeat_s: float = 15.0,
    unread_timeout_s: float = 30.0,
    exchanges: set[Exchange] | None = None,
    outcomes: RequestOutcomes | None = None,
    clock: Callable[[], float] = time.time,
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    keeper: StreamKeeper | None = None,
    embedder: str | None = None,
) -> APIRouter:
    """The routes of the API. Errors need `install_error_handlers` on the app.

    Args:
        graph: the graph, or what gives it once it is there.
        tenant_of: tells who asks; raises `Unauthorized`.
        heartbeat_s: longest silence on an event stream.
        unread_timeout_s: a client that takes nothing for so long is given up.
        exchanges: holds those that run now.
        outcomes: counts them.
        keeper: keeps streams that lost their client; None keeps none.
        embedder: id of the model behind /v1/embeddings; None without one.
    """
    graph_now = graph if callable(graph) else lambda: graph
    outcomes = outcomes or RequestOutcomes()
    api = OpenAIApi(
        graph_now,
        tenant_of,
        max_body_bytes=max_body_bytes,
        heartbeat_s=heartbeat_s,
        unread_timeout_s=unread_timeout_s,
        exchanges=set() if exchanges is None else exchanges,
        outcomes=outcomes,
        clock=clock,
        new_id=new_id,
        keeper=keeper,
        embedder=embedder,
    )
    router = APIRouter(tags=["OpenAI"])
    resumable = (CACHE_CONTROL, *RESUMPTION)
    for path, endpoint, body, reply, parameters in (
        ("/v1/chat/completions", api.create_chat_completion, ChatBody, ChatCompletion, resumable),
        ("/v1/completions", api.create_completion, CompletionBody, Completion, resumable),
        ("/v1/responses", api.create_response, ResponseBody, ResponseReply, (CACHE_CONTROL,)),
    ):
        router.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            response_model=None,
            responses=errors(*GENERATING),
            openapi_extra=describe(
                reply,
                body=body,
                example=EXAMPLES[path],
                is_streamed=True,
                parameters=parameters,
            ),
        )
    # Ids hold slashes, as they do on the hub.
    for path, show, told, refusals in (
        ("/v1/models", api.list_models, ModelList, (401, 500, 503)),
        ("/v1/models/{model_id:path}", api.show_model, ModelEntry, (401, 404, 500, 503)),
    ):
        router.add_api_route(
            path,
            show,
            methods=["GET"],
            response_model=None,
            responses=errors(*refusals),
            openapi_extra=describe(told),
        )
    texts = TextApi(
        graph_now,
        tenant_of,
        max_body_bytes=max_body_bytes,
        embedder=embedder,
        outcomes=outcomes,
    )
    texts.add_to(router)
    return router


class OpenAIApi:
    """The generating endpoints, and the models; one instance an ingress replica."""

    def __init__(
        self,
        graph: Callable[[], ApiGraph],
        tenant_of: Callable[[Request], str],
        *,
        max_body_bytes: int,
        heartbeat_s: float,
        unread_timeout_s: float,
        exchanges: set[Exchange],
        outcomes: RequestOutcomes,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        keeper: StreamKeeper | None,
        embedder: str | None,
    ) -> None:
        self._graph = graph
        self._tenant_of = tenant_of
        self._max_body_bytes = max_body_bytes
        self._heartbeat_s = heartbeat_s
        self._unread_timeout_s = unread_timeout_s
        self._exchanges = exchanges
        self._outcomes = outcomes
        self._clock = clock
        self._new_id = new_id
        self._keeper = keeper
        self._embedder = embedder

    async def create_chat_completion(self, request: Request) -> Response:
        """Answers a chat, whole or as server-sent events."""
        record = self._outcomes.begin()
        with record.preparing():
            body, caller, info = await self._receive(request, record, ChatBody, "chatcmpl-")
            plan = plan_chat(body, caller)
            after = self._last_event(request, plan)
            writer = ChatWriter(self._heading(caller, info, after), plan)
        return self._exchange(request, plan, writer, record, self._source(request, plan, after))

    async def create_completion(self, request: Request) -> Response:
        """Continues one or several prompts, whole or as server-sent events."""
        record = self._outcomes.begin()
        with record.preparing():
            body, caller, info = await self._receive(request, record, CompletionBody, "cmpl-")
            plan = plan_completion(body, caller)
            if body.echo:
                plan = replace(plan, echo=await self._texts_of(plan))
            after = self._last_event(request, plan)
            writer = CompletionWriter(self._heading(caller, info, after), plan)
        return self._exchange(request, plan, writer, record, self._source(request, plan, after))

    async def create_response(self, request: Request) -> Response:
        """Answers a list of items with another, whole or as server-sent events."""
        record = self._outcomes.begin()
        with record.preparing():
            body, caller, info = await self._receive(request, record, ResponseBody, "resp_")
            planned = plan_response(body, caller)
            writer = ResponseWriter(self._heading(caller, info), planned)
        return self._exchange(request, planned.plan, writer, record, FreshSource(self._graph()))

    async def list_models(self, request: Request) -> Response:
        """Lists the one model that is served."""
        self._tenant_of(request)
        info = await self._graph().model_info()
        return json_response(request, ModelList(data=[_entry(info)]))

    async def show_model(self, request: Request, model_id: str) -> Response:
        """Describes the model, or the embedder."""
        self._tenant_of(request)
        info = await self._graph().model_info()
        if model_id == self._embedder:
            return json_response(
                request, ModelEntry(id=model_id, root=model_id, created=info.created)
            )
        return json_response(request, _entry(check_model(model_id, info)))

    async def _receive(
        self, request: Request, record: RequestRecord, body_type: type[BodyType], prefix: str
    ) -> tuple[BodyType, Caller, ModelInfo]:
        """Reads who asks for what; the cheap refusals come first."""
        tenant = self._tenant_of(request)
        if LAST_EVENT_HEADER not in request.headers:
            record.admit(tenant)
        policy = cache_policy(request.headers)
        body = decode_struct(await read_json(request, self._max_body_bytes), body_type)
        info = check_model(body.model, await self._graph().model_info())
        reply_id = f"{prefix}{self._new_id()}"
        caller = Caller(reply_id=reply_id, tenant=tenant, model=info.id, cache=policy)
        return body, caller, info

    async def _texts_of(self, plan: Plan) -> tuple[str, ...]:
        """The text of each prompt.

        Raises:
            InvalidRequest: one has tokens that the model has not.
        """
        texts = []
        for request in plan.requests[:: plan.n]:
            prompt = request.prompt
            if isinstance(prompt, str):
                texts.append(prompt)
                continue
            try:
                reply = await self._graph().tokenize(TokenizeCall(token_ids=prompt or ()))
            except InvalidRequest as exc:
                exc.message, exc.param = exc.message.replace("tokens", "prompt", 1), "prompt"
                raise
            texts.append(reply.text)
        return tuple(texts)

    def _heading(self, caller: Caller, info: ModelInfo, after: LastEvent | None = None) -> Heading:
        return Heading(
            id=caller.reply_id,
            created=int(self._clock()) if after is None else after.created,
            model=info.id,
            revision=info.revision,
        )

    def _can_resume(self, plan: Plan) -> bool:
        is_kept = self._keeper is not None and self._keeper.window_s > 0
        return is_kept and plan.is_stream and len(plan.requests) == 1

    def _last_event(self, request: Request, plan: Plan) -> LastEvent | None:
        """Where the client goes on, if it does.

        Raises:
            InvalidRequest: that cannot be resumed.
        """
        value = request.headers.get(LAST_EVENT_HEADER)
        if value is None:
            return None
        if not self._can_resume(plan):
            raise InvalidRequest(
                f"{LAST_EVENT_HEADER} is for one streamed answer, where streams are kept",
                param=LAST_EVENT_HEADER,
            )
        return read_last_event(value)

    def _source(self, request: Request, plan: Plan, after: LastEvent | None) -> Source:
        """Where the streams come from; a client has to ask for what outlives its connection."""
        is_wanted = request.headers.get(RESUMABLE_HEADER, "").strip().lower() == "true"
        if self._keeper is None or not self._can_resume(plan) or not (is_wanted or after):
            return FreshSource(self._graph())
        created = int(self._clock()) if after is None else after.created
        return ResumableSource(self._keeper, created=created, after=after)

    def _exchange(
        self, request: Request, plan: Plan, writer: Writer, record: RequestRecord, source: Source
    ) -> Exchange:
        return Exchange(
            source,
            plan,
            writer,
            name=name_request(request),
            heartbeat_s=self._heartbeat_s,
            unread_timeout_s=self._unread_timeout_s,
            live=self._exchanges,
            record=record,
        )


def _entry(info: ModelInfo) -> ModelEntry:
    return ModelEntry(
        id=info.id,
        root=info.id,
        created=info.created,
        context_length=info.context_length,
        max_model_len=info.context_length,
    )
