"""Lines of text that report the progress of a run, for the terminal and for log.txt."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

_SHOWN_TAR = "tar@1e-03"
"""True accept rate that a line shows. LFW's 3,000 impostor pairs measure a FAR of 1 in 1,000 from three pairs, and a
stricter one from a single pair or none."""


def progress_line(step: int, total_steps: int, values: dict[str, Any]) -> str:
    """Return the line of a report of the training metrics."""
    left = timedelta(seconds=round(values.get("left_s", 0)))
    fields = [
        f"step {step}/{total_steps}",
        f"loss {values['loss']:.4f}",
        f"lr {values['lr']:.5f}",
        f"{values['images_per_s']:,.0f} images/s",
        f"{left} left",
        f"peak memory {values['peak_memory_gib']:.2f} GiB",
    ]
    return "  ".join(fields)


def verification_lines(step: int, values: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each verification set that the values have metrics of."""
    for name in values:
        if name.endswith("/accuracy"):
            yield _verification_line(step, name.removesuffix("/accuracy"), values)


def _verification_line(step: int, name: str, values: dict[str, Any]) -> str:
    # With the accuracy alone, a network that is better than chance but not yet by much looks untrained.
    fields = [f"accuracy {values[f'{name}/accuracy']:.2%}"]
    if (auc := values.get(f"{name}/auc")) is not None:
        fields.append(f"AUC {auc:.4f}")
    if (tar := values.get(f"{name}/{_SHOWN_TAR}")) is not None:
        fields.append(f"{_SHOWN_TAR.upper()} {tar:.2%}")
    return f"step {step}: verification of {name}  {'  '.join(fields)}"
