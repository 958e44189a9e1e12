"""Page of a GPU session: a table for each group of jobs, with expected and measured numbers and their ratio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_session.jobs import GROUPS, Job


def write_page(state: dict[str, Any], jobs: Sequence[Job]) -> str:
    """Return the Markdown of a session's state. Jobs that have not run are counted at the top."""
    records = state["jobs"]
    done = [job for job in jobs if records.get(job.name, {}).get("status") == "done"]
    lines = ["# Measurements on a GPU", "", f"{len(done)} of {len(jobs)} jobs have results."]
    if machine := state.get("machine"):
        lines += ["", *(f"- {name}: {value}" for name, value in machine.items())]
    lines += ["", "Ratio: measured divided by expected. Expected: the forecast of `facetrain plan`."]
    for group, title in GROUPS.items():
        rows = [
            row
            for job in jobs
            if job.group == group
            for row in records.get(job.name, {}).get("result", {}).get("rows", [])
        ]
        if rows:
            lines += ["", f"## {title}", "", *_table(rows)]
    failed = [job for job in jobs if records.get(job.name, {}).get("status") in ("failed", "timed out")]
    if failed:
        lines += ["", "## Jobs without a result", ""]
        for job in failed:
            lines += [
                f"- {job.name}: {records[job.name]['status']}",
                "",
                *(f"      {line}" for line in records[job.name]["error"]),
                "",
            ]
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| what | quantity | expected | measured | ratio |", "|---|---|---|---|---|"]
    for row in rows:
        expected, measured = row.get("expected"), row.get("measured")
        ratio = (
            f"{measured / expected:.2f}" if _is_number(measured) and _is_number(expected) and expected else ""
        )
        cells = (row["what"], row["quantity"], _formatted(expected), _formatted(measured), ratio)
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return lines


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _formatted(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}" if _is_number(value) else str(value)
