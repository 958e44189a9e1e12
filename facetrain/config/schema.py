"""Config of a run, composed of the settings of its parts, with the rules that concern several of them.

The docstrings of the keys become the descriptions of `facetrain config schema` and of docs/config.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from facetrain.backbone.settings import ModelSettings
from facetrain.checkpoint.settings import CheckpointSettings
from facetrain.data.settings import DataSettings
from facetrain.head.settings import HeadSettings
from facetrain.optim.settings import OptimSettings
from facetrain.remote.address import is_remote, without_version
from facetrain.settings import PathText, Settings
from facetrain.telemetry.settings import LogSettings
from facetrain.training.settings import DistillSettings, TrainSettings
from facetrain.verify.settings import EvalSettings

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class RunSettings(Settings):
    """Name and place of the run."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)] = "run"
    """Name of the run. The run folder is `dir`/`name`; if that exists, a new run gets `name`-2, and so on."""
    dir: PathText = "runs"
    """Folder that holds the run folders."""


class Config(Settings):
    """Config of a run."""

    recipe: Literal["arcface2022", "head"] = "arcface2022"
    """Defaults of keys that the config does not give. arcface2022: the recipe of arcface_torch's published results
    (power 2, exact margin gradient). head: its present code, git's HEAD (power 1, straight-through gradient)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 2048
    """Seed of all random numbers."""
    run: RunSettings = RunSettings()
    data: DataSettings
    model: ModelSettings = ModelSettings()
    head: HeadSettings = HeadSettings()
    distill: DistillSettings | None = None
    """null: no teacher."""
    optim: OptimSettings = OptimSettings()
    train: TrainSettings = TrainSettings()
    eval: EvalSettings = EvalSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _check_head_init_from(self) -> Self:
        if self.head.init_from != "reinit" and self.model.init_from is None:
            raise ValueError(
                f"head.init_from: {self.head.init_from} needs model.init_from, the model that has the centers"
            )
        return self

    @model_validator(mode="after")
    def _check_expectations(self) -> Self:
        if self.has_expectations and self.head.placement != "device":
            raise ValueError(
                f"head.expectations cannot be combined with head.placement: {self.head.placement}; use device, or set "
                "expectations to off in the section head and in all stages"
            )
        return self

    @model_validator(mode="after")
    def _check_compile(self) -> Self:
        if self.train.compile != "reduce-overhead":
            return self
        # A replay writes to the memory of the one before: gradients must not add up over micro-batches, and blocks
        # must not run again in the backward pass.
        for key, value, needed in (
            ("optim.accumulate", self.optim.accumulate, 1),
            ("model.checkpoint_activations", self.model.checkpoint_activations, False),
        ):
            if value != needed:
                raise ValueError(
                    f"train.compile: reduce-overhead cannot be combined with {key}: {json.dumps(value)}; set "
                    "train.compile to on"
                )
        return self

    @property
    def has_expectations(self) -> bool:
        """Whether the classes have expectations, at least in a stage."""
        values = (self.head.expectations, *(stage.expectations for stage in self.train.stages))
        return any(value not in (None, "off") for value in values)

    @property
    def eval_dir(self) -> str:
        """Folder of the verification sets: `eval.dir`, or the folder of the training data."""
        train = without_version(self.data.train)
        parent = train.rpartition("/")[0] if is_remote(train) else str(Path(train).parent)
        return self.eval.dir or (parent if self.data.is_file else train)

    @property
    def local_eval_dir(self) -> Path:
        """Folder in which sets on the disk are looked for: `eval_dir`, or the current folder if that is an address."""
        return Path() if is_remote(self.eval_dir) else Path(self.eval_dir)

    @property
    def inherits_centers(self) -> bool:
        """Whether a new run begins with class centers of another one."""
        return self.model.init_from is not None and self.head.init_from != "reinit"

    @property
    def trained_loss(self) -> str:
        """Metric of the loss that is trained: the margin loss, or without it the one of the distillation."""
        return "distill_loss" if self.distill is not None and self.distill.margin_weight == 0 else "loss"


def file_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file, for editors.

    No key of a section is required: the file that `extends` names, or --set, can give it.
    """
    schema = Config.model_json_schema()
    for section in (schema, *(schema["$defs"][kind.__name__] for kind in (DataSettings, DistillSettings))):
        del section["required"]
    extends = {
        "type": "string",
        "description": "File whose values this file overrides, relative to this file.",
    }
    schema["properties"] = {"extends": extends, **schema["properties"]}
    return schema


RECIPES: dict[str, dict[str, object]] = {
    "arcface2022": {
        "optim": {"power": 2.0},
        "head": {"margin": {"gradient": "exact"}},
    },
    "head": {
        "optim": {"power": 1.0},
        "head": {"margin": {"gradient": "straight_through"}},
    },
}
