"""`facetrain plan`: say whether a run fits, how long it takes, with which batch and how many GPUs."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from facetrain.cli.options import Config as ConfigOption
from facetrain.cli.options import Json, Set
from facetrain.text import number_text

if TYPE_CHECKING:
    from facetrain.config.schema import Config
    from facetrain.plan.forecast import Forecast

_GIB = 1 << 30


def plan(
    config: ConfigOption,
    memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", min=1, max=1e6, help="Memory of one GPU. Default: measure this machine."),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, max=100_000, help="GPUs of the whole run.")] = 1,
    identities: Annotated[
        int | None,
        typer.Option(min=1, max=2**31 - 1, help="Identities; by default of the config, or of the dataset."),
    ] = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Say whether a run fits, how long it takes, with which batch and how many GPUs.

    Without --memory it takes some steps on this machine, in one process, and prints their speed and memory. With
    --memory it counts the memory of one of --gpus such GPUs, which this machine need not have; the exit code is 1 if
    the run does not fit.
    """
    from facetrain.config.loading import load_config
    from facetrain.config.own_code import allow_code_of
    from facetrain.errors import UsageError

    if gpus > 1 and memory is None:
        raise UsageError(f"--gpus {gpus}: also give --memory, the GiB of one GPU")
    described = load_config(config, set_ or ())
    allow_code_of(described)
    found_identities, images = _sizes(described, counts_images=memory is None)
    num_classes = identities or found_identities
    if num_classes is None:
        raise UsageError(
            f"{config}: has no data.num_classes, and {described.data.train} is not on this machine; give the number "
            "with --identities N"
        )
    if memory is None:
        report = _measured(described, num_classes, images)
    else:
        report = _counted(described, num_classes, gpus, int(memory * _GIB))
    typer.echo(json.dumps(report, indent=1) if as_json else "\n".join(_lines(report)))
    if not report.get("fits", True):
        raise typer.Exit(1)


def _sizes(config: Config, *, counts_images: bool) -> tuple[int | None, int | None]:
    """Return the number of identities, and of images of an epoch if they are to be counted.

    The identities are those of the config, or else of the dataset. The images are those of the dataset, in which an
    image may have a weight; or if it is not on this machine, those of the config. An address is read only if the config
    lacks a number: this machine may have no access to it. Nor needs it then all datasets of a mixture.
    """
    from facetrain.data.build import open_training_data
    from facetrain.data.loading.sampler import epoch_size
    from facetrain.errors import DataError
    from facetrain.remote.address import is_read_in_place
    from facetrain.telemetry.log import warn

    data = config.data
    has_both = data.num_classes and data.num_images
    is_there = Path(data.train).exists() or (is_read_in_place(data.train) and not has_both)
    if not is_there or (data.num_classes and not counts_images):
        return data.num_classes, data.num_images
    try:
        source = open_training_data(data)
    except DataError as error:
        if not has_both:
            raise
        warn(f"{error}; counting with data.num_classes and data.num_images")
        return data.num_classes, data.num_images
    return data.num_classes or source.num_classes, epoch_size(source)


def _measured(config: Config, num_classes: int, images: int | None) -> dict[str, Any]:
    from facetrain.bench.train import measure_steps
    from facetrain.cli.progress_bar import progress_bar
    from facetrain.run.parts.step_schedule import schedule_steps

    total = schedule_steps(config, images, 1).images_after(0) if images else None
    with progress_bar("measuring steps") as progress:
        speed, peak_gib, device = measure_steps(config, num_classes, images, progress)
    return {
        "device": device,
        "identities": num_classes,
        "peak_bytes": round(peak_gib * _GIB),
        "images_per_s": speed,
        "images": total,
        "seconds": total and total / speed,
    }


def _counted(config: Config, num_classes: int, gpus: int, memory: int) -> dict[str, Any]:
    from facetrain.plan.forecast import fewest_gpus, forecast, largest_batch

    needed = forecast(config, num_classes, gpus)
    return {
        "gpus": gpus,
        "identities": num_classes,
        "batch": needed.batch,
        "memory_bytes": memory,
        "parts_bytes": needed.parts,
        "total_bytes": needed.total,
        "elsewhere_bytes": needed.elsewhere,
        "placement": config.head.placement,
        "checkpoint_copy_bytes": needed.checkpoint_copy,
        "fits": needed.fits(memory),
        "largest_batch": largest_batch(config, num_classes, gpus, memory),
        "fewest_gpus": fewest_gpus(config, num_classes, memory),
        "memory_savers": [] if needed.fits(memory) else _memory_savers(config, num_classes, gpus, needed),
    }


def _memory_savers(config: Config, num_classes: int, gpus: int, needed: Forecast) -> list[str]:
    """Return the changes of the config with which a GPU needs less memory than `needed`, from cheap to expensive.

    What saves memory in one run costs some in another: an update copies values of 16 bits to float32, and several
    micro-batches keep the gradient of the centers in float32.
    """
    from facetrain.config.loading import with_values
    from facetrain.errors import ConfigError, ModelError
    from facetrain.plan.forecast import forecast

    def saves(values: dict[str, Any], on_gpus: int = gpus, batch: int | None = None) -> bool:
        with suppress(ConfigError, ModelError):  # the run, or its network, cannot have these values
            changed = with_values(config, values, "memory savers")
            return forecast(changed, num_classes, on_gpus, batch=batch).total < needed.total
        return False

    smaller, half = "twice optim.accumulate", None
    if not config.train.global_batch_size:  # which is divided among the micro-batches
        smaller = f"half of train.batch_size with {smaller}"
        half = max(needed.batch // 2, 2)  # batch norm has no variance over one image
    savers = {
        "head.momentum_dtype: bfloat16": saves({"head.momentum_dtype": "bfloat16"}),
        "model.checkpoint_activations: true": saves({"model.checkpoint_activations": True}),
        smaller: saves({"optim.accumulate": 2 * config.optim.accumulate}, batch=half),
        "head.weight_dtype: bfloat16": saves({"head.weight_dtype": "bfloat16"}),
        "head.momentum_dtype: int8": saves({"head.momentum_dtype": "int8"}),
        "head.placement: host": saves({"head.placement": "host"}),
        "twice as many GPUs": saves({}, 2 * gpus),
    }
    return [saver for saver, is_less in savers.items() if is_less]


def _lines(report: dict[str, Any]) -> list[str]:
    from facetrain.plan.forecast import MOST_GPUS, USABLE

    if "device" in report:
        lines = [
            f"{report['device']}, one process, {report['identities']:,} identities: "
            f"{report['images_per_s']:,.4g} images/s, at most {_gib(report['peak_bytes'])}"
        ]
        if report["seconds"]:
            time = timedelta(seconds=math.ceil(report["seconds"]))
            lines.append(f"the run's {report['images']:,} images: {time}, without verification")
        return [*lines, "The loader is not measured: `facetrain bench loader`."]
    sizes = {name.replace("_", " "): size for name, size in report["parts_bytes"].items() if size}
    verdict = "fits" if report["fits"] else "does not fit"
    lines = [
        f"{report['gpus']} × {report['memory_bytes'] / _GIB:.4g} GiB, {report['identities']:,} identities, "
        f"{report['batch']} images per GPU",
        *(f"  {name:16}{_gib(size):>12}" for name, size in sizes.items()),
        f"  {'total':16}{_gib(report['total_bytes']):>12}: {verdict} "
        f"({1 - USABLE:.0%} of the memory is left to CUDA)",
    ]
    if report["elsewhere_bytes"]:
        where = "on the disk" if report["placement"] == "disk" else "in the host's memory"
        lines.append(f"  In addition {_gib(report['elsewhere_bytes'])} per GPU {where}.")
    if report["checkpoint_copy_bytes"]:
        lines.append(
            f"  In addition at most {_gib(report['checkpoint_copy_bytes'])} per GPU in the host's memory, for "
            "the copy of a checkpoint; checkpoint.async: false needs none."
        )
    if report["memory_savers"]:
        lines.append(f"needs less memory, from cheap to expensive: {'; '.join(report['memory_savers'])}")
    fewest = report["fewest_gpus"]
    on = (
        f"fewest GPUs {fewest}"
        if fewest
        else f"with this batch it fits on no number of GPUs up to {MOST_GPUS:,}"
    )
    limits = f"largest batch per GPU {report['largest_batch']:,}; {on}"
    return [*lines, limits, "The speed is measured on such a machine: `facetrain plan` without --memory."]


def _gib(size: int) -> str:
    return f"{number_text(size / _GIB, '.2f', smallest=0.01)} GiB"
