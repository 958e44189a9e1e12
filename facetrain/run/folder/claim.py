"""Run folder of a new run: its name, its creation, and its reuse after a restart. For the rank that writes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from facetrain.checkpoint.commit import CHECKPOINTS, complete_steps, step_folder
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.run_id import RUN_ID_FILE
from facetrain.config.loading import CONFIG_FILE
from facetrain.errors import CheckpointError, RunError, UsageError
from facetrain.files import creation_fault, os_errors_as
from facetrain.models.model_file import MODEL_FILE
from facetrain.own_parts import allow_option
from facetrain.run.folder.earlier import RENAME_CHECK
from facetrain.run.folder.environment import launchers_in
from facetrain.run.folder.lease import Lease
from facetrain.run.folder.lock_file import LOCK_FILE, read_holder
from facetrain.run.folder.run_state import FINISHED, read_state
from facetrain.text import shell_path


class ExistingRunError(UsageError):
    """Folder that another run has."""


class FolderClaim:
    """Search for the folder of a run, by the elastic agents that started the job.

    torch's elastic agent starts its ranks again after a failure, or when a host joins. The folder lists the agents that
    have used it, so that restarted ranks find their folder again.
    """

    def __init__(self, launchers: Sequence[str], lease: Lease) -> None:
        self._launchers, self._lease = launchers, lease

    def named(self, folder: Path, *, may_exist: bool = False) -> Path:
        """Create a folder that the user has named; it may exist if it holds no run, or with `may_exist`.

        Raises:
            ExistingRunError: the folder holds the checkpoints of another run.
            UsageError: it cannot be created.
        """
        # A folder that the user names belongs to every restart of the job. A numbered one could be another run's.
        if not may_exist and has_checkpoints(folder) and not self.is_restart(folder):
            raise existing_run(folder)
        return self._create(folder, exist_ok=True)

    def continued(self, folder: Path) -> None:
        """Create the folder of a run that continues and is only in its mirror yet, or check that it can be written to.

        Raises:
            UsageError: it cannot be created or written to.
            RunError: the same for a folder with checkpoints.
        """
        here = "continue a copy of it in another folder"
        self._create(folder, exist_ok=True, instead=here if folder.exists() else "start in another folder")

    def numbered(self, default: Path) -> Path:
        """Create the default folder of a run; if it exists, with the next number: NAME-2.

        The folder is created at once: if several runs start at the same time, only one gets it.
        """
        while True:  # another run may take the folder in between
            folders = [default]
            while os.path.lexists(folders[-1]):  # a link that leads nowhere takes its name, too
                folders.append(default.with_name(f"{default.name}-{len(folders) + 1}"))
            # Restarted ranks continue in the folder that their agent has used, be it the default or a numbered one.
            if used := next(filter(self.was_used, folders), None):
                return self._create(used, exist_ok=True)
            left = next(filter(self._has_left, folders), None)
            with suppress(ExistingRunError):
                folder = self._create(left or folders[-1], exist_ok=left is not None)
                if folder != default:
                    print(f"{default} exists: the folder of this run is {folder}", flush=True)
                return folder

    def was_used(self, folder: Path) -> bool:
        """Return whether an agent of this job has used a folder before, in another process."""
        # An agent restarts processes. The second run of a script has the same agent, and is another run.
        return not self._lease.has_ended(folder) and bool(set(launchers_in(folder)) & set(self._launchers))

    def is_restart(self, folder: Path) -> bool:
        """Return whether the folder has checkpoints of this job, which has been started again."""
        # A job can have restarted without ever having had this folder: it was refused, say.
        return has_checkpoints(folder) and self.was_used(folder)

    def _has_left(self, folder: Path) -> bool:
        """Return whether ranks of this job were killed before they had written into a folder, beside their lock."""
        with suppress(OSError):
            holder = read_holder(folder / LOCK_FILE)
            is_own = holder is not None and not set(holder.launchers).isdisjoint(self._launchers)
            names = [path.name for path in folder.glob("*")]
            return is_own and all(LOCK_FILE in name or name.startswith(RENAME_CHECK) for name in names)
        return False

    def _create(
        self, folder: Path, *, exist_ok: bool, instead: str = "give another --run-dir or run.dir"
    ) -> Path:
        # A folder that has been written to may come back, such as one that a server's failure has made read-only.
        has_trained = has_checkpoints(folder)
        kind = RunError if has_trained else UsageError
        advice = "make it writable, or " * has_trained + instead
        if fault := creation_fault(folder):
            doing = "written to" if folder.exists() else "created"
            raise kind(f"{folder}: cannot be {doing}: {fault}; {advice}")
        with os_errors_as(kind, folder, advice):
            try:
                # Atomic: of two runs that start together, only one gets the default folder.
                self._lease.create(folder, exist_ok=exist_ok)
            except FileExistsError:
                raise ExistingRunError(f"{folder}: already exists") from None
        return folder


def has_checkpoints(folder: Path) -> bool:
    """Return whether a folder has a complete checkpoint."""
    return bool(complete_steps(folder / CHECKPOINTS))


def existing_run(folder: Path) -> ExistingRunError:
    """Return the error for a new run in a folder that has checkpoints."""
    step, names_code = complete_steps(folder / CHECKPOINTS)[-1], False
    with suppress(CheckpointError):
        names_code = Checkpoint(step_folder(folder / CHECKPOINTS, step)).names_code
    command = f"facetrain resume {shell_path(folder)}{allow_option(names_code)}"
    return ExistingRunError(
        f"{folder}: already holds a run, at step {step}; continue it with `{command}`, or start another run with --set "
        "run.name=NAME or --run-dir FOLDER"
    )


def require_replaceable(folder: Path) -> None:
    """Check that a folder without a checkpoint has nothing that a new run must not replace.

    What a run has written that ended before its first checkpoint may be replaced: the same command starts it again.

    Raises:
        ExistingRunError: the folder has the results of a run, or a config that facetrain has not written.
    """
    advice = "give another folder with --run-dir, or move these files out of it"
    if (folder / MODEL_FILE).exists() or read_state(folder).state == FINISHED:
        raise ExistingRunError(
            f"{folder}: has the results of a finished run, which a new one would replace, and no checkpoint to "
            f"continue from; {advice}"
        )
    if (folder / CONFIG_FILE).exists() and not (folder / RUN_ID_FILE).exists():
        raise ExistingRunError(
            f"{folder / CONFIG_FILE}: not written by a run (there is no {RUN_ID_FILE}), and a new run would replace "
            "it; rename it, or give another folder with --run-dir"
        )
