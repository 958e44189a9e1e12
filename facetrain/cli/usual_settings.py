"""Options for the settings that everybody changes, and the keys of the config that they set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from facetrain.errors import UsageError


@dataclass(frozen=True)
class UsualSettings:
    """Settings of the config, each short for one `--set` or several."""

    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATASET",
            help="Dataset to train on. The numbers of identities and images in the config are ignored. Of its "
            "verification sets, those beside the dataset are used; if there is none, all sets that lie there.",
        ),
    ] = None
    epochs: Annotated[int | None, typer.Option(help="Passes over the dataset (train.epochs).")] = None
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Images of a batch on each process (train.batch_size). auto: what fits into the memory of the GPUs; "
            "the learning rate follows.",
        ),
    ] = None
    lr: Annotated[
        str | None,
        typer.Option(
            metavar="X|find",
            help="Learning rate (optim.lr). find: by a test of at most 100 steps, from which only the rate and "
            "its record remain.",
        ),
    ] = None

    def overrides(self) -> tuple[str, ...]:
        """Return the settings as values for the config, KEY=VALUE.

        Raises:
            UsageError: a number is none.
        """
        from facetrain.run.request import as_override, dataset_overrides

        batch, lr = _number("--batch", self.batch, int, "auto"), _number("--lr", self.lr, float, "find")
        given = {"train.epochs": self.epochs, "train.batch_size": batch, "optim.lr": lr}
        values: dict[str, object] = {key: value for key, value in given.items() if value is not None}
        if batch is not None:
            values["train.global_batch_size"] = None
        return (
            *(as_override(key, value) for key, value in values.items()),
            *(() if self.data is None else dataset_overrides(self.data)),
        )

    def choose(self) -> tuple[Literal["batch", "lr"], ...]:
        """Return what the run is to measure."""
        return (*(("batch",) if self.batch == "auto" else ()), *(("lr",) if self.lr == "find" else ()))


def _number(option: str, text: str | None, kind: type[int | float], word: str) -> int | float | None:
    """Return the number that an option gives; None if it gives the word instead, or was not given."""
    try:
        return None if text in (None, word) else kind(text)
    except ValueError:
        raise UsageError(f"{option} {text}: give a number or {word}") from None
