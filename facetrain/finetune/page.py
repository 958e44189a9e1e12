"""Page of a fine-tuning: the verdict, faces, what was left out, hardest pairs, and the report of the run."""

from __future__ import annotations

from facetrain.data.open_dataset import open_dataset
from facetrain.data.skipped_files import read_skipped_table, skipped_summary
from facetrain.data.tools.contact_sheet import html_rows, identity_rows, shown_of
from facetrain.data.tools.writing import SKIPPED_FILE
from facetrain.errors import RunError
from facetrain.files import os_errors_as, write_atomically
from facetrain.finetune.judge import Verdict, describe
from facetrain.finetune.prepare import Prepared
from facetrain.pages.render import render
from facetrain.run.report.page import run_values
from facetrain.verify.output.hardest_pairs import hardest_pairs_of, pair_groups


def write_page(prepared: Prepared, verdict: Verdict) -> None:
    """Write the page of a fine-tuning. It needs no network and has no script.

    Raises:
        RunError: it cannot be written.
    """
    place, kept, *lines = prepared.place, *describe(verdict, prepared)
    faces = open_dataset(place.faces)
    rows = identity_rows(faces)
    left_out = read_skipped_table(place.faces / SKIPPED_FILE)
    results = verdict.compared.results
    page = render(
        "finetune/page.html.j2",
        title=f"Fine-tuning in {place.folder}",
        headline=(*_headline(verdict, place.pairs.stem), kept),
        lines=lines,
        candidates=[
            (f"{share:.0%} fine-tuned" if share else "the first model", f"{accuracy:.2%}")
            for share, accuracy in verdict.accuracy.items()
        ],
        face_rows=html_rows(rows),
        faces_note=shown_of(rows, faces),
        left_out=f"{len(left_out):,} files left out",
        left_out_lines=skipped_summary(left_out),
        hardest=[
            (
                f"Hardest pairs of {_words(name, place.pairs.stem)}",
                pair_groups(hardest_pairs_of(result, verdict.compared.sets[name])),
            )
            for name, result in results.items()
        ],
        choices=[(choice.settings, choice.reason) for choice in prepared.choices],
        run=run_values(place.run),
    )
    with os_errors_as(RunError, place.page):
        write_atomically(place.page, page)


def _headline(verdict: Verdict, held_out: str) -> tuple[str, str, str]:
    """Return kind, number and words of the verdict: good if the accuracy has risen beyond chance."""
    difference = verdict.compared.differences[held_out]["accuracy"]
    low, high = difference.interval
    words = (
        f"accuracy on {_words(held_out, held_out)}: {difference.first:.2%}, before {difference.second:.2%}"
    )
    if verdict.share == 0:
        return "warn", f"{difference.second:.2%}", f"{words}; the first model is kept"
    kind = "good" if low > 0 else "warn"
    gap = f"{difference.first - difference.second:+.2%}"
    return kind, gap, f"{words} [{low:+.2%}, {high:+.2%}]"


def _words(name: str, held_out: str) -> str:
    return "the photos set aside" if name == held_out else name
