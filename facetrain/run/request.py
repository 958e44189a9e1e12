"""Request of a command or a script for a training run. It touches no file, and goes to the ranks as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from typing import Any, Literal, Self

from pydantic import BaseModel, model_validator

from facetrain.config.loading import values_of_overrides
from facetrain.errors import UsageError
from facetrain.files import require_utf_8
from facetrain.strict_yaml import dump_in_line


def as_override(key: str, value: Any) -> str:
    """Return a value for a dotted key of the config in the form of --set: KEY=VALUE.

    Raises:
        UsageError: as `_require_plain`, or it is or contains nan or inf.
    """
    _require_plain(key, value)
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise UsageError(
            f"{key}: nan and inf cannot be given here; a config file may have them in the options of an own part"
        ) from error
    # Through JSON: it has plain values in place of subclasses, such as NumPy's numbers.
    return f"{key}={dump_in_line(json.loads(text))}"


def _require_plain(key: str, value: Any) -> None:
    """Check that a value of the config is and contains only what JSON has.

    Raises:
        UsageError: it has an object of another type, a key that is no text, or a name that is not UTF-8.
    """
    if isinstance(value, dict):
        for name, each in value.items():
            if not isinstance(name, str):
                raise UsageError(f"{key}: the key {name!r} is not text; use a text")
            _require_plain(f"{key}.{name}", each)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            _require_plain(f"{key}[{index}]", each)
    elif isinstance(value, date):  # which YAML makes of a text without quotes
        raise UsageError(f"{key}: give the date {value} as a text, in quotes")
    elif value is not None and not isinstance(value, str | bool | int | float):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UsageError(f"{key}: a config cannot hold a {kind}; use numbers, texts, lists and dicts")
    else:
        require_utf_8(f"{key}={value}")


def dataset_overrides(dataset: str) -> tuple[str, ...]:
    """Return the values, KEY=VALUE, for a dataset in place of that of the config, whose numbers are not its own."""
    values = {"data.train": dataset, "data.num_classes": None, "data.num_images": None}
    return tuple(as_override(key, value) for key, value in values.items())


CHOSEN_KEYS = {"batch": ("train.batch_size", "train.global_batch_size"), "lr": ("optim.lr",)}
"""Config keys that a choice measures: a command gives one of the two."""
FOLDER_TERM = "the run folder"
"""Name of the run folder among the terms of a request."""


class TrainRequest(BaseModel, frozen=True, extra="forbid", ser_json_inf_nan="constants"):
    """Request for a new run, or for the continuation of one. The request of rank 0 is the one that counts."""

    command: Literal["train", "resume"] = "train"
    config: str | dict[str, Any] | None = None
    """Config of a new run: a file, the name of a preset, or its values; None: the default of each key."""
    overrides: tuple[str, ...] = ()
    """Values that win over the config, KEY=VALUE. A run that continues may only change by them."""
    run_dir: str | None = None
    """Folder of the run; of a run to continue also its address in the mirror. None: the default, or the newest run."""
    checkpoint: int | None = None
    """Step of the checkpoint to continue from; None: the newest."""
    resume_existing: bool = False
    """Whether `train` continues the run that its folder has, if there is one."""
    own_data: bool = False
    """Whether the dataset is another one than that of the config, whose verification sets may not be there."""
    choose: tuple[Literal["batch", "lr"], ...] = ()
    """What a new run measures before it is resolved: the batch size that fits, the learning rate to use."""
    measured: dict[str, Any] = {}
    """Config keys that were measured, with their values, which win over `overrides`."""
    chosen: tuple[str, ...] = ()
    """What was measured and chosen, a line each."""
    allow_code: bool = False
    """Whether the code may run that a file of the config names, such as a teacher, or the config of a run to continue.
    That of the config of a new run may."""
    profile: bool = False
    """Whether a few steps are profiled."""
    is_part: bool = False
    """Whether the run is a part of another command, which says itself what can be done next."""
    command_line: tuple[str, ...] = ()
    """Arguments of `facetrain`, for the record; empty in a program of the user, whose arguments may be secret."""

    @model_validator(mode="after")
    def _require_text(self) -> Self:
        """Refuse what a text cannot hold: the request goes to the ranks as JSON, its values to the config as YAML.

        An empty run folder would be the newest run, or the default.
        """
        if self.run_dir == "":
            raise UsageError("the run folder is an empty text; give a folder, or leave it out")
        for name in (self.run_dir, self.config, *self.overrides):
            if isinstance(name, str):
                require_utf_8(name)
        for section, value in self.config.items() if isinstance(self.config, dict) else ():
            _require_plain(section, value)
        return self

    @property
    def has_data_alone(self) -> bool:
        """Whether a dataset is given and no config: network, number format and rate are chosen for it."""
        return self.own_data and self.config is None

    @property
    def terms(self) -> dict[str, Any]:
        """What a command asks beside the config of a run, as JSON: the same on all its hosts.

        Not what a host decides for itself: whether code may run on it. Nor `--resume`, which only rank 0 follows: a
        host that joins later has it, where the first command had not.
        """
        return {
            "command": self.command,
            FOLDER_TERM: self.run_dir,
            "--checkpoint": self.checkpoint,
            "--batch auto": "batch" in self.choose,
            "--lr find": "lr" in self.choose,
            "--profile": self.profile,
            # For `train`, the configs are compared with their overrides.
            **(values_of_overrides(self.overrides) if self.command == "resume" else {}),
        }

    def with_chosen(
        self, choice: Literal["batch", "lr"], values: Mapping[str, Any], line: str
    ) -> TrainRequest:
        """Return the request with values in place of a choice, and with a line that says why."""
        return self.model_copy(
            update={
                "choose": tuple(each for each in self.choose if each != choice),
                "measured": {**self.measured, **values},
                "chosen": (*self.chosen, line),
            }
        )
