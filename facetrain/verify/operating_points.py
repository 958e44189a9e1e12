"""Operating points: the false non-match rate at fixed false match rates, by which a lab chooses a model.

The rates of 1:1 are FNMR and FMR, those of open-set 1:N are FNIR and FPIR (ISO/IEC 19795-1; NIST's FRTE reports).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from facetrain.verify.result import Interval, Result

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
    interval: Interval | None
    threshold: float | None
    """Score from which pairs are accepted."""
    remark: str
    """Reason for a missing rate, or a warning that the rule of 30 gives; usually empty."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


def operating_points(result: Result) -> list[OperatingPoint]:
    """Return the points of a result with a curve; none for other results."""
    if result.curve is None:
        return []
    if result.protocol == "identification":
        limits = [float(name.removeprefix("tpir@")) for name in result.metrics if name.startswith("tpir@")]
        return [_point(result, "fnir", "tpir", limit, "probes without a mate") for limit in limits]
    return [_point(result, "fnmr", "tar", fmr, "impostor pairs") for fmr in FMRS]


def _point(result: Result, missed: str, found: str, limit: float, kind: str) -> OperatingPoint:
    assert result.curve is not None, "only results with a curve have points"
    name, key, available = f"{missed}@{limit:.0e}", f"{found}@{limit:.0e}", result.curve.impostors
    rate, interval = result.metrics.get(key), result.interval.get(key)
    # A small tolerance for the product of two floats: 3,000 pairs are enough for 1e-3.
    if rate is None or available * limit < RULE_OF_3 - 1e-9:
        needed = round(RULE_OF_3 / limit)
        remark = f"needs {needed:,} {kind} (rule of 3); there are {available:,}"
        return OperatingPoint(name, limit, None, None, None, remark)
    remark = ""
    if available * limit < RULE_OF_30 - 1e-9:
        remark = f"rests on {round(available * limit)} false positives, fewer than 30 (rule of 30)"
    return OperatingPoint(
        name,
        limit,
        1 - rate,
        None if interval is None else (1 - interval[1], 1 - interval[0]),
        result.threshold.get(f"{limit:.0e}") if missed == "fnmr" else None,
        remark,
    )
