"""What became of every stream under every class of fault: the table that a run prints at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.chaos.swarm import Stream


@dataclass(frozen=True)
class Row:
    """One class of fault.

    Args:
        lost: ended without the whole answer, or with a wrong one.
        silent: had no end at all.
        worst_recovery_s: longest wait for the next piece of text, from a fault on, of any
            stream that ran then; None where nothing waited.
        notes: figures of this class alone.
    """

    fault: str
    faults: int
    streams: int
    identical: int
    lost: int
    silent: int
    refusals: int
    bare_closes: int
    worst_recovery_s: float | None
    notes: str = ""
    reasons: tuple[str, ...] = ()


def make_row(
    fault: str,
    fault_at_s: Sequence[float],
    streams: Sequence[Stream],
    *,
    bare_closes: int = 0,
    notes: str = "",
) -> Row:
    """Sums up; streams that their client left on purpose do not count."""
    kept = [stream for stream in streams if stream.outcome != "left"]
    outcomes = Counter(stream.outcome for stream in kept)
    silences = [
        silence_s
        for at_s in fault_at_s
        for stream in kept
        if (silence_s := stream.silence_after_s(at_s)) is not None
    ]
    reasons = Counter(
        stream.why or stream.outcome for stream in kept if stream.outcome != "identical"
    )
    return Row(
        fault=fault,
        faults=len(fault_at_s),
        streams=len(kept),
        identical=outcomes["identical"],
        lost=outcomes["different"] + outcomes["failed"] + outcomes["refused"],
        silent=outcomes["silent"] + outcomes["running"],
        refusals=sum(len(stream.refusals) for stream in kept),
        bare_closes=bare_closes,
        worst_recovery_s=max(silences, default=None),
        notes=notes,
        reasons=tuple(f"{count} × {why}" for why, count in reasons.most_common(3)),
    )


@dataclass
class Ledger:
    """The rows of a run."""

    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        return row

    def table(self) -> str:
        """Markdown; why streams were lost stands below it."""
        names = (
            "fault", "faults", "streams", "identical", "lost", "silent",
            "told to retry", "closed 1006", "worst recovery s", "notes",
        )  # fmt: skip
        lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
        for row in self.rows:
            recovery = "" if row.worst_recovery_s is None else f"{row.worst_recovery_s:.2f}"
            cells = (
                row.fault, row.faults, row.streams, row.identical, row.lost, row.silent,
                row.refusals, row.bare_closes, recovery, row.notes,
            )  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        for row in self.rows:
            lines += [f"{row.fault}: {reason}" for reason in row.reasons]
        return "\n".join(lines)
