"""Uploads of a run's checkpoints to its mirror, beside the training."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from facetrain.checkpoint.commit import step_folder
from facetrain.checkpoint.manifest import Manifest
from facetrain.checkpoint.mirror import Mirror
from facetrain.checkpoint.run_id import run_id_of
from facetrain.checkpoint.save import SaveOutcome
from facetrain.distributed import collectives
from facetrain.errors import CheckpointError, FacetrainError
from facetrain.files import error_reason, os_errors_as
from facetrain.remote.address import public
from facetrain.telemetry.log import logger, warn

_POLL_S = 0.5
_SLOWEST_POLL_S = 30.0
"""Longest pause between two looks at the store: another rank may have failed, which the leader learns later."""


class Uploads:
    """Uploads of saved checkpoints, one after the other, in a thread of each rank.

    The leader's thread checks first that the mirror is still the run's. Then every rank uploads the files that it has
    written. The leader's thread waits until the store has the files of all ranks, and then writes the manifest. What
    the store lacks after all ranks have uploaded, it has lost: the upload has failed. A checkpoint that is saved while
    another one is uploaded waits; a newer one takes its place. An upload that fails is given up, with a warning.

    `add`, `poll` and `finish` are collective, and all ranks begin the same uploads. The threads call no collectives.
    """

    def __init__(
        self,
        mirror: Mirror,
        checkpoints: Path,
        *,
        keep: int,
        best_metric: str | None,
        run_files: Callable[[], Iterable[Path]],
        has_claimed: bool = False,
    ) -> None:
        """Prepare to upload from a folder of checkpoints, of which the mirror keeps as many as the folder.

        `run_files` returns the files of the run folder that the leader uploads with each checkpoint. Before its first
        upload a process takes the mirror, unless it has (`has_claimed`).
        """
        self._mirror, self._checkpoints, self._run_files = mirror, checkpoints, run_files
        self._keep, self._best_metric = keep, best_metric
        self._thread: threading.Thread | None = None
        self._current: SaveOutcome | None = None
        self._pending: SaveOutcome | None = None
        self._failure, self._failure_of_others = "", ""
        self._is_checking, self._is_uploaded, self._has_claimed = False, False, has_claimed
        self._others_ended = threading.Event()

    @property
    def steps_in_use(self) -> set[int]:
        """Steps whose local files this rank needs for an upload."""
        current = self._current if self._is_checking or self._is_busy else None
        return {saved.step for saved in (current, self._pending) if saved}

    def add(self, saved: SaveOutcome) -> None:
        """Upload a checkpoint that was saved, now or when the upload of another one has ended. Do not wait."""
        self._share_progress()
        if self._pending and self._pending.step != saved.step and collectives.rank() == 0:
            warn(
                f"{public(self._mirror.url)}: uploads take longer than the time between two checkpoints: step "
                f"{self._pending.step} is left out"
            )
        self._pending = saved
        self.poll()

    def poll(self) -> None:
        """Begin the next part of the work, if no rank is busy with another one: a check of the mirror, or an upload."""
        # One small reduction, and only while something waits, which all ranks know alike.
        if not self._is_waited_for or collectives.any_rank(self._is_busy):
            return
        if self._is_checking:
            self._is_checking = False
            if not collectives.any_rank(bool(self._failure)):
                self._start(self._upload)
            return
        self._current, self._pending = self._pending, None
        self._failure, self._failure_of_others, self._is_uploaded = "", "", False
        self._others_ended.clear()
        self._is_checking = True
        self._start(self._check_mirror)

    def finish(
        self,
        limit_s: float = math.inf,
        *,
        check_stop: Callable[[], None] = lambda: None,
    ) -> str:
        """Wait for the uploads, up to a time; return on the leader why the newest checkpoint is not in the mirror.

        `check_stop` may end the wait by an exception, on all ranks together. Collective.
        """
        deadline = time.monotonic() + limit_s
        while True:
            self._share_progress()
            self.poll()
            # In short collectives: the uploads may take longer than train.timeout_s.
            if not collectives.any_rank(self._is_busy) and not self._is_waited_for:
                return self._failure
            check_stop()
            if collectives.any_rank(time.monotonic() > deadline):
                return "an upload had not ended when the run ended"
            if self._thread is not None:
                self._thread.join(_POLL_S)

    @property
    def _is_waited_for(self) -> bool:
        """Whether an upload is still to begin. The same on all ranks."""
        return self._is_checking or self._pending is not None

    @property
    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _share_progress(self) -> None:
        """Tell the leader whether the others have uploaded their files, or one of them cannot. Collective."""
        reports = collectives.gather_json([self._failure, self._is_uploaded])
        self._failure_of_others = next((failure for failure, _ in reports if failure), "")
        if self._failure_of_others or all(is_uploaded for _, is_uploaded in reports):
            self._others_ended.set()

    def _start(self, work: Callable[[SaveOutcome], None]) -> None:
        # A daemon: a process that ends must not wait for a store that hangs.
        self._thread = threading.Thread(
            target=work, args=(self._current,), name="checkpoint-upload", daemon=True
        )
        self._thread.start()

    def _check_mirror(self, saved: SaveOutcome) -> None:
        """Check on the leader, before the ranks upload gigabytes in vain, that the mirror is the run's."""
        if saved.manifest is not None:
            with self._recording_failure(saved):
                self._require_mirror(saved.manifest)

    def _upload(self, saved: SaveOutcome) -> None:
        with self._recording_failure(saved):
            self._mirror.upload(step_folder(self._checkpoints, saved.step), saved.step, saved.files)
            if saved.manifest is not None:
                self._require_mirror(saved.manifest)
                self._mirror.upload_files(self._run_files())
            self._is_uploaded = True
            if saved.manifest is not None:
                self._wait_for_all(saved.step, saved.manifest)
                self._require_mirror(saved.manifest)
                self._mirror.commit(saved.manifest)
                logger.info("uploaded the checkpoint of step %d", saved.step)
        if saved.manifest is None or self._failure:
            return
        try:
            self._require_mirror(saved.manifest)  # the checkpoints of another process are not ours to remove
            self._mirror.remove_surplus(saved.step, keep=self._keep, best_metric=self._best_metric)
        except Exception as error:
            warn(f"old checkpoints were not removed from the mirror: {error_reason(error)}")

    @contextmanager
    def _recording_failure(self, saved: SaveOutcome) -> Iterator[None]:
        try:
            with os_errors_as(CheckpointError, self._checkpoints):
                yield
        except Exception as error:  # a failed upload must not end the training, whatever the reason
            self._failure = str(error) if isinstance(error, FacetrainError) else error_reason(error)
            if saved.manifest is not None:
                warn(f"the checkpoint of step {saved.step} was not uploaded: {self._failure}")

    def _require_mirror(self, manifest: Manifest) -> None:
        """Take the mirror for this process, once, and check that no other one has taken it since."""
        run_id = run_id_of(manifest)
        if run_id is None:
            return
        if not self._has_claimed:
            self._mirror.claim(run_id)
            self._has_claimed = True
        self._mirror.require_claim(run_id)

    def _wait_for_all(self, step: int, manifest: Manifest) -> None:
        """Wait on the leader until the store has the files of all ranks.

        Raises:
            CheckpointError: a rank cannot upload its files, or the store has lost one.
        """
        pause_s = _POLL_S
        while True:
            # Before the look at the store: what it lacks after all uploads, it has lost.
            is_last = self._others_ended.is_set()
            missing = self._mirror.missing(step, manifest.files)
            if not missing:
                return
            if is_last:
                lost = f"{public(self._mirror.url)}: {missing[0].name} was uploaded, and is not there"
                raise CheckpointError(self._failure_of_others or lost)
            self._others_ended.wait(pause_s)
            pause_s = min(2 * pause_s, _SLOWEST_POLL_S)
