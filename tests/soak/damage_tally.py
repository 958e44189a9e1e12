"""Counts of random damages of run folders, and their table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """Counts of all damages."""

    by_kind: Counter[str] = field(default_factory=Counter)
    by_target: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    """Damages that at least one reader refused."""
    resumes: Counter[str] = field(default_factory=Counter)
    """Ends of the resumed runs."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Messages of the resumes that refused a run, without names and numbers."""
    faults: Counter[str] = field(default_factory=Counter)
    first_faults: list[str] = field(default_factory=list)

    def add(self, other: dict[str, Any]) -> None:
        """Add the counts of another tally, as a dict."""
        for name, value in other.items():
            if isinstance(value, dict):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def add_fault(self, name: str, details: str) -> None:
        """Count a fault, and keep the details of the first one of its name."""
        if name not in self.faults:
            self.first_faults.append(f"{name}\n{details}")
        self.faults[name] += 1


def table(tally: Tally, seconds: float) -> str:
    """Format the counts as Markdown."""
    lines = [
        f"{sum(tally.by_kind.values()):,} damages in {seconds:,.0f} s; {tally.refused:,} refused by at least one "
        f"reader; {sum(tally.resumes.values()):,} resumed; {sum(tally.faults.values()):,} faults"
    ]
    for title, counts in (
        ("damage", tally.by_kind),
        ("target", tally.by_target),
        ("end of a resumed run", tally.resumes),
        ("message of a resume that refused", tally.refusals),
    ):
        lines += ["", f"| {title} | number |", "|---|---|"]
        lines += [f"| {name} | {n:,} |" for name, n in sorted(counts.items())]
    lines += [f"fault ({tally.faults[text.splitlines()[0]]} times): {text}" for text in tally.first_faults]
    return "\n".join(lines)
