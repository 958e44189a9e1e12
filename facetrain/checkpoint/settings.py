"""Settings of the checkpoints of a run (section `checkpoint` of the config)."""

from __future__ import annotations

from pydantic import Field, field_validator

from facetrain.remote.address import has_secrets
from facetrain.settings import Positive, Settings


class CheckpointSettings(Settings):
    """When checkpoints are saved, and which are kept."""

    every_steps: Positive = 2000
    """Number of steps between two checkpoints. The last step is always saved."""
    keep: Positive = 3
    """Number of newest checkpoints that are kept."""
    best_metric: str | None = None
    """Metric: the checkpoint with its largest value is kept too. SET/accuracy, SET/accuracy_no_flip, SET/auc or
    SET/tar@…. null: only the newest checkpoints."""
    asynchronous: bool = Field(default=True, alias="async")
    """Write checkpoints in the background while the run trains, from a copy in the host's memory. Where it has no room
    for the copies of its ranks, checkpoints are written as with false: training waits for them."""
    mirror: str | None = None
    """Address of a folder in an object store, s3://… or gs://…, that gets a copy of every checkpoint in the background,
    below the name of the run. `facetrain resume ADDRESS/NAME` continues from there. Hosts that share no folder need it.
    null: no copy."""

    @field_validator("mirror")
    @classmethod
    def _check_mirror(cls, mirror: str | None) -> str | None:
        if mirror is None:
            return None
        if not mirror.startswith(("s3://", "gs://")) or has_secrets(mirror):
            raise ValueError(
                "give an address like s3://BUCKET/FOLDER or gs://BUCKET/FOLDER, without credentials"
            )
        return mirror.rstrip("/")
