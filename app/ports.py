"""The two ports through which a graph speaks to the deployments.

Serve handles implement them in `ingress.py`, fakes in tests.
"""

from __future__ import annotations

from typing import Any, Protocol

from app.generation import SubmitPort
from app.model_bus import BusPort
from deployments import wire


class ModelPort(BusPort, SubmitPort, Protocol):
    async def warm(self, payload: bytes, route: wire.Route) -> None:
        """Has a replica compute what is known of a packed `InferenceRequest`, and waits for it."""
        ...

    async def tokenize(self, payload: bytes) -> bytes:
        """Packed `TokenizeCall` in, packed `TokenizeReply` out."""
        ...

    async def find(self, name: str, replica: str) -> bytes:
        """A packed `Found`, or nothing when that replica has no such stream."""
        ...

    async def attach(self, name: str, ingress: str, replica: str) -> bytes:
        """A packed `Attached`, or nothing when that replica has no such stream."""
        ...

    async def info(self) -> bytes: ...

    async def stats(self) -> list[dict[str, Any]]:
        """One mapping a replica."""
        ...


class CachePort(Protocol):
    async def lookup(self, payload: bytes) -> bytes: ...

    async def store(self, payload: bytes) -> None: ...

    async def embed(self, payload: bytes) -> bytes:
        """Packed `EmbedCall` in, packed `EmbedReply` out."""
        ...

    async def check(self, payload: bytes) -> bytes:
        """Packed `CheckCall` in, packed `CheckReply` out."""
        ...

    async def manage(self, payload: bytes) -> list[bytes]:
        """Packed `ManageCall` in, the JSON of each replica out."""
        ...

    async def epochs(self) -> list[str]:
        """What each replica says its epoch is."""
        ...

    async def stats(self) -> list[dict[str, Any]]:
        """One mapping a replica."""
        ...
