"""What an operator asks of a cache replica: find, delete, explain, judge, export, import, count.

Every replica is asked; replies are JSON, since they go to a person.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
from typing import Any

import msgspec

from cache.budget import ErrorBudget
from cache.index import Vector
from cache.key import PromptKey
from cache.prompt_cache import PromptCache
from cache.stats import EntryFilter, EntryInfo
from cache.verifier import Verifier
from deployments.cache_service import BLIND, CacheService
from deployments.wire import EntryQuery, ManageCall, decode_stored
from protocol.errors import InvalidRequest

SHOWN_CHARS = 2000
"""Of a prompt or an answer in a list; an export has all of it."""


class CacheAdmin:
    """The operator's side of one cache replica.

    Args:
        budget: None where the same wording is all that is served; `verifier` likewise.
    """

    def __init__(
        self,
        service: CacheService,
        cache: PromptCache,
        *,
        budget: ErrorBudget | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        self._service = service
        self._cache = cache
        self._budget = budget
        self._verifier = verifier

    async def manage(self, call: ManageCall) -> bytes:
        """The reply, as JSON: `{"done": …}`, or `{"refused": {"message", "param"}}`."""
        try:
            reply = {"done": await self._reply(call)}
        except InvalidRequest as error:
            reply = {"refused": {"message": error.message, "param": error.param}}
        return json.dumps(reply).encode()

    async def _reply(self, call: ManageCall) -> Any:
        which = entry_filter(call.which)
        match call.action:
            case "find":
                found = self._cache.find(which)
                found.sort(key=lambda info: info.age_s)
                return {
                    "total": len(found),
                    "entries": [_shown(info) for info in found[: call.limit]],
                }
            case "delete":
                return self._service.delete(which)
            case "feedback":
                assert which.id is not None
                return self._service.feedback(
                    which.id, was_right=call.was_right, tenant=which.tenant
                )
            case "quarantine":
                assert which.id is not None
                return self._service.quarantine(which.id)
            case "explain":
                return await self._explain(call)
            case "keys":
                return self._cache.exact_keys(which)
            case "records":
                return [_as_json(record) for record in self._cache.records(call.keys)]
            case "import":
                # All are read before one is kept.
                records = [
                    _from_json(line, place) for place, line in enumerate(call.records, call.first)
                ]
                try:
                    return self._cache.import_records(records)
                except ValueError as error:
                    raise InvalidRequest(str(error)) from None
            case "stats":
                return self._stats()

    async def _explain(self, call: ManageCall) -> dict[str, Any]:
        assert call.request is not None
        key, vector, problem = await self._service.read(call.request, call.model_revision)
        candidates = [
            dataclasses.asdict(one) for one in self._cache.explain(key, vector, self._verifier)
        ]
        # Equal questions that no look-up reaches, because something around them differs.
        elsewhere = [
            _shown(info)
            for info in self._cache.find(EntryFilter(tenant=key.tenant, prompt=key.text))
            if info.partition != key.partition
        ]
        return {
            "partition": key.partition,
            "may_match_by_meaning": key.allow_semantic and problem is None,
            "problem": problem,
            "decision": self._foresee(key, vector),
            "least_score": None if self._budget is None else self._budget.least_score(key.tenant),
            "credit": None if self._budget is None else self._budget.credit(key.tenant),
            "candidates": candidates,
            "other_partitions": elsewhere[: call.limit],
        }

    def _foresee(self, key: PromptKey, vector: Vector | None) -> dict[str, Any]:
        """What a look-up would do now."""
        foreseen = self._cache.foresee(key, vector)
        is_unseen = foreseen.action == "serve" and foreseen.score is not None
        if is_unseen and self._service.audit.is_blind:
            foreseen = dataclasses.replace(foreseen, action="shadow", reason=BLIND)
        return dataclasses.asdict(foreseen)

    def budget_stats(self, limit: int | None = None) -> dict[str, Any]:
        """What the error budget lets be given, by category; those checked last, up to `limit`."""
        if self._budget is None:
            return {}
        return {
            category: {"least_score": self._budget.least_score(category), **window}
            for category, window in self._service.audit.windows(limit).items()
        }

    def _stats(self) -> dict[str, Any]:
        return {
            "cache": self._service.stats(),
            "tenants": [dataclasses.asdict(each) for each in self._cache.tenant_stats()],
            "budget": self.budget_stats(),
        }


def entry_filter(query: EntryQuery) -> EntryFilter:
    """The query as the cache takes it."""
    return EntryFilter(**msgspec.structs.asdict(query))


def _shown(info: EntryInfo) -> dict[str, Any]:
    shown = dataclasses.asdict(info)
    shown["text"] = info.text[:SHOWN_CHARS]
    return shown


def _as_json(record: dict[str, Any]) -> dict[str, Any]:
    """A record whose bytes are in base 64."""
    vector = record["vector"]
    return {
        **record,
        "payload": base64.b64encode(record["payload"]).decode(),
        "vector": None if vector is None else base64.b64encode(vector).decode(),
    }


def _from_json(line: bytes, place: int) -> dict[str, Any]:
    """The record of one line.

    Raises:
        InvalidRequest: it is none; the message names the line and the field.
    """
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"line {place}: not JSON: {error}", param=f"line {place}") from None
    if not isinstance(record, dict):
        raise InvalidRequest(f"line {place}: not an object", param=f"line {place}")
    for name, kind in _FIELDS.items():
        if not isinstance(record.get(name), kind) or isinstance(record[name], bool) != (
            kind is bool
        ):
            raise InvalidRequest(
                f"line {place}: {name} is missing or of the wrong kind", param=name
            )
    field = "payload"
    try:
        record["payload"] = base64.b64decode(record["payload"], validate=True)
        decode_stored(record["payload"])
        field = "vector"
        if record.get("vector") is not None:
            record["vector"] = base64.b64decode(record["vector"], validate=True)
            if len(record["vector"]) % 4 or not record["vector"]:
                raise ValueError(f"{len(record['vector'])} bytes are no float32 vector")
    except (ValueError, TypeError, binascii.Error) as error:
        raise InvalidRequest(f"line {place}: {field}: {error}", param=field) from None
    record.setdefault("vector", None)
    if not all(isinstance(tag, str) for tag in record["tags"]):
        raise InvalidRequest(f"line {place}: tags must be texts", param="tags")
    if not isinstance(record.get("max_tokens"), int | None):
        raise InvalidRequest(f"line {place}: max_tokens must be a number", param="max_tokens")
    return record


_FIELDS: dict[str, Any] = {
    "tenant": str,
    "partition": str,
    "text": str,
    "exact": str,
    "allow_semantic": bool,
    "completion": bool,
    "completion_tokens": int,
    "model_revision": str,
    "is_truncated": bool,
    "model": str,
    "tags": list,
    "hits": int,
    "age_s": int | float,
    "payload": str,
}
