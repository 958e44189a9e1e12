"""`facetrain bench …`: measure parts of facetrain on this machine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from facetrain.bench.workloads import DEFAULT_CONFIG, BackboneWorkload, HeadWorkload, RunWorkload
from facetrain.cli.bench.options import (
    DATA_OPTION,
    ROUNDS_OPTION,
    TurnsOptions,
    Variants,
    print_report,
    require_known,
)
from facetrain.cli.option_groups import option_groups
from facetrain.cli.options import DEVICE_OPTION, Device, Json, Set, resolve_device
from facetrain.cli.train import Processes
from facetrain.cpu_cores import usable_cores

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Measure parts of a run on this machine.")
_MOST_IDENTITIES = 10_000_000_000
"""More than all people: larger numbers are mistakes, and overflow in sizes of tensors."""


@app.command()
@option_groups
def train(
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Config: a YAML file, or the name of a preset; by default an r18 in bf16 with 64 images per step."
        ),
    ] = None,
    set_: Set = None,
    workload: Annotated[
        RunWorkload,
        {
            "identities": typer.Option(min=2, help="Number of class centers of the head."),
            "data": DATA_OPTION,
        },
    ],
    turns: TurnsOptions,
    nproc_per_node: Processes = "auto",
    as_json: Json = False,
) -> None:
    """Measure whole steps of a run.

    The inputs are one batch that stays on the device (synthetic), and a dataset through the loader (records).
    """
    from facetrain.config.loading import build_config
    from facetrain.config.own_code import load_trusted
    from facetrain.distributed.launch import launch
    from facetrain.distributed.process_lifetime import launched_by_torchrun
    from facetrain.distributed.topology import topology

    described = (
        load_trusted(config, set_ or ())
        if config
        else build_config(DEFAULT_CONFIG, "the defaults", set_ or ())
    )

    def measure() -> int:
        from facetrain.bench.train import measure_training

        report = measure_training(described, workload, turns)
        if report is not None:
            print_report(report, as_json)
        return 0

    if launched_by_torchrun():
        sys.exit(measure())
    where = topology(nproc_per_node, "1", None, 0, described.train.device)
    sys.exit(launch(measure, where, ["-m", "facetrain", *sys.argv[1:]]))


@app.command()
def loader(
    data: Annotated[Path | None, DATA_OPTION] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Worker processes of each loader; by default the number of usable cores."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=2, help="Images per batch.")] = 128,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Duration of each variant in each round, in seconds.")
    ] = 3.0,
    rounds: Annotated[int, ROUNDS_OPTION] = 3,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure the loader, beside the JPEG decoder alone."""
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
    print_report(report, as_json)


@app.command()
@option_groups
def head(
    workload: Annotated[
        HeadWorkload,
        {
            "identities": typer.Option(
                min=1, max=_MOST_IDENTITIES, help="Number of class centers; 1,000,000 need 14 GB of memory."
            ),
            "batch_size": typer.Option(min=1, help="Embeddings per step."),
            "embedding_size": typer.Option(min=1, help="Numbers per embedding."),
            "steps": typer.Option(min=1, help="Timed steps of each variant; the median counts."),
            "device": DEVICE_OPTION,
            "disk": typer.Option(
                help="Folder on the disk to measure, for centers on disk; by default that for temporary files."
            ),
        },
    ],
    variants: Variants = None,
    as_json: Json = False,
) -> None:
    """Measure full steps of the head.

    Without --variant, all variants are measured except fp16 and a sample rate of 1 %.
    """
    from facetrain.bench.head import DEFAULT_VARIANTS, VARIANTS, measure_head_steps
    from facetrain.cli.progress import progress_bar

    require_known("--variant", variants or (), VARIANTS)
    workload = replace(workload, device=resolve_device(workload.device))
    with progress_bar("measuring") as progress:
        report = measure_head_steps(variants or DEFAULT_VARIANTS, workload, progress)
    print_report(report, as_json)


@app.command()
@option_groups
def backbone(
    workload: Annotated[
        BackboneWorkload,
        {
            "backbone": typer.Option(help="Network: r18, r50, r100, mbf, …"),
            "batch": typer.Option("--batch-size", min=2, help="Images per step."),
            "image_size": typer.Option(min=16, help="Width and height of an image in pixels."),
            "device": DEVICE_OPTION,
        },
    ],
    turns: TurnsOptions,
    variants: Variants = None,
    as_json: Json = False,
) -> None:
    """Measure a backbone's training step.

    Without --variant, all variants are measured but facetrain_replayed, which needs a GPU.
    """
    from facetrain.backbone.registry import BACKBONES
    from facetrain.bench.backbone import ON_EVERY_DEVICE, VARIANTS, measure_backbone_steps

    require_known("--variant", variants or (), VARIANTS)
    # `iresnet` needs layers and widths, which this command has no options for.
    require_known("--backbone", [workload.backbone], [known for known in BACKBONES if known != "iresnet"])
    workload = replace(workload, device=resolve_device(workload.device))
    print_report(measure_backbone_steps(workload, variants or ON_EVERY_DEVICE, turns), as_json)


@app.command()
def embed(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME|FILE",
            help="Backbone (r18, r50, mbf, …), which gets random weights, or model file. May be repeated. The "
            "default is r18, r50 and mbf.",
        ),
    ] = None,
    variants: Variants = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 32,
    rounds: Annotated[int, ROUNDS_OPTION] = 10,
    as_json: Json = False,
) -> None:
    """Measure the embedding of images, beside onnxruntime."""
    from facetrain.bench.embedding import VARIANTS, measure_embedding

    require_known("--variant", variants or (), VARIANTS)
    reports = {
        name: measure_embedding(
            name,
            batch_size=batch_size,
            rounds=rounds,
            threads=usable_cores(),
            variants=variants or VARIANTS,
        )
        for name in model or ("r18", "r50", "mbf")
    }
    print_report(reports, as_json)
