"""Bounds and thresholds of the prompt cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PolicyName = Literal["windowed", "lru-k", "s3-fifo", "lru"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Bounds and thresholds; None stands for no bound.

    Attributes:
        max_bytes: of the warm tier; `cold_max_bytes` of the cold one, 0 for none.
        tenant_max_bytes: of one tenant, in each tier; `tenant_max_entries` likewise.
        ttl_s: longest stay in the warm tier since an answer was stored, or came back from
            the cold one.
        cold_ttl_s: life of an answer in all, with a cold tier.
        policy: who leaves the warm tier when space is short.
        miss_rate_per_s: new answers of one tenant, with bursts up to `miss_burst`.
        promote_window_s: two hits within it let an answer go to the hot tier.
        quarantine_s: how long the neighbourhood of a wrong answer, as near as
            `quarantine_similarity`, is left out.

    Raises:
        ValueError: a value is out of range.
    """

    max_bytes: int = 256 * 2**20
    max_entry_bytes: int = 2**20
    tenant_max_bytes: int | None = None
    tenant_max_entries: int | None = None
    ttl_s: float = 900.0
    cold_max_bytes: int = 0
    cold_ttl_s: float = 3600.0
    semantic_threshold: float = 0.95
    num_candidates: int = 4
    policy: PolicyName = "windowed"
    lru_k: int = 2
    ghosts: float = 4.0
    max_alias_bytes: int = 8 * 2**20
    miss_rate_per_s: float | None = None
    miss_burst: int = 1000
    promote_window_s: float = 90.0
    quarantine_s: float = 3600.0
    quarantine_similarity: float = 0.97

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_entry_bytes", "num_candidates", "lru_k", "miss_burst"):
            _check_least(name, getattr(self, name), 1)
        for name in ("tenant_max_bytes", "tenant_max_entries"):
            if getattr(self, name) is not None:
                _check_least(name, getattr(self, name), 1)
        for name in ("cold_max_bytes", "max_alias_bytes"):
            _check_least(name, getattr(self, name), 0)
        for name in ("ttl_s", "cold_ttl_s", "promote_window_s", "quarantine_s"):
            _check_positive(name, getattr(self, name))
        if self.miss_rate_per_s is not None:
            _check_positive("miss_rate_per_s", self.miss_rate_per_s)
        for name in ("semantic_threshold", "quarantine_similarity"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, not in (0, 1]")
        if not 0 <= self.ghosts < float("inf"):
            raise ValueError(f"ghosts is {self.ghosts}, it must be finite and at least 0")

    @property
    def life_s(self) -> float:
        """How old an answer may become in any tier."""
        return max(self.ttl_s, self.cold_ttl_s) if self.cold_max_bytes else self.ttl_s


def _check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}, the least is {least}")


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is {value}, it must be positive and finite")
