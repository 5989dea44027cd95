"""What processes that share a store tell each other, beside its records."""

from __future__ import annotations

import base64
import json
import logging
from dataclasses import asdict, dataclass

import numpy as np

from cache.budget import BAND_FLOORS
from cache.budget_news import News, from_plain, to_plain
from cache.index import Vector
from cache.stats import EntryFilter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Removal:
    """All entries that are meant were removed, at a time of the clock that all share."""

    which: EntryFilter
    asked: float | None = None


@dataclass(frozen=True, slots=True)
class Condemned:
    """An entry was proven wrong; its neighbourhood is closed, where it has a vector."""

    partition: str
    exact: str
    vector: Vector | None


@dataclass(frozen=True, slots=True)
class Learning:
    """What happened to the error budget, by category, and when that was told.

    `scale` says what scores mean there.
    """

    scale: str
    news: dict[str, News]
    told: float


Notice = Removal | Condemned | Learning


def pack(notice: Notice) -> bytes:
    """The notice as JSON."""
    if isinstance(notice, Removal):
        return json.dumps({"removal": asdict(notice.which), "asked": notice.asked}).encode()
    if isinstance(notice, Learning):
        learnt = {category: to_plain(news) for category, news in notice.news.items()}
        learning = {"scale": notice.scale, "told": notice.told, "news": learnt}
        return json.dumps({"learning": learning}).encode()
    vector = None if notice.vector is None else base64.b64encode(notice.vector.tobytes()).decode()
    told = {"partition": notice.partition, "exact": notice.exact, "vector": vector}
    return json.dumps({"condemned": told}).encode()


def unpack(data: bytes) -> Notice | None:
    """The notice; None when it cannot be read, which is logged.

    A newer version may tell what we do not know.
    """
    try:
        told = json.loads(data)
        if "removal" in told:
            asked = told.get("asked")
            return Removal(EntryFilter(**told["removal"]), None if asked is None else float(asked))
        if "learning" in told:
            learning = told["learning"]
            learnt = {category: from_plain(news, len(BAND_FLOORS))
                      for category, news in learning["news"].items()}  # fmt: skip
            return Learning(str(learning["scale"]), learnt, float(learning["told"]))
        fields = told["condemned"]
        vector = fields["vector"]
        return Condemned(
            fields["partition"],
            fields["exact"],
            None if vector is None else np.frombuffer(base64.b64decode(vector), dtype=np.float32),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        logger.warning("another process told what cannot be read: %r", exc)
        return None
