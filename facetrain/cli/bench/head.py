"""`facetrain bench head`: steps of the head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from facetrain.cli.bench.options import Json, Variants, require_known
from facetrain.cli.devices import Device, resolve_device
from facetrain.errors import UsageError

_MOST_IDENTITIES = 10_000_000_000
"""More than all people: larger numbers are mistakes, and overflow in sizes of tensors."""


def head(
    identities: Annotated[
        float, typer.Option(min=1, help="Number of class centers; 1e6 needs 14 GB of memory.")
    ] = 1e6,
    variants: Variants = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Embeddings per step.")] = 256,
    embedding_size: Annotated[int, typer.Option(min=1, help="Numbers per embedding.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each variant; the median counts.")] = 5,
    device: Device = "auto",
    disk: Annotated[
        Path | None,
        typer.Option(
            help="Folder on the disk to measure, for centers on disk; by default that for temporary files."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare full steps of the head with plain PyTorch implementations of the same algorithm.

    Without --variant, all variants are measured except fp16 and a sample rate of 1 %.
    """
    from facetrain.bench.head import DEFAULT_VARIANTS, VARIANTS, measure_head_steps, with_ratios

    require_known("--variant", variants or (), VARIANTS)
    if not identities.is_integer() or identities > _MOST_IDENTITIES:
        raise UsageError(
            f"--identities {identities:.10g}: use a whole number of at most {_MOST_IDENTITIES:,}"
        )
    reports = []
    for report in measure_head_steps(
        variants or DEFAULT_VARIANTS,
        int(identities),
        embedding_size=embedding_size,
        batch_size=batch_size,
        steps=steps,
        device=resolve_device(device),
        disk=disk,
    ):
        reports.append(report)
        if not as_json:
            typer.echo(
                f"{report['variant']:24}{report['step_s']:10.3f} s{report['peak_bytes'] / 1e9:8.2f} GB"
            )
    reports = with_ratios(reports)
    typer.echo(json.dumps(reports, indent=1) if as_json else _format_ratios(reports))


def _format_ratios(reports: list[dict[str, Any]]) -> str:
    prefix = "times_faster_than_"
    lines = [
        f"{report['variant']} is {value:.1f} x as fast as {key.removeprefix(prefix)}"
        for report in reports
        for key, value in report.items()
        if key.startswith(prefix) and not report["variant"].startswith("plain")
    ]
    return "\n".join(lines)
