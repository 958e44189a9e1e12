"""Page of a fine-tuning: the verdict, faces, what was left out, hardest pairs, and the report of the run."""

from __future__ import annotations

from facetrain.data.beside_dataset import SKIPPED_TABLE
from facetrain.data.open_dataset import open_dataset
from facetrain.data.skipped_files import read_skipped_table, skipped_count, skipped_summary
from facetrain.data.tools.contact_sheet import html_rows, identity_rows, shown_of
from facetrain.errors import RunError
from facetrain.files import os_errors_as, write_atomically
from facetrain.finetune.judge import Verdict, describe_thresholds, headline
from facetrain.finetune.other_people import Harm, accuracy_of
from facetrain.finetune.prepare import Prepared
from facetrain.pages.render import render
from facetrain.run.report.page import run_values
from facetrain.text import percent
from facetrain.verify.output.hardest_pairs import hardest_pairs_of, pair_groups


def write_page(prepared: Prepared, verdict: Verdict) -> None:
    """Write the page of a fine-tuning. It needs no network and has no script.

    Raises:
        RunError: it cannot be written.
    """
    place = prepared.place
    faces = open_dataset(place.faces)
    rows = identity_rows(faces)
    left_out = read_skipped_table(place.faces / SKIPPED_TABLE)
    judged = verdict.judged
    page = render(
        "finetune/page.html.j2",
        title=f"Fine-tuning in {place.folder}",
        headline=_headline(verdict),
        thresholds=describe_thresholds(verdict),
        other_people=_other_people(verdict.tried),
        face_rows=html_rows(rows),
        faces_note=shown_of(rows, faces),
        left_out=f"{skipped_count(left_out)} left out",
        left_out_lines=skipped_summary(left_out),
        hardest=[
            (f"Hardest pairs of {name}", pair_groups(hardest_pairs_of(result, judged.sets[name])))
            for name, result in judged.results.items()
        ]
        if judged
        else [],
        choices=[(choice.settings, choice.reason) for choice in prepared.choices],
        run=run_values(place.run),
    )
    with os_errors_as(RunError, place.page):
        write_atomically(place.page, page)


def _other_people(tried: dict[float, Harm]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the headings and the rows of the table of what each share changes for other people."""
    first = next(iter(tried.values())).before
    rows = [
        ("0%, the first model", "1.000", *(f"{percent(accuracy_of(result))}" for result in first.values()))
    ]
    for share, harm in tried.items():
        accuracies = (f"{percent(accuracy_of(harm.after[name]))}" for name in first)
        rows.append((f"{share:.0%}", f"{harm.cosine:.3f}", *accuracies))
    return ("fine-tuned weights", "cosine kept by strangers", *(f"accuracy, {name}" for name in first)), rows


def _headline(verdict: Verdict) -> tuple[str, str, str, str]:
    """Return kind, number, words and the model that is kept."""
    kind = "good" if verdict.share else "warn"
    gain = verdict.gain
    number = "–" if gain is None else f"{gain.first - gain.second:+z.4f}"
    return kind, number, verdict.reason, headline(verdict)
