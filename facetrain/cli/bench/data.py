"""`facetrain bench loader`, `formats`, `index` and `shuffle`: reading a dataset."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from facetrain.cli.bench.options import Data, Json, Rounds, print_report
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
    ).as_json()
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


def index(
    images: Annotated[int, typer.Option(min=1, help="Images of the generated dataset.")] = 42_474_557,
    identities: Annotated[int, typer.Option(min=1, help="Identities of the generated dataset.")] = 2_059_906,
    as_json: Json = False,
) -> None:
    """Measure time and memory to open a dataset, without and with the cached index.

    The defaults are the sizes of WebFace42M, which take 1.8 GB of disk while the command runs.
    """
    from facetrain.bench.dataset import measure_dataset_index

    print_report(measure_dataset_index(images=images, identities=identities), as_json=as_json)


def shuffle(
    images: Annotated[int, typer.Option(min=1, help="Images, sorted by identity.")] = 5_179_510,
    images_per_identity: Annotated[int, typer.Option(min=1, help="Images of each identity.")] = 55,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per global batch.")] = 1024,
    steps: Annotated[int, typer.Option(min=1, help="Batches over which the statistics are averaged.")] = 200,
    as_json: Json = False,
) -> None:
    """Compare how well `data.shuffle: blocks` and `full` mix identities. The defaults are MS1MV3's sizes."""
    from facetrain.bench.dataset import measure_shuffle

    report = measure_shuffle(
        images=images, images_per_identity=images_per_identity, batch_size=batch_size, steps=steps
    )
    print_report(report, as_json=as_json)


def formats(
    data: Data = None,
    images: Annotated[int, typer.Option(min=2, help="Number of images, written in each format.")] = 4096,
    rounds: Rounds = 5,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Compare the formats of datasets: reading, decoding and batching in one thread, beside the JPEG decoder alone.

    Prints the CPU time per image, and the rate as a share of the decoder's.
    """
    import torch

    from facetrain.bench.formats import measure_formats

    report = measure_formats(data, images=images, rounds=rounds, device=torch.device(resolve_device(device)))
    print_report(report, as_json=as_json)
