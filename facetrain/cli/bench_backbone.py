"""`facetrain bench backbone`: a network's step, from plain float32 to ours."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from facetrain.cli.devices import Device, resolve_device
from facetrain.cpu_cores import usable_cores


def backbone(
    name: Annotated[str, typer.Option("--backbone", help="r18, r50, r100, mbf, …")] = "r18",
    ways: Annotated[
        list[str] | None,
        typer.Option("--way", help="One to measure; may be given again. All if left out."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=2, help="Images of a step.")] = 32,
    image_size: Annotated[int, typer.Option(min=16, help="Their sides.")] = 112,
    steps: Annotated[int, typer.Option(min=1, help="Of a round.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Of which the medians are taken.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="On the CPU; by default, the cores.")] = None,
    device: Device = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")
    ] = False,
) -> None:
    """Measure a backbone's training steps in float32 as PyTorch has them, in bf16, channels_last, and compiled."""
    from facetrain.backbone.zoo import names
    from facetrain.bench.backbone import WAYS, Subject, measure_backbones
    from facetrain.errors import UsageError

    for way in ways or ():
        if way not in WAYS:
            raise UsageError(f"--way {way}: there are {', '.join(WAYS)}")
    if name not in names() or name == "iresnet":
        raise UsageError(f"--backbone {name}: there are {', '.join(n for n in names() if n != 'iresnet')}")
    subject = Subject(name, batch_size, image_size, resolve_device(device), threads or usable_cores())
    report = measure_backbones(subject, ways or list(WAYS), steps=steps, rounds=rounds)
    typer.echo(json.dumps(report, indent=1) if as_json else _told(report))


def _told(report: dict[str, Any]) -> str:
    lines = [
        f"{report['backbone']}, {report['batch']} images of {report['image_size']}, "
        f"{report['device']}, {report['threads']} threads: images per second"
    ]
    for name, found in report["ways"].items():
        ratio = f"{found['times_plain']:8.2f} x plain" if found["times_plain"] else ""
        lines.append(
            f"  {name:14}{found['images_per_s']:10,.1f}{ratio}  {found['peak_gib']:6.2f} GiB, "
            f"first step {found['first_step_s']:.1f} s"
        )
    return "\n".join(lines)
