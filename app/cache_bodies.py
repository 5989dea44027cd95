"""What goes in and out of the routes under `/v1/cache`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.accounts import DEFAULT_TENANT
from app.settings import TenantName
from deployments import wire

MAX_LISTED = 1000


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Which(Body):
    """Which stored answers are meant: those that fulfil all that is given."""

    id: str | None = Field(default=None, pattern=r"^[0-9a-f]{16}$")
    """As told in `x-seedance-cache-id`, or in `INFER_ACK`."""
    prompt: str | None = None
    """The last user turn, whole."""
    tenant: str | None = None
    model: str | None = None
    """Id or revision."""
    tag: str | None = None
    older_than_s: float | None = Field(default=None, ge=0)
    younger_than_s: float | None = Field(default=None, ge=0)

    @property
    def query(self) -> wire.EntryQuery:
        names = wire.EntryQuery.__struct_fields__
        return wire.EntryQuery(**{name: getattr(self, name) for name in names})


class Listing(Which):
    """What to list, and how much of it."""

    limit: int = Field(default=100, ge=1, le=MAX_LISTED)
    """The newest first."""


class Deletion(Which):
    """What to delete. Without any condition `all` has to be true."""

    all: bool = False

    @model_validator(mode="after")
    def _is_meant(self) -> Deletion:
        if not self.all and self.query == wire.EntryQuery():
            raise ValueError("give a condition, or all=true to delete everything")
        return self


class ExplainBody(Body):
    """A question: a prompt, or the body of a chat completion, since all of that counts."""

    tenant: TenantName = DEFAULT_TENANT
    """Whose answers are looked at."""
    prompt: str | None = None
    """A chat of one turn, greedy."""
    chat: dict[str, Any] | None = None
    """The body as sent to `/v1/chat/completions`."""

    @model_validator(mode="after")
    def _is_one(self) -> ExplainBody:
        if (self.prompt is None) == (self.chat is None):
            raise ValueError("give either prompt or chat")
        return self


class FeedbackBody(Body):
    """Whether the answer of a stored entry was right."""

    id: str = Field(pattern=r"^[0-9a-f]{16}$")
    """As told in `x-seedance-cache-id`, or in `INFER_ACK`."""
    was_right: bool


class Candidate(BaseModel):
    """A stored question near the asked one."""

    id: str
    tier: str
    text: str
    similarity: float | None
    """Cosine; null for the equal question."""
    refusal: str | None
    """Why it is not the same wording; null: it may be given."""
    veto: str | None
    """What the guards hold against its being the same in other words."""
    score: float | None
    """The verifier's, where no veto stands against it."""
    age_s: float
    action: Literal["serve", "shadow", "refuse"]
    """What the live decision would do with it alone: give it, only compare it, or neither."""
    reason: str
    """Why."""


class Decision(BaseModel):
    """What a look-up would do now with what is stored."""

    action: Literal["serve", "shadow", "refuse"]
    """Give the answer; give none, but compare it with the model's; neither."""
    by: Literal["exact", "alias", "meaning"]
    """The equal question, one known to mean the same, or the search by meaning."""
    reason: str
    id: str | None
    """Of the answer that would be given or compared."""
    similarity: float | None
    score: float | None
    check_rate: float
    """How likely it would be checked."""


class Entry(BaseModel):
    """A stored answer, without its text."""

    model_config = ConfigDict(protected_namespaces=())

    id: str
    tenant: str
    partition: str
    """Digest of all that is compared exactly."""
    text: str
    """The question, cut after 2,000 characters."""
    model: str
    model_revision: str
    tags: list[str]
    age_s: float
    hits: int
    payload_bytes: int | None
    """Null for one that the cold tier alone holds."""
    tiers: list[str]


class ExplainReply(BaseModel):
    """Every candidate, with what speaks against it."""

    partition: str
    may_match_by_meaning: bool
    problem: str | None
    """Why only an equal question can hit."""
    decision: Decision
    """By guards, verifier and the error budget as it is now."""
    least_score: float | None
    """What the error budget lets be given now; null: nothing but the same wording."""
    credit: float | None
    """Mistakes that the tenant's error budget may still make; null: there is none."""
    candidates: list[Candidate]
    other_partitions: list[Entry]
    """Equal questions of the tenant that differ in something around them."""


class EntryList(BaseModel):
    """Entries, the newest first."""

    total: int
    entries: list[Entry]


class TenantUse(BaseModel):
    """What one tenant holds in one tier."""

    tenant: str
    tier: str
    entries: int
    bytes: int


class BudgetState(BaseModel):
    """What the error budget knows of one category, which is a tenant."""

    least_score: float | None
    """What is given now; null: the same wording only."""
    window: int
    """The latest checks, up to 2,000."""
    wrong: int
    bound: float
    """Upper bound of the rate of mistakes among these, at 95 %."""


class ReplicaStats(BaseModel):
    """One cache replica."""

    cache: dict[str, Any]
    tenants: list[TenantUse]
    budget: dict[str, BudgetState]


class StatsReply(BaseModel):
    """All cache replicas."""

    replicas: list[ReplicaStats]


class DeleteReply(BaseModel):
    deleted: int
    """Over all replicas."""


class FeedbackReply(BaseModel):
    noted: bool


class ImportReply(BaseModel):
    read: int
    kept: int
    """What was too old or too large, or older than what is held, is left out."""
