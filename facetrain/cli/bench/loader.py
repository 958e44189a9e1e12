"""`facetrain bench loader`: reading a dataset."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from facetrain.cli.bench.options import Data, Json, Rounds
from facetrain.cli.devices import Device, resolve_device
from facetrain.cpu_cores import usable_cores


def loader(
    data: Data = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Worker processes of each loader; by default the number of usable cores."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=2, help="Images per batch.")] = 128,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Duration of each variant in each round, in seconds.")
    ] = 3.0,
    rounds: Rounds = 3,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Compare the loader with the JPEG decoder alone and with torch's DataLoader with OpenCV and with PIL."""
    import torch

    from facetrain.bench.loader import measure_loader

    report = measure_loader(
        data,
        workers=workers or usable_cores(),
        batch_size=batch_size,
        seconds=seconds,
        rounds=rounds,
        device=torch.device(resolve_device(device)),
    )
    if as_json:
        typer.echo(json.dumps(report, indent=1))
        return
    typer.echo(f"{report['workers']} workers, {report['device']}: images per second")
    for name, label in (
        ("decoder", "JPEG decoder alone"),
        ("loader", "loader"),
        ("loader_augmented", "loader, flipped and normalized"),
        ("dataloader_cv2", "torch DataLoader with OpenCV"),
        ("dataloader_pil", "torch DataLoader with PIL"),
    ):
        typer.echo(f"  {label:32}{report[name]:10,.0f}")
    typer.echo(
        f"flipped and normalized: {report['augmented_per_decoder']:.0%} of the JPEG decoder alone, "
        f"{report['augmented_per_dataloader_cv2']:.2f} x the DataLoader with OpenCV, "
        f"{report['augmented_per_dataloader_pil']:.2f} x the DataLoader with PIL"
    )
