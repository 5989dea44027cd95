"""What each tenant holds in a tier: nobody can fill it alone where that is bounded."""

from __future__ import annotations

from collections import OrderedDict


class TenantLedger:
    """Keys and sizes by tenant, each tenant's in the order of their last use."""

    def __init__(self, max_bytes: int | None, max_entries: int | None) -> None:
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._keys: dict[str, OrderedDict[str, int]] = {}
        self._bytes: dict[str, int] = {}

    def add(self, tenant: str, key: str, size: int) -> None:
        self._keys.setdefault(tenant, OrderedDict())[key] = size
        self._bytes[tenant] = self._bytes.get(tenant, 0) + size

    def use(self, tenant: str, key: str) -> None:
        self._keys[tenant].move_to_end(key)

    def remove(self, tenant: str, key: str) -> None:
        """Forgets `key`; KeyError when the tenant does not hold it."""
        keys = self._keys[tenant]
        self._bytes[tenant] -= keys.pop(key)
        if not keys:
            del self._keys[tenant], self._bytes[tenant]

    def must_leave(self, tenant: str, size: int) -> str | None:
        """The tenant's least recently used key, if `size` more bytes would exceed its bounds."""
        keys = self._keys.get(tenant)
        if not keys:
            return None
        is_full = self._max_entries is not None and len(keys) >= self._max_entries
        is_large = self._max_bytes is not None and self._bytes[tenant] + size > self._max_bytes
        return next(iter(keys)) if is_full or is_large else None

    def held(self) -> dict[str, tuple[int, int]]:
        """Entries and bytes by tenant."""
        return {tenant: (len(keys), self._bytes[tenant]) for tenant, keys in self._keys.items()}
