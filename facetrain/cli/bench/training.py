"""`facetrain bench train` and `backbone`: training steps."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from facetrain.bench.workloads import INPUTS, BackboneWorkload, RunWorkload
from facetrain.cli.bench.options import DATA_OPTION, Json, TurnsOptions, Variants, require_known
from facetrain.cli.devices import DEVICE_OPTION, resolve_device
from facetrain.cli.option_groups import option_groups
from facetrain.cli.train import Processes, Set
from facetrain.cli.unused_options import refuse_launch_options
from facetrain.cpu_cores import usable_cores

if TYPE_CHECKING:
    from facetrain.config.schema import Config

_DEFAULT_CONFIG = {"data": {"train": "generated"}, "model": {"backbone": "r18"}, "train": {"batch_size": 64}}


@option_groups
def backbone(
    workload: Annotated[
        BackboneWorkload,
        {
            "backbone": typer.Option(help="Network: r18, r50, r100, mbf, …"),
            "batch": typer.Option("--batch-size", min=2, help="Images per step."),
            "image_size": typer.Option(min=16, help="Width and height of an image in pixels."),
            "threads": typer.Option(min=1, help="Threads on the CPU; by default the number of usable cores."),
            "device": DEVICE_OPTION,
        },
    ],
    turns: TurnsOptions,
    variants: Variants = None,
    as_json: Json = False,
) -> None:
    """Measure a backbone's training step with PyTorch's defaults, in bf16, in channels_last, and compiled.

    Without --variant, all variants are measured but facetrain_fused and facetrain_replayed, which need a GPU.
    """
    from facetrain.backbone.registry import BACKBONES
    from facetrain.bench.backbone import ON_EVERY_DEVICE, VARIANTS, measure_backbone_steps

    require_known("--variant", variants or (), VARIANTS)
    # `iresnet` needs layers and widths, which this command has no options for.
    require_known("--backbone", [workload.backbone], [known for known in BACKBONES if known != "iresnet"])
    workload = replace(
        workload, device=resolve_device(workload.device), threads=workload.threads or usable_cores()
    )
    report = measure_backbone_steps(workload, variants or ON_EVERY_DEVICE, turns)
    typer.echo(json.dumps(report, indent=1) if as_json else _format_backbone(report))


def _format_backbone(report: dict[str, Any]) -> str:
    lines = [
        f"{report['backbone']}, {report['batch']} images of {report['image_size']} pixels, "
        f"{report['device']}, {report['threads']} threads: images per second"
    ]
    for name, found in report["variants"].items():
        ratio = f"{found['times_plain']:8.2f} x plain" if found["times_plain"] else ""
        lines.append(
            f"  {name:20}{found['images_per_s']:10,.1f}{ratio}  {found['peak_gib']:6.2f} GiB, "
            f"first step {found['first_step_s']:.1f} s"
        )
    return "\n".join(lines)


@option_groups
def train(
    context: typer.Context,
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
            "inputs": typer.Option(
                "--input",
                metavar="synthetic|records",
                help="synthetic: one batch that stays on the device; records: a dataset. By default both.",
            ),
            "baseline": typer.Option("--baseline", help="Also measure the training step of arcface_torch."),
        },
    ],
    turns: TurnsOptions,
    nproc_per_node: Processes = "auto",
    as_json: Json = False,
) -> None:
    """Measure whole steps of a run: images per second, share of the machine's peak, and where the time goes."""
    from facetrain.distributed.launch import launch
    from facetrain.distributed.process_lifetime import launched_by_torchrun
    from facetrain.distributed.topology import topology

    require_known("--input", workload.inputs, INPUTS)
    described = _load_or_default(config, set_)

    def measure() -> int:
        from facetrain.bench.train import measure_training

        report = measure_training(described, workload, turns)
        if report is not None:
            typer.echo(json.dumps(report, indent=1) if as_json else format_training(report))
        return 0

    refuse_launch_options(context)
    if launched_by_torchrun():
        sys.exit(measure())
    where = topology(nproc_per_node, "1", None, 0, described.train.device)
    sys.exit(launch(measure, where, run_id="facetrain-bench"))


def _load_or_default(config: Path | None, set_: list[str] | None) -> Config:
    from facetrain.config.loading import build_config, load_config

    if config:
        return load_config(config, set_ or ())
    return build_config(_DEFAULT_CONFIG, "bench train", set_ or ())


def format_training(report: dict[str, Any]) -> str:
    """Return the report of `bench train` as text."""
    lines = [
        f"{report['backbone']} in {report['precision']}, {report['batch']} images and {report['threads']} "
        f"threads on each of {report['ranks']} × {report['device']}, {report['identities']:,} identities",
    ]
    if "arcface_torch" in report:
        lines.append(_format_speed("arcface_torch", report["arcface_torch"]))
    for name, found in report["inputs"].items():
        shares = "  ".join(f"{part} {share:.0%}" for part, share in found["share_of_time"].items())
        ratio = report.get("times_arcface_torch", {}).get(name)
        speed = _format_speed(name, found) + (f"  {ratio:.2f} x arcface_torch" if ratio else "")
        lines += [speed, f"    {shares}"]
    if "records_over_synthetic" in report:
        lines.append(
            f"  records reach {report['records_over_synthetic']:.0%} of the speed of synthetic images"
        )
    return "\n".join([*lines, _format_limits(report)])


def _format_speed(name: str, found: dict[str, Any]) -> str:
    return f"  {name:14}{found['images_per_s']:10,.1f} images/s  MFU {found['mfu']:.0%}"


def _format_limits(report: dict[str, Any]) -> str:
    flops = sum(report["flops_per_image"].values())
    return (
        f"  peak of memory {report['peak_gib']:.2f} GiB\n"
        f"  matrix products reach {report['matrix_flops'] / 1e12:.2f} TFLOP/s, "
        f"enough for {report['matrix_flops'] / flops:,.1f} images/s\n"
        f"  memory copies reach {report['copied_bytes'] / 1e9:.0f} GB/s, enough for "
        f"{report['copied_bytes'] / report['bytes_per_image']:,.1f} images/s if no operations are fused"
    )
