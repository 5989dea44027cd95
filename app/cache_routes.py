"""Looking after the cache over HTTP: what it holds and why, deletion, feedback, export, import.

For admins, but for feedback, which everybody may give on answers of their own tenant.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Protocol, TypeVar
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse

from app.accounts import Accounts
from app.cache_bodies import (
    MAX_LISTED,
    Body,
    DeleteReply,
    Deletion,
    Entry,
    EntryList,
    ExplainBody,
    ExplainReply,
    FeedbackBody,
    FeedbackReply,
    ImportReply,
    Listing,
    ReplicaStats,
    StatsReply,
    Which,
)
from app.openai_bodies import read_json
from app.openai_document import ADMINISTERING, errors
from app.openai_requests import Caller, plan_chat
from app.openai_types import ChatBody
from app.serving import ModelInfo
from deployments import wire
from protocol.errors import InputTooLarge, InvalidRequest, UnknownId
from protocol.parse import decode_struct
from protocol.request import InferenceRequest

BATCH = 64
"""Entries of an export that are held in memory at a time."""
IMPORT_BATCH_BYTES = 2**20
MAX_LINE_BYTES = 2**24
"""Of an import: an entry may be as large as the cache keeps any, in base 64."""


class CacheManager(Protocol):
    """What is needed of the graph."""

    async def model_info(self) -> ModelInfo: ...

    async def manage_cache(self, call: wire.ManageCall) -> list[Any]: ...


BodyType = TypeVar("BodyType", bound=Body)


def build_cache_router(
    graph: CacheManager, accounts: Accounts, *, is_on_loopback: bool, max_body_bytes: int
) -> APIRouter:
    """The routes under `/v1/cache`. Errors need `install_error_handlers` on the app."""

    def is_local(request: Request) -> bool:
        return is_on_loopback and _comes_from_here(request)

    def check_admin(request: Request) -> None:
        key = request.headers.get("authorization")
        accounts.check_admin(key, is_local=is_local(request))

    def judge_of(request: Request) -> str | None:
        """The tenant whose entries the caller may judge; None: of all."""
        key = request.headers.get("authorization")
        if accounts.is_admin(key, is_local=is_local(request)):
            return None
        return accounts.tenant_of(key)

    api = CacheApi(graph, max_body_bytes)
    router = APIRouter(prefix="/v1/cache", tags=["Cache"])
    admin = APIRouter(dependencies=[Depends(check_admin)], responses=errors(*ADMINISTERING))
    admin.add_api_route("/stats", api.stats, methods=["GET"])
    admin.add_api_route("/entries", api.find, methods=["GET"])
    admin.add_api_route("/entries", api.delete, methods=["DELETE"])
    admin.add_api_route(
        "/explain",
        api.explain,
        methods=["POST"],
        responses=errors(404, 413),
        openapi_extra=_describe(ExplainBody),
    )
    admin.add_api_route(
        "/export",
        api.export,
        methods=["GET"],
        response_class=StreamingResponse,
        responses={200: {"content": _LINES}},
    )
    admin.add_api_route(
        "/import",
        api.import_entries,
        methods=["POST"],
        responses=errors(413),
        openapi_extra={"requestBody": {"required": True, "content": _LINES}},
    )
    router.include_router(admin)

    @router.post(
        "/feedback",
        responses=errors(400, 401, 404, 413, 500, 503),
        openapi_extra=_describe(FeedbackBody),
    )
    async def feedback(request: Request) -> FeedbackReply:
        """Tells whether an answer was right; a wrong one, and those near it, is given no more.

        With the key of a tenant, on that tenant's answers.
        """
        return await api.feedback(request, judge_of(request))

    return router


class CacheApi:
    """The endpoints."""

    def __init__(self, graph: CacheManager, max_body_bytes: int) -> None:
        self._graph = graph
        self._max_body_bytes = max_body_bytes

    async def stats(self) -> StatsReply:
        """Counters, what each tenant holds in each tier, and the state of the error budget."""
        told = await self._graph.manage_cache(wire.ManageCall(action="stats"))
        return StatsReply(replicas=[ReplicaStats(**each) for each in told])

    async def find(self, which: Annotated[Listing, Query()]) -> EntryList:
        """Lists entries."""
        call = wire.ManageCall(action="find", which=which.query, limit=which.limit)
        told = await self._graph.manage_cache(call)
        entries = {entry["id"]: Entry(**entry) for each in told for entry in each["entries"]}
        newest = sorted(entries.values(), key=lambda entry: entry.age_s)
        total = max([len(newest), *(each["total"] for each in told)])
        return EntryList(total=total, entries=newest[: which.limit])

    async def delete(self, which: Annotated[Deletion, Query()]) -> DeleteReply:
        """Deletes entries, in every tier and replica."""
        call = wire.ManageCall(action="delete", which=which.query)
        return DeleteReply(deleted=sum(await self._graph.manage_cache(call)))

    async def explain(self, request: Request) -> ExplainReply:
        """Tells what the cache has for a question, and why it gives it or not. Changes nothing."""
        body = _validated(ExplainBody, await read_json(request, self._max_body_bytes))
        info = await self._graph.model_info()
        call = wire.ManageCall(
            action="explain",
            request=_question(body, info),
            model_revision=info.revision,
            limit=MAX_LISTED,
        )
        told = await self._graph.manage_cache(call)
        first = dict(told[0])
        first["candidates"] = sorted(
            (candidate for each in told for candidate in each["candidates"]),
            key=lambda candidate: (
                -2.0 if candidate["similarity"] is None else -candidate["similarity"]
            ),
        )
        return ExplainReply(**first)

    async def feedback(self, request: Request, tenant: str | None) -> FeedbackReply:
        """See the route.

        Raises:
            UnknownId: that tenant has no such entry.
        """
        body = _validated(FeedbackBody, await read_json(request, self._max_body_bytes))
        call = wire.ManageCall(
            action="feedback",
            which=wire.EntryQuery(id=body.id, tenant=tenant),
            was_right=body.was_right,
        )
        if not any(await self._graph.manage_cache(call)):
            raise UnknownId(f"no stored answer has the id {body.id}", param="id")
        return FeedbackReply(noted=True)

    async def export(self, which: Annotated[Which, Query()]) -> StreamingResponse:
        """All entries that are meant, one JSON object a line, as `import` takes them."""
        told = await self._graph.manage_cache(wire.ManageCall(action="keys", which=which.query))
        keys = list(dict.fromkeys(key for each in told for key in each))
        return StreamingResponse(
            self._lines(keys),
            media_type="application/x-ndjson",
            headers={"x-seedance-entries": str(len(keys))},
        )

    async def _lines(self, keys: list[str]) -> AsyncIterator[bytes]:
        for start in range(0, len(keys), BATCH):
            call = wire.ManageCall(action="records", keys=tuple(keys[start : start + BATCH]))
            told = await self._graph.manage_cache(call)
            records = {record["exact"]: record for each in told for record in each}
            for record in records.values():
                yield json.dumps(record, ensure_ascii=False).encode() + b"\n"

    async def import_entries(self, request: Request) -> ImportReply:
        """Takes in what `export` gave, with the ages that it had; a bad line ends it."""
        num_read = num_kept = 0
        batch: list[bytes] = []

        async def take() -> None:
            nonlocal num_read, num_kept
            call = wire.ManageCall(action="import", records=tuple(batch), first=num_read + 1)
            num_kept += max(await self._graph.manage_cache(call))
            num_read += len(batch)
            batch.clear()

        size = 0
        async for line in _lines_of(request):
            batch.append(line)
            size += len(line)
            if size >= IMPORT_BATCH_BYTES or len(batch) >= BATCH:
                await take()
                size = 0
        if batch:
            await take()
        return ImportReply(read=num_read, kept=num_kept)


def is_loopback(host: str) -> bool:
    """Whether a host, by name or address, is this machine for itself."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _comes_from_here(request: Request) -> bool:
    """Whether somebody on this machine asks, and no page that a browser was lured to."""
    headers = request.headers
    if any(name in headers for name in ("x-forwarded-for", "forwarded", "via", "x-real-ip")):
        return False
    hosts = [request.client.host if request.client else ""]
    hosts += [urlsplit(f"//{headers.get('host', '')}").hostname or ""]
    if "origin" in headers:
        hosts.append(urlsplit(headers["origin"]).hostname or "")
    return all(map(is_loopback, hosts))


def _question(body: ExplainBody, info: ModelInfo) -> InferenceRequest:
    """The request that a look-up would get.

    Raises:
        InvalidRequest: the chat is none; `param` names the field.
    """
    fields: Mapping[str, Any] = body.chat or {
        "messages": [{"role": "user", "content": body.prompt}],
        "temperature": 0,
    }
    chat = decode_struct(json.dumps(fields), ChatBody)
    caller = Caller(reply_id="explain", tenant=body.tenant, model=info.id)
    return plan_chat(chat, caller).requests[0]


def _validated(model: type[BodyType], raw: bytes) -> BodyType:
    """The body.

    Raises:
        InvalidRequest: it is another; the message and `param` name the field.
    """
    try:
        return model.model_validate_json(raw)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        param = ".".join(map(str, first["loc"])) or None
        raise InvalidRequest(f"{param or 'body'}: {first['msg'].lower()}", param=param) from None


async def _lines_of(request: Request) -> AsyncIterator[bytes]:
    """The lines of a body, without those that are empty.

    Raises:
        InputTooLarge: one is longer than `MAX_LINE_BYTES`.
        InvalidRequest: the connection ended within the body.
    """
    rest = b""
    try:
        async for part in request.stream():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.strip():
                    yield line
            if len(rest) > MAX_LINE_BYTES:
                raise InputTooLarge(
                    f"a line has over {MAX_LINE_BYTES} bytes, the limit", limit=MAX_LINE_BYTES
                )
    except ClientDisconnect as error:
        raise InvalidRequest("the connection ended within the body") from error
    if rest.strip():
        yield rest


def _describe(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_LINES = {"application/x-ndjson": {"schema": {"type": "string"}}}
