"""Weights & Biases as a sink of metrics."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from facetrain.files import read_regular_text, write_atomically
from facetrain.telemetry.metric_names import grouped_name
from facetrain.telemetry.recorder import RunEnd, Sink

_ID_FILE = "wandb_run_id.txt"
_LOGIN_S = 30
"""Seconds after which a question for the API key is given up: a job on a cluster has no one to answer it."""


class WandB(Sink):
    """Writer of scalars to a run of Weights & Biases, under the grouped names of the metrics.

    The id of that run is kept in the run folder, so that a resumed run continues it. Account and mode come from wandb's
    environment variables, such as WANDB_MODE=offline.
    """

    def __init__(
        self, folder: Path, *, project: str, name: str, config: dict[str, Any], resumed: bool
    ) -> None:
        """Open the run.

        Args:
            folder: run folder, which also gets wandb's local files.
            project: project of Weights & Biases.
            name: name of the run.
            config: config of the run as plain values.
            resumed: whether to continue the run whose id is in the folder, if there is one.
        """
        import wandb

        path = folder / _ID_FILE
        if not (resumed and path.exists()):
            # Chosen here and not by the service, so that the id is on the disk before the run exists there.
            write_atomically(path, secrets.token_hex(4) + "\n")
        self._run = wandb.init(
            project=project,
            name=name,
            id=read_regular_text(path).strip(),
            resume="allow",
            dir=folder,
            config=config,
            allow_val_change=True,  # a resumed run may have changed values
            # No messages between the run's, and no copy of its output.
            settings=wandb.Settings(silent=True, console="off", login_timeout=_LOGIN_S),
        )
        # wandb's own step must grow with every call, but a resumed run repeats the steps after its checkpoint.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write the values of a step."""
        self._run.log({"step": step} | {grouped_name(name): value for name, value in values.items()})

    def close(self, end: RunEnd = "finished") -> None:
        """Send what is left, and mark the run as finished, preempted (if it was stopped) or failed."""
        if end == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if end == "finished" else 1)
