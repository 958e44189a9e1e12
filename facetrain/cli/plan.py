"""`facetrain plan`: forecast the memory and the time of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from facetrain.config.schema import Config
    from facetrain.plan.device import Device


def plan(
    config: Annotated[Path, typer.Option(help="Run description, YAML.")],
    gpus: Annotated[
        int, typer.Option(min=1, help="Number of GPUs of the whole run, eight per machine; or of processes.")
    ] = 8,
    memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", min=1, help="Memory of one GPU in GiB; by default that of --gpu."),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            metavar="v100|a100|h100|h200|cpu",
            help="Kind of GPU; cpu: forecast the memory of processes without a GPU.",
        ),
    ] = "h100",
    identities: Annotated[
        int | None,
        typer.Option(min=1, help="Number of identities; by default data.num_classes of the config."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the config; may be repeated."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")
    ] = False,
) -> None:
    """Forecast the memory by purpose, the limits of batch and identities, images per second and days."""
    from facetrain.config.loading import load_config
    from facetrain.errors import UsageError
    from facetrain.plan.device import DEVICES

    if gpu not in (*DEVICES, "cpu"):
        raise UsageError(f"--gpu {gpu}: unknown; use one of {', '.join(DEVICES)}, cpu")
    if gpu == "cpu" and memory is None:
        raise UsageError("--gpu cpu: also give --memory, the GiB that each process may use")
    described = load_config(config, set_ or ())
    synthetic = described.data.synthetic
    num_classes = identities or described.data.num_classes or (synthetic.identities if synthetic else None)
    if num_classes is None:
        raise UsageError(f"{config}: has no data.num_classes; give the number with --identities N")
    report = _report(described, num_classes, gpus, gpu, memory or DEVICES[gpu].memory_gib)
    typer.echo(json.dumps(report, indent=1) if as_json else _format(report))


def _report(config: Config, num_classes: int, gpus: int, gpu: str, memory_gib: float) -> dict[str, Any]:
    from facetrain.plan import limits
    from facetrain.plan.device import DEVICES, GIB
    from facetrain.plan.forecast import forecast
    from facetrain.run.step_schedule import local_batch_size

    memory, cuda = int(memory_gib * GIB), gpu != "cpu"
    needed = forecast(config, num_classes, gpus, cuda=cuda)
    fits = limits.fits(config, num_classes, gpus, memory, cuda=cuda)
    change = None if fits else limits.cheapest_change(config, num_classes, gpus, memory, cuda=cuda)
    return {
        "gpus": gpus,
        "gpu": gpu,
        "identities": num_classes,
        "batch": local_batch_size(config, gpus),
        "memory_bytes": memory,
        "parts_bytes": needed.parts(),
        "total_bytes": needed.total,
        "elsewhere_bytes": needed.elsewhere,
        "compiled": config.train.compile,
        "keeps_freed_memory": not cuda and config.train.keep_freed_memory,
        "fits": fits,
        "largest_batch": limits.largest_batch(config, num_classes, gpus, memory, cuda=cuda),
        "most_identities": limits.most_identities(config, gpus, memory, cuda=cuda),
        "change": change and {"set": change.keys, "price": change.price, "options": change.overrides()},
        **(_time(config, num_classes, gpus, DEVICES[gpu]) if cuda else {}),
    }


def _time(config: Config, num_classes: int, gpus: int, device: Device) -> dict[str, Any]:
    from facetrain.plan.speed import step_time

    time = step_time(config, num_classes, gpus, device)
    images = _images_of_run(config, time.images)
    return {
        "images_per_second": round(time.images_per_second),
        "step_seconds": {name: getattr(time, name) for name in ("backbone", "head", "network")},
        "days": images and images / time.images_per_second / 86_400,
    }


def _images_of_run(config: Config, global_batch: int) -> int | None:
    if config.train.max_steps:
        return config.train.max_steps * global_batch
    return config.data.num_images and config.data.num_images * config.train.epochs


def _format(report: dict[str, Any]) -> str:
    from facetrain.plan.device import GIB

    unit, units = ("process", "processes") if report["gpu"] == "cpu" else ("GPU", "GPUs")
    lines = [
        f"{report['gpus']} × {report['gpu']}, {report['identities']:,} identities, {report['batch']} images per {unit}",
        *(
            f"  {name.replace('_', ' '):16}{size / GIB:8.2f} GiB"
            for name, size in report["parts_bytes"].items()
        ),
        f"  {'total':16}{report['total_bytes'] / GIB:8.2f} GiB of {report['memory_bytes'] / GIB:.0f}: "
        + ("fits" if report["fits"] else "does not fit"),
    ]
    if report["compiled"]:
        lines.append(
            "  This is the memory without train.compile; that of a compiled network is not forecast."
        )
    if report["elsewhere_bytes"]:
        lines.append(f"  In addition {report['elsewhere_bytes'] / GIB:.2f} GiB per {unit} on the host.")
    if not report["fits"]:
        change = report["change"]
        lines.append(
            f"cheapest change that makes it fit: {change['options']} ({change['price']})"
            if change
            else f"no change of the config makes it fit: use more {units}"
        )
    lines.append(
        f"largest batch per {unit} {report['largest_batch']:,}; most identities {report['most_identities']:,}"
    )
    if unit == "process":
        if report["keeps_freed_memory"]:
            lines.append(
                "This is the memory in use. With train.keep_freed_memory: true, as here, a process holds up to twice "
                "as much."
            )
        lines.append("`facetrain bench train` measures the speed.")
        return "\n".join(lines)
    days = f"; {report['days']:.1f} days" if report["days"] else ""
    lines.append(f"about {report['images_per_second']:,} images/s{days} (an estimate: docs/performance.md)")
    return "\n".join(lines)
