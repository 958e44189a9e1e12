"""`facetrain data inspect | check`: contents and faults of a dataset."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from facetrain.cli.data.dataset_options import Dataset, Workers, echo_left_out, echo_lost
from facetrain.cli.options import Json, local_dataset
from facetrain.cli.outputs import echo_line, require_sheet
from facetrain.cli.progress_bar import progress_bars
from facetrain.files import require_absent
from facetrain.text import count_text, images_text

if TYPE_CHECKING:
    from facetrain.data.skipped_files import SkippedFile

_SHEET_PAIRS, _PAIRS_PER_ROW = 40, 4
_PRINTED_FAULTS = 5
"""Faults of each kind that `check` prints; --json has all."""


def inspect(
    dataset: Annotated[
        Path,
        typer.Argument(
            metavar="DATASET",
            parser=local_dataset,
            help="Dataset: a folder with train.rec or the .rec itself, a folder per identity, shards, "
            "or a mixture's YAML. Or a verification set: a .bin. s3:// and gs:// datasets are read in place.",
        ),
    ],
    sheet: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a contact sheet, an .html page: up to 1,000 images."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the identities, images, sizes and formats of a dataset."""
    from facetrain.data.formats.set_names import is_bin

    require_sheet(sheet)
    if is_bin(dataset):
        facts, lines = _inspect_pairs(dataset, sheet)
    else:
        facts, lines = _inspect_dataset(dataset, sheet)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for line in lines:
        echo_line(line)
    if sheet is not None:
        echo_line(f"  contact sheet: {sheet}")


def _inspect_pairs(path: Path, sheet: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Write the sheet of a verification set; return its facts for JSON, and the lines that describe it."""
    from facetrain.data.formats.bin import read_bin
    from facetrain.data.loading.sampler import sample_numbers
    from facetrain.data.remote_dataset import with_addresses
    from facetrain.data.tools.contact_sheet import write_encoded_sheet
    from facetrain.data.tools.inspect import count_formats

    images, same = read_bin(path)
    if sheet is not None:
        # At random: at equal distances, all pairs could be of one kind.
        pairs = sorted(sample_numbers(_SHEET_PAIRS, len(same)).tolist())
        rows = [pairs[start : start + _PAIRS_PER_ROW] for start in range(0, len(pairs), _PAIRS_PER_ROW)]
        shown = [[image for pair in row for image in images[2 * pair : 2 * pair + 2]] for row in rows]
        titles = [
            ", ".join(f"pair {pair} {'same' if same[pair] else 'different'}" for pair in row) for row in rows
        ]
        write_encoded_sheet(list(zip(titles, shown, strict=True)), sheet)
    counts = {"images": len(images), "pairs": len(same), "same": int(same.sum())}
    facts = {"file": with_addresses(str(path)), **counts, **count_formats(images)}
    line = f"{facts['file']}: {count_text(len(same), 'pair')}, {counts['same']:,} of one person"
    return facts, [line, *_format_lines(facts, len(images))]


def _inspect_dataset(path: Path, sheet: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Write the sheet of a dataset; return its facts for JSON, and the lines that describe it."""
    from facetrain.data.open_dataset import open_dataset
    from facetrain.data.remote_dataset import with_addresses
    from facetrain.data.tools.contact_sheet import write_identities_sheet
    from facetrain.data.tools.inspect import describe_images

    source = open_dataset(path)
    skipped, facts = source.skipped, {"folder": with_addresses(str(path)), **describe_images(source)}
    if sheet is not None:
        write_identities_sheet(source, sheet)
    lines = _describe(facts, skipped)
    return facts | {"skipped": [file._asdict() for file in skipped]}, lines


def _describe(facts: dict[str, Any], skipped: list[SkippedFile]) -> list[str]:
    from facetrain.data.skipped_files import skipped_count, skipped_summary

    lines = [f"{facts['folder']}: {images_text(facts['images'], facts['identities'])}"]
    if empty := facts["identities_without_images"]:
        lines.append(f"  {count_text(empty, 'identity has', 'identities have')} no image")
    lines.append("  images per identity: {fewest:,} to {most:,}, median {median:g}".format(**facts))
    lines += _format_lines(facts, facts["sample"])
    if skipped:
        lines.append(f"  left out {skipped_count(skipped)} (--json lists them):")
        lines += [f"    {line}" for line in skipped_summary(skipped)]
    return lines


def _format_lines(facts: dict[str, Any], count: int) -> list[str]:
    lines = [
        f"  {what} of {count_text(count, 'image')}: "
        + ", ".join(f"{name} ({n:,})" for name, n in facts[what].items())
        for what in ("sizes", "formats")
    ]
    return [*lines, f"  the first unreadable one: {facts['unreadable']}"] if "unreadable" in facts else lines


def check(
    dataset: Dataset,
    repair: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write a copy without the faults; it must not exist."),
    ] = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Decode every image of a dataset and list the faults.

    The exit code is 2 if one of them stops a training.
    """
    from facetrain.data.remote_dataset import with_addresses
    from facetrain.data.tools import check as tool

    require_absent(repair)
    with progress_bars("checking", "writing") as (progress, writing):
        report = tool.check(dataset, repair=repair, workers=workers, progress=progress, writing=writing)
    name = with_addresses(str(dataset))
    # Not `with_addresses` for each message: it reads the record of a download each time.
    faults = [replace(fault, message=fault.message.replace(str(dataset), name)) for fault in report.faults]
    if as_json:
        facts = vars(report) | {
            "damaged": report.damaged,
            "faults": list(map(vars, faults)),
            "skipped": [file._asdict() for file in report.skipped],
        }
        typer.echo(json.dumps(facts))
    else:
        echo_line(f"{name}: {images_text(report.images, report.identities)} can be decoded")
        if report.skipped:
            echo_left_out(report.skipped, " (--json lists them)")
        for kind, description in tool.FAULT_KINDS.items():
            messages = [fault.message for fault in faults if fault.kind == kind]
            if messages:
                echo_line(f"  {description}: {len(messages):,}")
                for message in messages[:_PRINTED_FAULTS]:
                    echo_line(f"    {message}")
        if not faults:
            echo_line("  no faults")
        if repair is not None:
            echo_line(f"{repair}: {count_text(report.good, 'image')} written")
            if report.lost_identities:
                echo_lost(report.lost_identities)
    if report.damaged and repair is None:
        raise typer.Exit(2)
