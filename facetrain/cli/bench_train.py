"""`facetrain bench train`: whole steps of a run, on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from facetrain.cli.train import Processes, Set

if TYPE_CHECKING:
    from facetrain.config.schema import Config

_USUAL = {"data": {"train": "generated"}, "model": {"backbone": "r18"}, "train": {"batch_size": 64}}


def train(
    config: Annotated[
        Path | None, typer.Option(help="Run description, YAML; r18 in bf16, 64 images, if left out.")
    ] = None,
    set_: Set = None,
    identities: Annotated[int, typer.Option(min=2, help="Class centers of the head.")] = 10_000,
    data: Annotated[
        Path | None, typer.Option(help="A dataset; generated images of about 8 kB if left out.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", help="synthetic: one batch on the device; records: a dataset. Both if left out."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Of a round.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Of which the medians are taken.")] = 3,
    nproc_per_node: Processes = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")
    ] = False,
) -> None:
    """Measure steps of a run: images per second, share of the matrix peak, where the time goes."""
    from facetrain.distributed.launch import launch, topology
    from facetrain.distributed.process_lifetime import launched_by_torchrun
    from facetrain.errors import UsageError

    for name in inputs or ():
        if name not in ("synthetic", "records"):
            raise UsageError(f"--input {name}: there are synthetic and records")
    described = _described(config, set_)

    def measure() -> int:
        from facetrain.bench.train import INPUTS, measure_training

        report = measure_training(
            described, data, identities=identities, inputs=inputs or INPUTS, steps=steps, rounds=rounds
        )
        if report is not None:
            typer.echo(json.dumps(report, indent=1) if as_json else told(report))
        return 0

    if launched_by_torchrun():
        sys.exit(measure())
    where = topology(nproc_per_node, "1", None, 0, described.train.device)
    sys.exit(launch(measure, where, run_id="facetrain-bench"))


def _described(config: Path | None, set_: list[str] | None) -> Config:
    from facetrain.config.loading import build_config, load_config

    return load_config(config, set_ or ()) if config else build_config(_USUAL, "bench train", set_ or ())


def told(report: dict[str, Any]) -> str:
    """Tell a report in lines."""
    lines = [
        f"{report['backbone']} in {report['precision']}, {report['batch']} images and {report['threads']} threads on "
        f"each of {report['ranks']} × {report['device']}, {report['identities']:,} identities",
    ]
    for name, found in report["inputs"].items():
        shares = "  ".join(f"{part} {share:.0%}" for part, share in found["share_of_time"].items())
        lines += [
            f"  {name:10}{found['images_per_s']:10,.1f} images/s  MFU {found['mfu']:.0%}",
            f"    {shares}",
        ]
    lines += [*_compared(report["inputs"]), _limits(report)]
    return "\n".join(lines)


def _compared(inputs: dict[str, Any]) -> list[str]:
    if len(inputs) < 2:
        return []
    ratio = inputs["records"]["images_per_s"] / inputs["synthetic"]["images_per_s"]
    return [f"  records are {ratio:.0%} as fast as synthetic images"]


def _limits(report: dict[str, Any]) -> str:
    flops = sum(report["flops_per_image"].values())
    return (
        f"  at most {report['peak_gib']:.2f} GiB; matrix products reach {report['matrix_flops'] / 1e12:.2f} TFLOP/s, "
        f"which is enough for {report['matrix_flops'] / flops:,.1f} images/s,\n"
        f"  and memory {report['copied_bytes'] / 1e9:.0f} GB/s, enough for "
        f"{report['copied_bytes'] / report['bytes_per_image']:,.1f} if each operation reads and writes on its own"
    )
