"""Copy of a run in its mirror: what is uploaded, and the wait for it at the end."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from facetrain.checkpoint.commit import CHECKPOINTS, remove_surplus, step_folder
from facetrain.checkpoint.manifest import read_manifest
from facetrain.checkpoint.mirror import RECORDS, Mirror
from facetrain.checkpoint.save import SaveOutcome
from facetrain.checkpoint.uploads import Uploads
from facetrain.config.own_code import allow_option
from facetrain.distributed import collectives
from facetrain.distributed.agreement import only_leader_reports
from facetrain.distributed.grace_period import grace_s
from facetrain.distributed.stop_request import Stopped, StopRequest
from facetrain.distributed.world import World
from facetrain.errors import RunError
from facetrain.run.agree import Agreed
from facetrain.run.folder.lock_file import LOCK_FILE
from facetrain.telemetry.log import warn
from facetrain.text import shell_path


def open_uploads(
    run: Agreed, mirror: Mirror, has_ended: Callable[[], bool], *, has_claimed: bool = False
) -> Uploads:
    """Return the uploads of a run; its models are uploaded when it has ended. `has_claimed` as in `Uploads`."""
    return Uploads(
        mirror,
        run.folder / CHECKPOINTS,
        keep=run.config.checkpoint.keep,
        best_metric=run.config.checkpoint.best_metric,
        run_files=partial(_files_to_upload, run.folder, has_ended),
        has_claimed=has_claimed,
    )


def saved_checkpoint(run: Agreed, step: int, *, is_leader: bool) -> SaveOutcome:
    """Return the checkpoint of a step, as a save whose files are those on this disk."""
    if not run.hosts.is_owner:
        return SaveOutcome(step)
    place = step_folder(run.folder / CHECKPOINTS, step)
    manifest = read_manifest(place)
    files = tuple(entry for entry in manifest.files if (place / entry.name).exists())
    return SaveOutcome(step, files=files, manifest=manifest if is_leader else None)


def upload_rest(run: Agreed, step: int, uploads: Uploads, request: StopRequest, world: World) -> int:
    """Upload the last checkpoint and the results of a run that has ended; return the signal that ends the wait, or 0.

    Also remove the checkpoints that were kept for their upload only. Collective.

    Raises:
        RunError: they are not in the mirror.
    """
    last = saved_checkpoint(run, step, is_leader=world.is_leader)
    try:
        uploads.add(last)
        failure = uploads.finish(check_stop=request.raise_if_requested)
    except Stopped:
        number = request.ask()()
        _warn(run, f"{signal.Signals(number).name} received", world)
        return number
    # Only the leader knows it.
    if failure := collectives.broadcast_json(failure):
        raise only_leader_reports(world, RunError(_lost(run, failure)))
    if run.hosts.is_owner:
        settings = run.config.checkpoint
        with suppress(OSError):
            remove_surplus(run.folder / CHECKPOINTS, keep=settings.keep, best_metric=settings.best_metric)
    return 0


def leave_uploads(run: Agreed, uploads: Uploads, world: World) -> None:
    """Wait for the uploads of a run that a signal ends: there is little time. Collective."""
    if failure := uploads.finish(grace_s() / 2):
        _warn(run, failure, world)


def uploads_rest(run: Agreed) -> str:
    """Return the command that uploads what is missing, as the end of a message."""
    return f"`facetrain resume {shell_path(run.folder)}{allow_option(run.config)}` uploads the rest"


def _warn(run: Agreed, failure: str, world: World) -> None:
    if world.is_leader:
        warn(_lost(run, failure))


def _lost(run: Agreed, failure: str) -> str:
    return (
        f"the newest checkpoint or its results are not in checkpoint.mirror: {failure}; {uploads_rest(run)}"
    )


def _files_to_upload(folder: Path, has_ended: Callable[[], bool]) -> list[Path]:
    """Return the files of the run folder that the mirror gets with a checkpoint: models at the end of the run only."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.name != LOCK_FILE
        and (path.suffix in RECORDS or has_ended())
    ]
