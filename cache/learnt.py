"""What was learnt beside the answers, kept with them: paraphrases, and the error budget.

Processes on one store share both. An alias is a record that all hear of. Of the budget each tells
the others what happened, about once a second and a mistake at once, so that all have one ledger
and one evidence; and each keeps its own copy of the whole, one record a category. Who starts takes
the newest of these copies, with all that speaks for caution in those written beside it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from cache.aliases import Alias, AliasMap
from cache.budget import BAND_FLOORS, ErrorBudget
from cache.budget_news import News, strictest
from cache.cold import ColdStoreError
from cache.sharing import Learning, pack
from cache.write_behind import ALIASES, BUDGET, Change, WriteBehindStore

logger = logging.getLogger(__name__)

TELL_S = 1.0
WRITE_S = 5.0
"""Between two records of a category, unless there was a mistake."""
BUDGET_LIFE_S = 30 * 86_400.0
TOGETHER_S = 60.0
"""Copies that were written so near to the newest one may know what it does not; those of before
were taken over, or told, by whoever wrote later."""
MAX_SKEW_S = 5.0
_HEAD = struct.Struct("<IH")


class Learnt:
    """Belongs to the cache's thread.

    Args:
        budget: None where nothing is served that could be wrong.
        life_s: of an alias.
        clock: the one that all who share the store go by.
    """

    def __init__(
        self,
        store: WriteBehindStore,
        aliases: AliasMap,
        budget: ErrorBudget | None,
        *,
        life_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._aliases = aliases
        self._budget = budget
        self._life_s = life_s
        self._clock = clock
        self._origin = secrets.token_hex(8)
        self._changed: set[str] = set()
        self._kept: set[str] = set()
        self._told_s = self._written_s = clock()
        self._must_read = True
        self._has_read_s: float | None = None
        aliases.on_add, aliases.on_remove = self._keep_alias, self._drop_alias
        if budget is not None:
            budget.keep_news()
        self._read()

    def keep(self, now: float) -> None:
        """To be called with every use of the cache: tells and writes what is due."""
        is_urgent = self._budget is not None and self._budget.has_bad_news
        if (now - self._told_s < TELL_S and not is_urgent) or not self._store.is_up:
            return
        self._told_s = now
        self._read()
        if self._budget is None or self._must_read:
            return
        news = self._budget.take_news()
        if news:
            told = Learning(self._budget.scale, news, now)
            self._store.announce(pack(told))
            self._changed |= news.keys()
        if self._changed and (is_urgent or now - self._written_s >= WRITE_S):
            self._write(self._changed, now)

    def hear(self, change: Change) -> None:
        """Another process has kept or removed a record of ours."""
        if change.partition != ALIASES:
            return
        if change.kind == "gone":
            self._aliases.forget(change.record_id)
        elif (alias := _read_alias(change.data)) is not None:
            self._aliases.adopt(change.record_id, alias)

    def obey(self, told: Learning) -> None:
        """Learns what another process has learnt."""
        if self._budget is None or told.scale != self._budget.scale:
            return
        # What was told when we had just read may be in what we have read: of such news only
        # what speaks for caution counts once more.
        is_new = self._has_read_s is not None and told.told > self._has_read_s + MAX_SKEW_S
        for category, news in told.news.items():
            self._budget.hear(category, news if is_new else _warnings(news))
            self._changed.add(category)

    def start_anew(self) -> None:
        """What others did is not known: takes over once more what is kept."""
        self._aliases.clear()
        self._must_read = True
        self._change_all()
        self._read()

    def record_anew(self) -> None:
        """Writes what is known into a store that has lost everything."""
        for exact, alias in self._aliases.items():
            self._keep_alias(exact, alias)
        self._change_all()

    def close(self) -> None:
        """Keeps the budget as one that nothing is missing of."""
        now = self._clock()
        self._told_s = self._written_s = float("-inf")
        self.keep(now)
        if self._budget is not None and not self._must_read:
            self._write(self._kept | self._changed, now, is_closed=True)

    def _change_all(self) -> None:
        if self._budget is not None:
            self._changed |= self._budget.export_state().keys()

    def _keep_alias(self, exact: str, alias: Alias) -> None:
        body = alias.target.encode() + alias.vector.tobytes()
        data = _HEAD.pack(zlib.crc32(body), len(alias.target)) + body
        try:
            self._store.put(ALIASES, exact, data, self._clock() + self._life_s)
        except ColdStoreError as exc:
            logger.warning("a paraphrase is kept in memory only: %s", exc)

    def _drop_alias(self, exact: str) -> None:
        self._store.delete(ALIASES, exact)

    def _write(self, categories: set[str], now: float, *, is_closed: bool = False) -> None:
        assert self._budget is not None
        for category, state in self._budget.export_state(categories).items():
            kept = {"category": category, "origin": self._origin, "written": now,
                    "is_closed": is_closed, "scale": self._budget.scale, "state": state}  # fmt: skip
            body = json.dumps(kept, separators=(",", ":")).encode()
            try:
                data = b"%08x" % zlib.crc32(body) + body
                self._store.put(BUDGET, self._record_id(category), data, now + BUDGET_LIFE_S)
            except ColdStoreError as exc:
                logger.warning("the error budget is kept in memory only: %s", exc)
                return
            self._kept.add(category)
        self._changed = set()
        self._written_s = now

    def _record_id(self, category: str) -> str:
        name = hashlib.blake2b(category.encode(), digest_size=16).hexdigest()
        return f"{self._origin}-{name}"

    def _read(self) -> None:
        """Takes over what was kept, as soon as the store is in reach."""
        if not self._must_read or not self._store.is_up:
            return
        try:
            aliases = list(self._store.scan(ALIASES))
            copies = [] if self._budget is None else list(self._store.scan(BUDGET))
        except ColdStoreError as exc:
            logger.warning("what was learnt cannot be read, this is tried again: %s", exc)
            return
        # A store that is written to by time gives the newest first, which is to stay longest.
        for _, exact, data in reversed(aliases):
            alias = _read_alias(data)
            if alias is None:
                self._drop_alias(exact)
            elif self._aliases.get(exact) is None:
                self._aliases.adopt(exact, alias)
        if self._budget is not None:
            for category, found in self._by_category(copies).items():
                self._take_over(self._budget, category, found)
        self._must_read, self._has_read_s = False, self._clock()

    def _by_category(self, copies: list[tuple[str, str, bytes]]) -> dict[str, list[dict[str, Any]]]:
        """Copies that count, the newest first; the others are removed."""
        found: dict[str, list[dict[str, Any]]] = {}
        for _, record_id, data in copies:
            kept = _read_copy(data)
            if kept is None:
                self._store.delete(BUDGET, record_id)
            elif kept["origin"] != self._origin:
                found.setdefault(kept["category"], []).append({**kept, "id": record_id})
        for category, of_one in found.items():
            of_one.sort(key=lambda kept: -kept["written"])
            oldest_s = of_one[0]["written"] - TOGETHER_S
            for kept in of_one:
                if kept["written"] < oldest_s:
                    self._store.delete(BUDGET, kept["id"])
            found[category] = [kept for kept in of_one if kept["written"] >= oldest_s]
        return found

    def _take_over(self, budget: ErrorBudget, category: str, copies: list[dict[str, Any]]) -> None:
        try:
            states = [kept["state"] if kept["scale"] == budget.scale else _unknown(kept["state"])
                      for kept in copies]  # fmt: skip
            if self._has_read_s is None:
                merged = strictest(states[0], states[1:])
                # Nobody knows what checks were on their way.
                merged["streak"] = 0
                if not all(kept["is_closed"] for kept in copies):
                    # Nor what the last moments of a process that was killed have cost.
                    merged["credit"] = min(merged["credit"], 0.0)
            else:
                own = budget.export_state({category})
                merged = strictest(own.get(category, states[0]), states)
            own_news = budget.untold(category)
            budget.import_state({category: merged})
        except (ValueError, KeyError, TypeError) as exc:
            logger.warning("a kept error budget is of no use: %r", exc)
            return
        if own_news is not None and self._has_read_s is None:
            budget.hear(category, own_news)


def _warnings(news: News) -> News:
    """What of the news makes a budget stricter."""
    return News(
        seen=news.seen,
        checks=[check for check in news.checks if not check[1]],
        was_wrong=news.was_wrong,
        spent=news.spent,
        looks=news.looks,
    )


def _unknown(state: dict[str, Any]) -> dict[str, Any]:
    """A state of which only the credit says anything."""
    bands = len(BAND_FLOORS)
    return {"credit": state["credit"], "requests": 0.0, "seen": [0.0] * bands, "checks": [],
            "num_checks": 0, "streak": 0, "looks": 0}  # fmt: skip


def _read_alias(data: bytes) -> Alias | None:
    if len(data) < _HEAD.size:
        return None
    checksum, size = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if zlib.crc32(body) != checksum:
        return None
    vector = np.frombuffer(body[size:], dtype=np.float32)
    return Alias(body[:size].decode(), vector)


def _read_copy(data: bytes) -> dict[str, Any] | None:
    try:
        if zlib.crc32(data[8:]) != int(data[:8], 16):
            return None
        kept = json.loads(data[8:])
    except ValueError:
        return None
    is_ours = isinstance(kept, dict) and all(
        isinstance(kept.get(name), kind) for name, kind in _COPY_FIELDS.items()
    )
    return kept if is_ours else None


_COPY_FIELDS: dict[str, Any] = {
    "category": str,
    "origin": str,
    "written": int | float,
    "is_closed": bool,
    "scale": str,
    "state": dict,
}
