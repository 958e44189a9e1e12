"""`facetrain plan`: forecast the memory of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from facetrain.cli.options import Config as ConfigOption
from facetrain.cli.options import Json, Set

if TYPE_CHECKING:
    from facetrain.config.schema import Config


_SAVES_MEMORY = (
    "head.momentum_dtype: bfloat16; model.checkpoint_activations: true; half of train.batch_size with twice "
    "optim.accumulate; head.weight_dtype: bfloat16; head.momentum_dtype: int8; head.placement: host"
)


def plan(
    config: ConfigOption,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the whole run; on a CPU, processes.")] = 8,
    memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", min=1, max=1e6, help="Memory of one GPU; by default of --gpu-kind."),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu-kind", "--gpu", metavar="v100|a100|h100|h200|cpu", help="Kind of GPU; cpu: without GPUs."
        ),
    ] = "h100",
    identities: Annotated[
        int | None, typer.Option(min=1, help="Identities; by default of the config, or of the dataset.")
    ] = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Forecast the memory that a run needs.

    Identities and images are read from data.train if it is on this machine or in an object store, and the config does
    not state them. The exit code is 1 if the run does not fit into the memory.
    """
    from facetrain.config.own_code import load_trusted
    from facetrain.errors import UsageError
    from facetrain.plan.memory import GPU_GIB

    if gpu not in (*GPU_GIB, "cpu"):
        raise UsageError(f"--gpu-kind {gpu}: unknown; use one of {', '.join(GPU_GIB)}, cpu")
    if gpu == "cpu" and memory is None:
        raise UsageError("--gpu-kind cpu: also give --memory, the GiB that each process may use")
    described = load_trusted(config, set_ or ())
    num_classes = identities or _num_classes(described)
    if num_classes is None:
        raise UsageError(
            f"{config}: has no data.num_classes, and {described.data.train} is not on this machine; give the number "
            "with --identities N"
        )
    report = _report(described, num_classes, gpus, gpu, memory or GPU_GIB[gpu])
    typer.echo(json.dumps(report, indent=1) if as_json else _format(report))
    if not report["fits"]:
        raise typer.Exit(1)


def _num_classes(config: Config) -> int | None:
    """Return the number of identities: of the config, or of the dataset, if it is within reach."""
    from facetrain.data.build import open_training_data
    from facetrain.remote.address import is_read_in_place

    data = config.data
    is_there = is_read_in_place(data.train) or Path(data.train).exists()
    if data.num_classes is None and is_there:
        return open_training_data(data).num_classes
    return data.num_classes


def _report(config: Config, num_classes: int, gpus: int, gpu: str, memory_gib: float) -> dict[str, Any]:
    from facetrain.plan.cpu_step import STEPS, measure_process
    from facetrain.plan.forecast import forecast_stages
    from facetrain.plan.limits import USABLE, MemoryBudget
    from facetrain.plan.memory import GIB
    from facetrain.run.parts.step_schedule import local_batch_size

    memory, cuda = int(memory_gib * GIB), gpu != "cpu"
    needed, largest = forecast_stages(config, num_classes, gpus, cuda=cuda)
    budget, total, remarks = MemoryBudget(gpus, memory, cuda=cuda), needed.total, []
    if config.train.compile != "off":
        remarks.append("The memory of a compiled network (train.compile) is not forecast.")
    if not cuda and gpus == 1 and config.distill is None:
        total = max(total, measure_process(largest, num_classes))
        remarks.append(
            f"The total is the peak of a process in {STEPS} steps; the parts are what its tensors need."
        )
    return {
        "gpus": gpus,
        "gpu": gpu,
        "identities": num_classes,
        "batch": local_batch_size(largest, gpus),
        "memory_bytes": memory,
        "parts_bytes": needed.parts,
        "total_bytes": total,
        "elsewhere_bytes": needed.elsewhere,
        "fits": total <= USABLE * memory,
        "largest_batch": budget.largest_batch(config, num_classes),
        "most_identities": budget.most_identities(config),
        "remarks": remarks,
    }


def _format(report: dict[str, Any]) -> str:
    from facetrain.plan.memory import GIB

    unit, units = ("process", "processes") if report["gpu"] == "cpu" else ("GPU", "GPUs")
    verdict = "fits" if report["fits"] else "does not fit"
    sizes = {name.replace("_", " "): size for name, size in report["parts_bytes"].items() if size}
    lines = [
        f"{report['gpus']} × {report['gpu']}, {report['identities']:,} identities, {report['batch']} images per {unit}",
        *(f"  {name:16}{size / GIB:8.2f} GiB" for name, size in sizes.items()),
        f"  {'total':16}{report['total_bytes'] / GIB:8.2f} GiB of {report['memory_bytes'] / GIB:.4g}: {verdict}",
        *(f"  {remark}" for remark in report["remarks"]),
    ]
    if report["elsewhere_bytes"]:
        lines.append(f"  In addition {report['elsewhere_bytes'] / GIB:.2f} GiB per {unit} on the host.")
    if not report["fits"]:
        lines.append(f"needs less memory, from cheap to expensive: {_SAVES_MEMORY}; more {units}")
    limits = (
        f"largest batch per {unit} {report['largest_batch']:,}; most identities {report['most_identities']:,}"
    )
    return "\n".join([*lines, limits, "`facetrain bench train --config CONFIG` measures the speed."])
