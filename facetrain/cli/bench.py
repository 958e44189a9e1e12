"""`facetrain bench`: what this machine can do, as ratios in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from facetrain.cli import bench_backbone, bench_train
from facetrain.cli.devices import Device, resolve_device
from facetrain.cpu_cores import usable_cores

app = typer.Typer(no_args_is_help=True, help="Measure parts of a run on this machine.")
app.command("train")(bench_train.train)
app.command("backbone")(bench_backbone.backbone)

_Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]


@app.command("loader")
def loader(
    data: Annotated[
        Path | None, typer.Option(help="A dataset; generated images of about 8 kB if left out.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Reader processes; by default, the cores.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=2, help="Images per batch.")] = 128,
    seconds: Annotated[float, typer.Option(min=0.1, help="For each way and round.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of which the medians are taken.")] = 3,
    device: Device = "auto",
    as_json: _Json = False,
) -> None:
    """Measure the loader beside the bare JPEG decoder and beside a DataLoader with PIL, on the same cores."""
    import torch

    from facetrain.bench.loader import measure_loader

    report = measure_loader(
        data,
        workers=workers or usable_cores(),
        batch_size=batch_size,
        seconds=seconds,
        rounds=rounds,
        device=torch.device(resolve_device(device)),
    ).as_json()
    if as_json:
        typer.echo(json.dumps(report, indent=1))
        return
    typer.echo(f"{report['workers']} workers, {report['device']}: images per second")
    for name in ("bare_decoder", "loader", "augmented", "usual_way"):
        typer.echo(f"  {name.replace('_', ' '):14}{report[name]:10,.0f}")
    typer.echo(
        f"with flip and normalization: {report['augmented_per_bare']:.0%} of the bare decoder, "
        f"{report['augmented_per_usual']:.1f} x the usual way"
    )


@app.command("head")
def head(
    identities: Annotated[float, typer.Option(min=1, help="Class centers; 1e6 needs 14 GB.")] = 1e6,
    ways: Annotated[
        list[str] | None,
        typer.Option("--way", help="One to measure; may be given again. All usual ones if left out."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Embeddings of a step.")] = 256,
    embedding_size: Annotated[int, typer.Option(min=1, help="Their length.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Of which the median is taken.")] = 5,
    device: Device = "auto",
    disk: Annotated[
        Path | None, typer.Option(help="Folder on the disk to measure, for centers on disk.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Measure full steps of the head beside a plain PyTorch implementation of the same algorithm."""
    from facetrain.bench.head import USUAL, WAYS, measure_ways, with_ratios
    from facetrain.errors import UsageError

    for way in ways or ():
        if way not in WAYS:
            raise UsageError(f"--way {way}: there are {', '.join(WAYS)}")
    reports = []
    for report in measure_ways(
        ways or USUAL,
        int(identities),
        embedding_size=embedding_size,
        batch_size=batch_size,
        steps=steps,
        device=resolve_device(device),
        disk=disk,
    ):
        reports.append(report)
        if not as_json:
            typer.echo(f"{report['way']:24}{report['step_s']:10.3f} s{report['peak_bytes'] / 1e9:8.2f} GB")
    reports = with_ratios(reports)
    typer.echo(json.dumps(reports, indent=1) if as_json else _ratios(reports))


def _ratios(reports: list[dict[str, Any]]) -> str:
    prefix = "times_faster_than_"
    lines = [
        f"{report['way']} is {value:.1f} x as fast as {key.removeprefix(prefix)}"
        for report in reports
        for key, value in report.items()
        if key.startswith(prefix) and not report["way"].startswith("plain")
    ]
    return "\n".join(lines)
