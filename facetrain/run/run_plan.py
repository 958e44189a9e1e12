"""The plan of a run: what the leader has decided, and what all ranks build and compare their own data with."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from facetrain.config.changes import ConfigChange
from facetrain.config.schema import Config
from facetrain.run.request import TrainRequest


class RunPlan(BaseModel, frozen=True, ser_json_inf_nan="constants"):
    """Plan of a run. Every rank gets the same one, as JSON."""

    request: TrainRequest
    """What was asked of the leader."""
    config: Config
    """Resolved config: with what was chosen, and with the versions of remote inputs. Its paths are as they were given:
    each host has its own current folder."""
    folder: str
    """Run folder, relative to the current folder of each host if it was given so."""
    run_id: str
    step: int | None = None
    """Step of the checkpoint to continue from; None for a new run."""
    manifest: str = ""
    """Checksum of the checkpoint's manifest."""
    is_fetched: bool = False
    """Whether the checkpoint comes from the mirror: the disk of the leader lacks it, or has it damaged."""
    left_steps: tuple[int, ...] = ()
    """Steps on the disk of the leader that the run has left on another one: they are put aside."""
    restarted: bool = False
    """Whether the elastic agent has started the ranks of this run before, and a host has checkpoints of it."""
    is_over: bool = False
    """Whether the run has ended and its results are there: nothing is left to train or to write."""
    inputs: dict[str, Any]
    """Digests of what the run reads, by name."""
    weights: dict[str, str] = {}
    """Digests of the model files that a new run on several hosts begins with, by config key."""
    changes: tuple[ConfigChange, ...] = ()
    """Config keys that differ from the checkpoint."""
    set_keys: frozenset[str] = frozenset()
    """Config keys and sections that the command sets."""
    chosen: tuple[str, ...] = ()
    """What was chosen and why, a line each."""

    @property
    def resumes(self) -> bool:
        """Whether the run continues from a checkpoint."""
        return self.step is not None

    @property
    def open_choices(self) -> tuple[Literal["batch", "lr"], ...]:
        """What is to be measured before the run can begin, and the request is changed by."""
        return () if self.resumes else self.request.choose

    @property
    def goes_back(self) -> bool:
        """Whether the command chooses the checkpoint. After a restart, the newest one counts."""
        return self.request.checkpoint is not None and not self.restarted
