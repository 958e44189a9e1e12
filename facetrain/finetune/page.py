"""Page of a fine-tuning: results, choices, faces, what was left out, hardest pairs, and the report of the run."""

from __future__ import annotations

from collections.abc import Iterator

from facetrain.data.open_dataset import open_dataset
from facetrain.data.skipped_files import read_skipped_table, skipped_summary
from facetrain.data.tools.contact_sheet import html_row, identity_rows
from facetrain.data.tools.writing import SKIPPED_FILE
from facetrain.errors import RunError
from facetrain.files import os_errors_as, write_atomically
from facetrain.finetune.judge import Verdict, describe
from facetrain.finetune.prepare import Prepared
from facetrain.html_page import data_table, details_table, escape, html_page
from facetrain.run.report.page import run_sections
from facetrain.verify.output.hardest_pairs import hardest_pairs_of, pairs_html


def write_page(prepared: Prepared, verdict: Verdict) -> None:
    """Write the page of a fine-tuning. It needs no network and has no script.

    Raises:
        RunError: it cannot be written.
    """
    page = html_page(f"Fine-tuning in {prepared.place.folder}", _body(prepared, verdict))
    with os_errors_as(RunError, prepared.place.page):
        write_atomically(prepared.place.page, page)


def _body(prepared: Prepared, verdict: Verdict) -> Iterator[str]:
    place = prepared.place
    yield from (f"<p>{escape(line)}</p>" for line in describe(verdict, prepared))
    shares = [[f"{share:.0%}", f"{accuracy:.2%}"] for share, accuracy in verdict.accuracy.items()]
    yield data_table(("share of the fine-tuned weights", "accuracy on the held-out images"), shares)
    yield "<h2>Choices</h2>"
    yield details_table((choice.settings, choice.reason) for choice in prepared.choices)
    yield "<h2>Faces</h2>"
    faces = open_dataset(place.faces)
    yield from map(html_row, identity_rows(faces))
    yield "<h2>Left out</h2>"
    left_out = read_skipped_table(place.faces / SKIPPED_FILE)
    yield f"<p>{len(left_out):,} files</p>" + "".join(
        f"<p>{escape(line)}</p>" for line in skipped_summary(left_out)
    )
    for name, result in verdict.compared.results.items():
        yield f"<h2>{escape(name)}</h2>"
        yield from pairs_html(hardest_pairs_of(result, verdict.compared.sets[name]))
    yield "<h2>Training</h2>"
    yield from run_sections(place.run)
