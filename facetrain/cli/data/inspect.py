"""`facetrain data inspect | check`: contents and faults of a dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from facetrain.cli.data.options import Dataset, Json, Workers
from facetrain.cli.outputs import echo_line, require_absent, require_sheet
from facetrain.errors import UsageError

_SHEET_PAIRS = 40

if TYPE_CHECKING:
    from facetrain.data.tools.inspect import DatasetStatistics


def inspect(
    dataset: Annotated[
        Path,
        typer.Argument(
            help="Dataset: a folder with train.rec or the .rec itself, a folder per identity, shards, a zip archive, "
            "or a mixture's YAML. Or a verification set: a .bin."
        ),
    ],
    sheet: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a contact sheet, .png or .html: eight identities, one per row."
        ),
    ] = None,
    identity: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="List the images of this identity, given by its folder name or its number; with --sheet, the sheet "
            "shows all of them.",
        ),
    ] = None,
    augment: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG",
            help="With --sheet, show eight images, each as it is and after the augmentations of this config.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the number of identities and images of a dataset, image sizes and formats."""
    if augment is not None and (sheet is None or identity is not None):
        raise UsageError("--augment needs --sheet FILE, and cannot be combined with --identity")
    from facetrain.data.tools.inspect import find_identity, image_locations
    from facetrain.data.tools.inspect import inspect as inspect_dataset

    require_sheet(sheet)
    if dataset.suffix == ".bin" and dataset.is_file():
        _inspect_pair_set(dataset, sheet, identity, augment, as_json)
        return
    statistics = inspect_dataset(dataset)
    label = None if identity is None else find_identity(dataset, identity)
    locations = None if label is None else image_locations(dataset, label)
    if sheet is not None:
        _write_sheet(dataset, sheet, label, augment)
    if as_json:
        facts = vars(statistics) | {"skipped": [vars(file) for file in statistics.skipped]}
        typer.echo(json.dumps(facts | ({} if locations is None else {"images": locations})))
    elif locations is not None:
        echo_line(f"{dataset}: identity {identity} has {len(locations):,} images")
        for location in locations:
            echo_line(f"  {location}")
    else:
        _print_statistics(statistics)
    _report_sheet(sheet, as_json)


def _report_sheet(sheet: Path | None, as_json: bool) -> None:
    if sheet is not None and not as_json:
        typer.echo(f"  contact sheet: {sheet}")


def _inspect_pair_set(
    path: Path, sheet: Path | None, identity: str | None, augment: Path | None, as_json: bool
) -> None:
    if identity is not None or augment is not None:
        raise UsageError(
            f"{path}: --identity and --augment need a dataset; a .bin has pairs without identities"
        )
    from facetrain.data.formats.bin import read_bin
    from facetrain.data.tools.contact_sheet import write_pair_sheet
    from facetrain.data.tools.inspect import inspect_pair_set

    statistics = inspect_pair_set(path)
    if sheet is not None:
        images, _ = read_bin(path)
        step = max(
            statistics.pairs // _SHEET_PAIRS, 1
        )  # the pairs of a fold are sorted: the same person first
        pairs = [(2 * number, 2 * number + 1) for number in range(0, statistics.pairs, step)][:_SHEET_PAIRS]
        write_pair_sheet(pairs, images.__getitem__, images.__getitem__, sheet)
    if as_json:
        typer.echo(json.dumps(vars(statistics)))
        return
    echo_line(f"{path}: {statistics.pairs:,} pairs, {statistics.same:,} of one person")
    for what, counts in (("sizes", statistics.sizes), ("formats", statistics.formats)):
        listed = ", ".join(f"{name} ({count:,})" for name, count in counts.items())
        echo_line(f"  {what} of {statistics.images:,} images: {listed}")
    _report_sheet(sheet, as_json)


def _write_sheet(dataset: Path, sheet: Path, identity: int | None, augment: Path | None) -> None:
    from facetrain.data.tools.contact_sheet import (
        write_augmented_sheet,
        write_identities_sheet,
        write_identity_sheet,
    )

    if augment is not None:
        from facetrain.config.loading import load_config
        from facetrain.run.build.parts import build_augment

        config = load_config(augment)
        write_augmented_sheet(dataset, build_augment(config), sheet, size=config.data.image_size)
    elif identity is not None:
        write_identity_sheet(dataset, identity, sheet)
    else:
        write_identities_sheet(dataset, sheet)


def _print_statistics(statistics: DatasetStatistics) -> None:
    echo_line(f"{statistics.folder}: {statistics.images:,} images of {statistics.identities:,} identities")
    if statistics.identities_without_images:
        echo_line(f"  {statistics.identities_without_images:,} identities have no image")
    echo_line(
        f"  images per identity: {statistics.fewest:,} to {statistics.most:,}, median {statistics.median:g}"
    )
    for name, count in statistics.histogram.items():
        echo_line(f"    {name:>9}  {count:,} identities")
    for what, counts in (("sizes", statistics.sizes), ("formats", statistics.formats)):
        listed = ", ".join(f"{name} ({count:,})" for name, count in counts.items())
        echo_line(f"  {what} of {statistics.sample:,} images: {listed}")
    if statistics.skipped:
        from facetrain.data.skipped_files import skipped_summary

        echo_line(f"  {len(statistics.skipped):,} files are not images of the dataset (--json lists them):")
        for line in skipped_summary(statistics.skipped):
            echo_line(f"    {line}")


def check(
    dataset: Dataset,
    repair: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write a copy without the faults to this folder; it must not exist."
        ),
    ] = None,
    near_duplicates: Annotated[bool, typer.Option(help="Search for nearly equal images as well.")] = False,
    show: Annotated[
        int, typer.Option(min=0, help="Number of faults of each kind to print; --json prints all.")
    ] = 5,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Read and decode every image and list the faults; exit code 2 if they would harm training."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools import check as tool

    require_absent(repair)
    with progress_bar("checking") as progress:
        report = tool.check(
            dataset, near_duplicates=near_duplicates, repair=repair, workers=workers, progress=progress
        )
    if as_json:
        faults = [vars(fault) for fault in report.faults]
        facts = {"images": report.images, "identities": report.identities, "damaged": report.damaged}
        typer.echo(json.dumps(facts | {"good": len(report.good), "faults": faults}))
    else:
        echo_line(f"{dataset}: {report.images:,} images of {report.identities:,} identities can be decoded")
        for kind, description in tool.FAULT_KINDS.items():
            messages = [fault.message for fault in report.faults if fault.kind == kind]
            if messages:
                echo_line(f"  {description}: {len(messages):,}")
                for message in messages[:show]:
                    echo_line(f"    {message}")
        if not report.faults:
            echo_line("  no faults")
        if repair is not None:
            echo_line(f"{repair}: {len(report.good):,} images written")
    if report.damaged and repair is None:
        raise typer.Exit(2)
