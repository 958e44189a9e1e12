"""Weights & Biases. Its own variables choose the project and the mode: WANDB_PROJECT, WANDB_MODE=offline."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from facetrain.errors import UsageError, missing_package
from facetrain.telemetry.sink import CLOSE_S, LoggedRun

_FINISH_S = CLOSE_S - 10.0
"""Seconds for the upload of the last metrics. Less than the run waits: W&B says what to do."""


class WeightsAndBiases:
    """A run of W&B with the name of the run folder, whose resume continues it. Its files are in the folder `wandb`."""

    def __init__(self, run: LoggedRun) -> None:
        """Open the run.

        Raises:
            UsageError: the package is not installed, or no user has logged in.
            wandb.errors.CommError: the server does not answer.
        """
        try:
            import wandb
        except ImportError as error:
            raise UsageError(f"log.sinks: wandb {missing_package(error, 'wandb')}") from error
        try:
            self._run = wandb.init(
                # With the name, whose characters W&B may refuse: a copy of the run folder has the id of its original.
                id=f"{run.run_id}-{hashlib.sha256(os.fsencode(run.name)).hexdigest()[:8]}",
                name=run.name,
                dir=str(run.folder),
                config=run.config,
                resume="allow",
                # The console of the run stays what it is. By default, the process would wait without end at its end.
                settings=wandb.Settings(console="off", finish_timeout=_FINISH_S),
            )
        # Not CommError, the class above: a server that does not answer must not end a run that restarts.
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            reason = str(error).removesuffix(".")
            raise UsageError(f"log.sinks: wandb: {reason}, or set WANDB_MODE=offline") from error
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write the numbers of a step."""
        # As a number: W&B drops what comes with an earlier step of its own, and a run may go back.
        self._run.log({"step": step} | values)

    def close(self) -> None:
        """Wait until everything is written, or uploaded."""
        self._run.finish()
