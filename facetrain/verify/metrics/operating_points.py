"""Operating points: the false non-match rate at fixed false match rates, by which a lab chooses a model.

The rates of 1:1 are FNMR and FMR, the rates of open-set 1:N are FNIR and FPIR (ISO/IEC 19795-1; NIST's FRTE reports).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

FMRS = (1e-3, 1e-4, 1e-5, 1e-6)
"""False match rates of the headline table."""
RULE_OF_3, RULE_OF_30 = 3, 30
"""Without an error in N independent comparisons, a rate is below 3 / N with 95 % confidence (rule of 3). With 30
errors, it is known to ± 30 % with 90 % confidence (Doddington's rule of 30). See ISO/IEC 19795-1:2006, annex B."""


@dataclass(frozen=True)
class OperatingPoint:
    """Share of genuine pairs, or mated probes, that are missed at a limit on the false positives."""

    name: str
    """`fnmr@1e-04`, or `fnir@1e-01` for 1:N."""
    limit: float
    """Largest FMR or FPIR."""
    rate: float | None
    """FNMR or FNIR; None if the set is too small for the limit by the rule of 3."""
    interval: tuple[float, float] | None
    threshold: float | None
    """Score from which pairs are accepted."""
    remark: str
    """Reason for a missing rate, or a warning that the rule of 30 gives; usually empty."""


def match_points(
    metrics: Mapping[str, float | None],
    intervals: Mapping[str, tuple[float, float]],
    thresholds: Mapping[str, float],
    impostors: int,
) -> list[OperatingPoint]:
    """Return the FNMR at each of `FMRS`, from the metrics `tar@…` of a set with so many impostor pairs."""
    return [
        replace(
            _point("fnmr", fmr, metrics.get(name), intervals.get(name), impostors, "impostor pairs"),
            threshold=thresholds.get(f"{fmr:.0e}"),
        )
        for fmr, name in ((fmr, f"tar@{fmr:.0e}") for fmr in FMRS)
    ]


def search_points(
    metrics: Mapping[str, float | None], intervals: Mapping[str, tuple[float, float]], nonmated: int
) -> list[OperatingPoint]:
    """Return the FNIR at each FPIR of the metrics `tpir@…` of a search with so many probes without a mate."""
    kind = "probes without a mate"
    return [
        _point("fnir", float(name.removeprefix("tpir@")), rate, intervals.get(name), nonmated, kind)
        for name, rate in metrics.items()
        if name.startswith("tpir@")
    ]


def _point(
    missed: str,
    limit: float,
    found: float | None,
    interval: tuple[float, float] | None,
    available: int,
    kind: str,
) -> OperatingPoint:
    name = f"{missed}@{limit:.0e}"
    # A small tolerance for the product of two floats: 3,000 pairs are enough for 1e-3.
    if found is None or available * limit < RULE_OF_3 - 1e-9:
        remark = f"needs {round(RULE_OF_3 / limit):,} {kind} (rule of 3); there are {available:,}"
        return OperatingPoint(name, limit, None, None, None, remark)
    remark = ""
    if available * limit < RULE_OF_30 - 1e-9:
        remark = f"rests on {round(available * limit)} false positives, fewer than 30 (rule of 30)"
    ends = None if interval is None else (1 - interval[1], 1 - interval[0])
    return OperatingPoint(name, limit, 1 - found, ends, None, remark)
