"""What a look-up says: an answer that may be given, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cache.answer import StoredAnswer
from cache.decision import Verdict
from cache.key import PromptKey
from cache.stats import Tier


@dataclass(frozen=True, slots=True)
class Hit:
    """A stored answer that the request may be given; `similarity` is 1.0 when exact.

    Attributes:
        id: of the entry, for feedback and deletion.
        promote: it was asked often enough lately to be worth holding nearer to the client.
        verdict: of the decision on the semantic path; tells whether a check is due.
    """

    answer: StoredAnswer
    outcome: Literal["exact", "semantic"]
    tier: Tier
    similarity: float
    age_s: float
    id: str = field(default="", compare=False)
    promote: bool = field(default=False, compare=False)
    verdict: Verdict | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing may be given; `similarity` and `reason` tell of the best candidate.

    The reason may quote the words in which two prompts of one partition differ. `candidate`
    is the answer that `verdict` would have chosen, where that is to be checked. `underway` is a
    question that is being answered, and whose answer the request may be given when it has come.
    """

    similarity: float | None
    reason: str
    verdict: Verdict | None = field(default=None, compare=False)
    candidate: StoredAnswer | None = field(default=None, compare=False)
    id: str = field(default="", compare=False)
    underway: PromptKey | None = field(default=None, compare=False)
