"""Settings of the checkpoints of a run (section `checkpoint` of the config)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from facetrain.settings import Positive, Settings


class CheckpointSettings(Settings):
    """Checkpoints."""

    every_steps: Positive = 2000
    """Number of steps between two checkpoints. The last step is always saved."""
    every_minutes: Annotated[float, Field(gt=0)] | None = None
    """Minutes after which a checkpoint is saved, in addition to `every_steps`. null: no limit."""
    keep: Positive = 3
    """Number of newest checkpoints that are kept."""
    best_metric: str | None = None
    """Metric whose best checkpoint is kept too, for example lfw/accuracy. null: only the newest checkpoints."""
    asynchronous: bool = Field(default=True, alias="async")
    """Write checkpoints in the background while the run trains."""
