"""Errors as the OpenAI API shows them: the one translation from the error tree to HTTP."""

from __future__ import annotations

import logging
import math
import re
import uuid
from http import HTTPMethod, HTTPStatus

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.errors import InternalError, InvalidRequest, ServingError

logger = logging.getLogger(__name__)

_SANE_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorBody


def error_reply(error: ServingError) -> ErrorReply:
    return ErrorReply(
        error=ErrorBody(
            message=_encodable(error.message),
            type=error.openai_type,
            param=None if error.param is None else _encodable(error.param),
            code=error.code,
        )
    )


def error_response(error: ServingError, *, request_id: str | None = None) -> Response:
    """The HTTP reply to a request that failed before anything of an answer was sent."""
    headers = {} if request_id is None else {"x-request-id": request_id}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.http_status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return _json_response(error.http_status, error_reply(error), headers)


def name_request(connection: HTTPConnection) -> str:
    """The `x-request-id` of the reply: the client's own where it is sane, else a new one.

    It is a name for logs and nothing more: two requests may carry the same.
    """
    state = connection.scope.setdefault("state", {})
    if "request_name" not in state:
        offered = connection.headers.get("x-request-id", "")
        sane = _SANE_REQUEST_ID.fullmatch(offered) is not None
        state["request_name"] = offered if sane else f"req_{uuid.uuid4().hex}"
    name: str = state["request_name"]
    return name


def report_incident(exc: BaseException) -> InternalError:
    """Logs an exception that nobody foresaw; the client learns only where to find it."""
    incident = uuid.uuid4().hex[:12]
    logger.error("incident %s", incident, exc_info=exc)
    return InternalError(f"the server failed; incident {incident}")


def install_error_handlers(app: FastAPI) -> None:
    """Makes every HTTP error of `app` an OpenAI error object.

    Call it after all other middleware was added: what that raises is answered too.
    """
    app.add_exception_handler(ServingError, _answer_serving_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_middleware(IncidentGuard)


class IncidentGuard:
    """ASGI middleware: an exception that nobody handled becomes a 500 with an incident id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def watch(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as exc:
            if has_started:
                # The status is out: only a broken connection can still tell the client.
                raise
            name = name_request(HTTPConnection(scope))
            error = exc if isinstance(exc, ServingError) else report_incident(exc)
            await error_response(error, request_id=name)(scope, receive, send)


async def _answer_serving_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, ServingError)
    return error_response(exc, request_id=name_request(request))


async def _answer_http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    is_ours = exc.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR
    try:
        code = HTTPStatus(exc.status_code).name.lower()
    except ValueError:
        code = "http_error"
    message = str(exc.detail)
    if exc.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        message = f"{message.lower()}: {request.method} {request.url.path[:200]}"
    reply = ErrorReply(
        error=ErrorBody(
            message=_encodable(message),
            type="server_error" if is_ours else "invalid_request_error",
            code=code,
        )
    )
    headers = {**(exc.headers or {}), "x-request-id": name_request(request)}
    if exc.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["allow"] = ", ".join(_allowed_methods(request))
        headers.pop("Allow", None)
    return _json_response(exc.status_code, reply, headers)


def _allowed_methods(request: Request) -> list[str]:
    """Those of all routes with this path; the router names only the first one's."""
    return [
        method.value
        for method in sorted(HTTPMethod)
        if any(
            route.matches({**request.scope, "method": method.value})[0] is Match.FULL
            for route in request.app.routes
        )
    ]


async def _answer_validation_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    first = exc.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    error = InvalidRequest(f"{param or 'request'}: {first['msg'].lower()}", param=param)
    return error_response(error, request_id=name_request(request))


def _json_response(status: int, reply: ErrorReply, headers: dict[str, str]) -> Response:
    body = msgspec.json.encode(reply)
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def _encodable(text: str) -> str:
    """`text` with lone surrogates replaced: they can come in by JSON but not go out by UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")
