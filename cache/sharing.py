"""What processes that share a store tell each other, beside its records."""

from __future__ import annotations

import base64
import json
import logging
from dataclasses import asdict, dataclass

import numpy as np

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


def pack(notice: Removal | Condemned) -> bytes:
    """The notice as JSON."""
    if isinstance(notice, Removal):
        return json.dumps({"removal": asdict(notice.which), "asked": notice.asked}).encode()
    vector = None if notice.vector is None else base64.b64encode(notice.vector.tobytes()).decode()
    told = {"partition": notice.partition, "exact": notice.exact, "vector": vector}
    return json.dumps({"condemned": told}).encode()


def unpack(data: bytes) -> Removal | Condemned | None:
    """The notice; None when it cannot be read, which is logged.

    A newer version may tell what we do not know.
    """
    try:
        told = json.loads(data)
        if "removal" in told:
            asked = told.get("asked")
            return Removal(EntryFilter(**told["removal"]), None if asked is None else float(asked))
        fields = told["condemned"]
        vector = fields["vector"]
        return Condemned(
            fields["partition"],
            fields["exact"],
            None if vector is None else np.frombuffer(base64.b64decode(vector), dtype=np.float32),
        )
    except (ValueError, KeyError, TypeError) as exc:
        logger.warning("another process told what cannot be read: %r", exc)
        return None
