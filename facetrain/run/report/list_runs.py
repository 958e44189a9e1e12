"""List of the runs of a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from facetrain.checkpoint.commit import CHECKPOINTS, complete_steps
from facetrain.errors import RunError, UsageError
from facetrain.files import error_reason, os_errors_as, write_atomically
from facetrain.pages.render import render
from facetrain.run.folder.run_files import is_run
from facetrain.run.folder.run_state import FAILED, FINISHED, RUNNING, STOPPED, RunState, read_state
from facetrain.run.report.history import History, formatted, trained_loss_of
from facetrain.telemetry.log import warn
from facetrain.text import count_text, percent, printable, table_text

KINDS = {RUNNING: "none", FINISHED: "good", STOPPED: "warn", FAILED: "bad"}
"""State of a run -> kind of its verdict on a page."""
_HEADER = ("run", "state", "step", "checkpoint", "loss", "best accuracy")


class ListedRun(RunState, frozen=True):
    """Run of a list: its state, and what its other files contain."""

    folder: str
    step: int
    """Last step that the run is known to have taken."""
    checkpoint: int | None
    """Step of the newest checkpoint, from which a resume continues; None if there is none."""
    loss: float | str | None
    """Last value of the loss that is trained; text for one that is not finite."""
    best: dict[str, float]
    """Highest accuracy of each verification set, see `History.best`, in the order of `eval.targets`."""


def list_runs(folder: Path) -> list[ListedRun]:
    """Return the runs in a folder, sorted by name; if the folder is itself a run, only that run.

    Raises:
        UsageError: the folder does not exist.
    """
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: there is no such folder; give the one that holds the run folders (run.dir)"
        )
    if is_run(folder):
        return [_describe(folder)]
    runs = []
    with os_errors_as(UsageError, folder):
        paths = sorted(folder.iterdir())
    for path in paths:
        try:
            runs += [_describe(path)] if is_run(path) else []
        except OSError as error:  # the folder of another user
            warn(f"{path}: {error_reason(error)}; it is not listed")
    return runs


def format_runs(runs: list[ListedRun]) -> str:
    """Return the runs as a table."""
    return table_text([_HEADER, *map(_row, runs)])


def write_runs_page(runs: Sequence[ListedRun], title: str, output: Path) -> None:
    """Write a page with the table of runs and their curves, each run in a color.

    Raises:
        RunError: the page cannot be written.
    """
    from facetrain.pages.figures import svg
    from facetrain.run.report.curves import PANELS, draw_curve

    losses = {Path(run.folder): trained_loss_of(Path(run.folder)) for run in runs}
    histories = {folder.name: _drawn_history(folder, loss) for folder, loss in losses.items()}
    trained = [loss for loss in ("loss", "distill_loss") if loss in losses.values()]
    panels = [*(trained or PANELS[:1]), *PANELS[1:]]
    curves = [svg(draw_curve(histories, panel, width=7.5), f"runs-{panel}") for panel in panels]
    rows = [(KINDS.get(run.state, "none"), _row(run)) for run in runs]
    values = {"best": _best_of(runs), "header": _HEADER, "rows": rows, "curves": curves}
    with os_errors_as(RunError, output):
        write_atomically(output, render("run/report/runs.html.j2", title=title, **values))


def _drawn_history(folder: Path, trained: str) -> History:
    """Return the metrics of a run without a margin loss that it does not train."""
    history = History.read(folder)
    if trained != "loss":
        history.metrics.pop("loss", None)
    return history


def _best_of(runs: Sequence[ListedRun]) -> tuple[str, str, str] | None:
    """Return the verdict of the page: the run with the highest accuracy on the set that most runs have."""
    counts = Counter(name for run in runs for name in run.best)
    if not counts:
        return None
    name = counts.most_common(1)[0][0]
    best = max((run for run in runs if name in run.best), key=lambda run: run.best[name])
    words = f"best accuracy on {name}: {Path(best.folder).name}, of {count_text(counts[name], 'run')}"
    return "good", percent(best.best[name]), printable(words)


def _row(run: ListedRun) -> tuple[str, ...]:
    total = "?" if run.total_steps is None else f"{run.total_steps:,}"
    saved = "–" if run.checkpoint is None else f"{run.checkpoint:,}"
    loss = "–" if run.loss is None else formatted(run.loss, ".4f")
    best = ", ".join(f"{name} {percent(value)}" for name, value in run.best.items()) or "–"
    state = run.state + (" early" if run.state == FINISHED and run.reason else "")
    cells = (Path(run.folder).name, state, f"{run.step:,} of {total}", saved, loss, best)
    return tuple(map(printable, cells))


def _describe(folder: Path) -> ListedRun:
    history = History.read(folder)
    # A run that was killed may have saved a step that it has not reported.
    checkpoint = max(complete_steps(folder / CHECKPOINTS), default=None)
    return ListedRun(
        **read_state(folder).model_dump(),
        folder=str(folder.resolve()),
        step=max(history.step, checkpoint or 0),
        checkpoint=checkpoint,
        loss=history.last(trained_loss_of(folder)),
        best=history.best,
    )
