"""Operating points: the false non-match rate at fixed false match rates, by which a lab chooses a model.

The rates of 1:1 are FNMR and FMR, the rates of open-set 1:N are FNIR and FPIR (ISO/IEC 19795-1; NIST's FRTE reports).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FMRS = (1e-3, 1e-4, 1e-5, 1e-6)
"""False match rates of the headline table."""
FPIRS = (1e-1, 1e-2)
"""False positive identification rates at which TPIR is reported; IJB-B and IJB-C report these two."""
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


def operating_points(
    protocol: str,
    metrics: Mapping[str, float | None],
    intervals: Mapping[str, tuple[float, float]],
    thresholds: Mapping[str, float],
    available: int,
) -> list[OperatingPoint]:
    """Return the FNMR at each of `FMRS`, or the FNIR at each of `FPIRS` for the protocol `identification`.

    Args:
        protocol: protocol of the result.
        metrics: true rates by name, `tar@…` or `tpir@…`.
        intervals: their intervals.
        thresholds: scores by the limit.
        available: number of impostor pairs, or of probes without a mate.
    """
    if protocol == "identification":
        missed, found, kind = "fnir", "tpir", "probes without a mate"
    else:
        missed, found, kind = "fnmr", "tar", "impostor pairs"
    points = []
    for limit in FPIRS if protocol == "identification" else FMRS:
        name, at = f"{found}@{limit:.0e}", f"{missed}@{limit:.0e}"
        rate, interval = metrics.get(name), intervals.get(name)
        # A small tolerance for the product of two floats: 3,000 pairs are enough for 1e-3.
        if rate is None or available * limit < RULE_OF_3 - 1e-9:
            remark = f"needs {round(RULE_OF_3 / limit):,} {kind} (rule of 3); there are {available:,}"
            points.append(OperatingPoint(at, limit, None, None, thresholds.get(f"{limit:.0e}"), remark))
            continue
        remark = ""
        if available * limit < RULE_OF_30 - 1e-9:
            remark = f"rests on {round(available * limit)} false positives, fewer than 30 (rule of 30)"
        ends = None if interval is None else (1 - interval[1], 1 - interval[0])
        points.append(OperatingPoint(at, limit, 1 - rate, ends, thresholds.get(f"{limit:.0e}"), remark))
    return points
