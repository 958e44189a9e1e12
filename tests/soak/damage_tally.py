"""Counts of random damages of run folders, and their table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_TITLES = ("damage", "target", "end of a resumed run", "message of a resume that refused")
DAMAGE, TARGET, RESUME, REFUSAL = _TITLES


@dataclass
class Tally:
    """Counts of all damages."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Title of a table and name of its row -> number."""
    refused: int = 0
    """Damages that at least one reader refused."""
    faults: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)
    """Details of the first fault of each name."""

    def add(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.counts += other.counts
        self.faults += other.faults
        self.refused += other.refused
        self.details |= other.details

    def add_fault(self, name: str, details: str) -> None:
        """Count a fault, and keep the details of the first one of its name."""
        self.faults[name] += 1
        self.details.setdefault(name, details)


def table(tally: Tally, seconds: float) -> str:
    """Format the counts as Markdown."""
    total = {title: sum(n for (of, _), n in tally.counts.items() if of == title) for title in _TITLES}
    lines = [
        f"{total[DAMAGE]:,} damages in {seconds:,.0f} s; {tally.refused:,} refused by at least one reader; "
        f"{total[RESUME]:,} resumed; {tally.faults.total():,} faults"
    ]
    for title in _TITLES:
        lines += ["", f"| {title} | number |", "|---|---|"]
        lines += [f"| {name} | {n:,} |" for (of, name), n in sorted(tally.counts.items()) if of == title]
    lines += [f"fault ({n} times): {name}\n{tally.details[name]}" for name, n in tally.faults.items()]
    return "\n".join(lines)
