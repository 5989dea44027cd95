"""`GET /v1/usage`: what a tenant used, by day; for admins, what all used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from app.usage_ledger import Row, Used
from protocol.errors import Forbidden, InvalidRequest

DEFAULT_SPAN = timedelta(days=29)
MAX_ROWS = 10_000


class UsageReader(Protocol):
    """What is needed of the store."""

    async def usage(
        self, tenant: str | None, *, first_day: str, last_day: str, limit: int
    ) -> Sequence[tuple[Row, Used]]: ...


class _Reply(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class DayOfUsage(_Reply):
    """What one tenant used on one day."""

    date: date
    """In UTC."""
    tenant: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that the model had computed before."""
    saved_tokens: int
    """Tokens of answers from the cache, and of those that an equal request shared."""


class UsageReply(_Reply):
    """Days on which something was used, the newest first."""

    object: str = "list"
    start: date
    end: date
    data: list[DayOfUsage]
    has_more: bool
    """Whether there are older rows than `limit` let in."""


def build_usage_router(
    store: UsageReader,
    tenant_of: Callable[[Request], str],
    is_admin: Callable[[Request], bool],
    *,
    today: Callable[[], date] = lambda: datetime.now(UTC).date(),
) -> APIRouter:
    """The route. Errors need `install_error_handlers` on the app."""
    router = APIRouter(tags=["Usage"])

    @router.get("/v1/usage", responses=_ERRORS)
    async def usage(
        request: Request,
        start: Annotated[
            date | None, Query(description="First day, in UTC; by default 29 days before `end`.")
        ] = None,
        end: Annotated[
            date | None, Query(description="Last day, in UTC; by default today.")
        ] = None,
        tenant: Annotated[
            str | None,
            Query(description="Of this tenant only; another's needs the key of an admin."),
        ] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_ROWS, description="Most rows.")] = 1000,
    ) -> UsageReply:
        """What the tenant of the key used, by day; with the key of an admin, what all tenants used.

        It is up to date but for some seconds.
        """
        asker = tenant_of(request)
        if not is_admin(request):
            if tenant not in (None, asker):
                raise Forbidden("the usage of others needs the key of an admin", param="tenant")
            tenant = asker
        last = end or today()
        first = start or last - min(DEFAULT_SPAN, last - date.min)
        if first > last:
            raise InvalidRequest(f"start is {first}, after end, which is {last}", param="start")
        found = await store.usage(
            tenant, first_day=first.isoformat(), last_day=last.isoformat(), limit=limit + 1
        )
        return UsageReply(
            start=first,
            end=last,
            data=[
                DayOfUsage(date=date.fromisoformat(row.day), tenant=row.tenant, **used._asdict())
                for row, used in found[:limit]
            ],
            has_more=len(found) > limit,
        )

    return router


_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "`param` names the parameter at fault."},
    401: {"description": "No key, or an unknown one."},
    403: {"description": "Another tenant's usage was asked for."},
    503: {"description": "The store of accounts does not answer."},
}
