"""`facetrain plan`: forecast the memory and the time of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from facetrain.cli.options import Config as ConfigOption
from facetrain.cli.options import Json, Set

if TYPE_CHECKING:
    from facetrain.config.schema import Config
    from facetrain.plan.device import Device


_MOST_GIB = 1_000_000
_SAVES_MEMORY = (
    "head.momentum_dtype: bfloat16; model.checkpoint_activations: true; half of train.batch_size with twice "
    "optim.accumulate; head.weight_dtype: bfloat16; head.momentum_dtype: int8; head.placement: host"
)


def plan(
    config: ConfigOption,
    gpus: Annotated[
        int,
        typer.Option(
            min=1, help="Number of GPUs of the whole run, eight per machine; on a CPU, of processes."
        ),
    ] = 8,
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB", min=1, help="Memory of one GPU in GiB; by default the memory of --gpu-kind."
        ),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu-kind",
            "--gpu",
            metavar="v100|a100|h100|h200|cpu",
            help="Kind of GPU; cpu: forecast the memory of processes without a GPU.",
        ),
    ] = "h100",
    identities: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of identities; by default the number in the config, or in the dataset."
        ),
    ] = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Forecast the memory and the time that a run needs.

    Identities and images are read from data.train if it is on this machine or in an object store, and the config does
    not state them. The exit code is 1 if the run does not fit into the memory.
    """
    from facetrain.config.own_code import load_trusted
    from facetrain.errors import UsageError
    from facetrain.plan.device import DEVICES

    if gpu not in (*DEVICES, "cpu"):
        raise UsageError(f"--gpu-kind {gpu}: unknown; use one of {', '.join(DEVICES)}, cpu")
    if gpu == "cpu" and memory is None:
        raise UsageError("--gpu-kind cpu: also give --memory, the GiB that each process may use")
    if memory and memory > _MOST_GIB:
        raise UsageError(f"--memory {memory:g}: use a number of at most {_MOST_GIB:,}")
    described = load_trusted(config, set_ or ())
    known_classes, num_images = _dataset_size(described)
    num_classes = identities or known_classes
    if num_classes is None:
        raise UsageError(
            f"{config}: has no data.num_classes, and {described.data.train} is not on this machine; give the number "
            "with --identities N"
        )
    report = _report(described, num_classes, num_images, gpus, gpu, memory or DEVICES[gpu].memory_gib)
    typer.echo(json.dumps(report, indent=1) if as_json else _format(report))
    if not report["fits"]:
        raise typer.Exit(1)


def _dataset_size(config: Config) -> tuple[int | None, int | None]:
    """Return the numbers of identities and of images: of the config, or the dataset on the disk."""
    from facetrain.data.build import open_training_data
    from facetrain.remote.address import is_read_in_place

    data = config.data
    classes, images = data.num_classes, data.num_images
    is_there = is_read_in_place(data.train) or Path(data.train).exists()
    if (classes is None or images is None) and is_there:
        source = open_training_data(data)
        classes, images = classes or source.num_classes, images or source.num_images
    return classes, images


def _report(
    config: Config, num_classes: int, num_images: int | None, gpus: int, gpu: str, memory_gib: float
) -> dict[str, Any]:
    from facetrain.plan.device import DEVICES, GIB
    from facetrain.plan.forecast import forecast_stages
    from facetrain.plan.limits import MemoryBudget
    from facetrain.plan.teacher_cost import teacher_cost
    from facetrain.run.parts.step_schedule import local_batch_size

    memory, cuda = int(memory_gib * GIB), gpu != "cpu"
    timed = _time(config, num_classes, num_images, gpus, DEVICES[gpu]) if cuda else {}
    needed, largest = forecast_stages(config, num_classes, gpus, cuda=cuda)
    budget = MemoryBudget(gpus, memory, cuda=cuda)
    counts_teacher = not config.distill or teacher_cost(config.distill, config.train.precision).is_counted
    remarks = {
        "This is the memory without train.compile; the memory of a compiled network is not forecast.": (
            config.train.compile == "on"
        ),
        "The teacher is an ONNX file, whose memory on the host is not forecast.": not counts_teacher,
        "This is the time without the teacher.": cuda and config.distill is not None,
        "This is the memory in use. With train.keep_freed_memory: true, a process holds up to twice as much.": (
            not cuda and config.train.keep_freed_memory
        ),
        f"A {gpu} cannot multiply in bf16, and this is the speed of fp16: add --set train.precision=fp16": (
            cuda and config.train.precision == "bf16" and not DEVICES[gpu].has_bf16
        ),
    }
    return {
        "gpus": gpus,
        "gpu": gpu,
        "identities": num_classes,
        "batch": local_batch_size(largest, gpus),
        "memory_bytes": memory,
        "parts_bytes": needed.parts(),
        "total_bytes": needed.total,
        "elsewhere_bytes": needed.elsewhere,
        "fits": budget.fits(config, num_classes),
        "largest_batch": budget.largest_batch(config, num_classes),
        "most_identities": budget.most_identities(config),
        "remarks": [remark for remark, applies in remarks.items() if applies],
        **timed,
    }


def _time(
    config: Config, num_classes: int, num_images: int | None, gpus: int, device: Device
) -> dict[str, Any]:
    """Return the mean speed of the run and its hours; the last stage's speed if the number of images is not known."""
    from facetrain.plan.speed import step_time
    from facetrain.run.parts.step_schedule import schedule_steps, stage_configs

    times = [step_time(staged, num_classes, gpus, device) for _, staged in stage_configs(config)]
    if not num_images:
        return {"images_per_second": round(times[-1].images_per_second)}
    stages = schedule_steps(config, num_images, gpus).stages
    steps = [stage.stop_step - stage.first_step for stage in stages]
    seconds = sum(count * time.seconds for count, time in zip(steps, times, strict=False))
    images = sum(count * stage.global_batch_size for count, stage in zip(steps, stages, strict=True))
    return {"images_per_second": round(images / seconds), "hours": seconds / 3600}


def _format(report: dict[str, Any]) -> str:
    from facetrain.plan.device import GIB, SPEED_RANGE

    unit, units = ("process", "processes") if report["gpu"] == "cpu" else ("GPU", "GPUs")
    lines = [
        f"{report['gpus']} × {report['gpu']}, {report['identities']:,} identities, {report['batch']} images per {unit}",
        *(
            f"  {name.replace('_', ' '):16}{size / GIB:8.2f} GiB"
            for name, size in report["parts_bytes"].items()
            if size or name != "teacher"  # most runs have none
        ),
        f"  {'total':16}{report['total_bytes'] / GIB:8.2f} GiB of {report['memory_bytes'] / GIB:.4g}: "
        + ("fits" if report["fits"] else "does not fit"),
        *(f"  {remark}" for remark in report["remarks"]),
    ]
    if report["elsewhere_bytes"]:
        lines.append(f"  In addition {report['elsewhere_bytes'] / GIB:.2f} GiB per {unit} on the host.")
    if not report["fits"]:
        lines.append(f"needs less memory, from cheap to expensive: {_SAVES_MEMORY}; more {units}")
    lines.append(
        f"largest batch per {unit} {report['largest_batch']:,}; most identities {report['most_identities']:,}"
    )
    if unit == "process":
        return "\n".join([*lines, "`facetrain bench train` measures the speed."])
    duration = f", {report['hours']:,.1f} hours" if "hours" in report else ""
    return "\n".join(
        [
            *lines,
            f"about {report['images_per_second']:,} images/s{duration}, ± {SPEED_RANGE:.0%} (an estimate that no run "
            "has confirmed: docs/performance.md)",
        ]
    )
