"""Options of `facetrain train` for the settings that everybody changes."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from facetrain.cli.outputs import echo_choice
from facetrain.errors import UsageError
from facetrain.remote.download import is_name

if TYPE_CHECKING:
    from facetrain.config.schema import Config
    from facetrain.run.choices import Choices


@dataclass(frozen=True)
class UsualSettings:
    """Settings of the config, each short for one `--set` or several."""

    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATASET",
            help="Dataset to train on. The numbers of identities and images in the config are ignored, and so are "
            "verification sets that do not exist.",
        ),
    ] = None
    epochs: Annotated[int | None, typer.Option(help="Passes over the dataset (train.epochs).")] = None
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Images per step on each process (train.batch_size). auto: what fits into the memory of the GPUs; the "
            "learning rate follows.",
        ),
    ] = None
    lr: Annotated[
        str | None,
        typer.Option(
            metavar="X|find",
            help="Learning rate (optim.lr). find: by a test of at most 100 steps, from which nothing but the rate "
            "remains.",
        ),
    ] = None

    def load(self, config: Path | None, overrides: Sequence[str]) -> tuple[Config, frozenset[str]]:
        """Return the config with these settings, and the keys that they and the overrides set. The overrides win.

        Raises:
            UsageError: there is neither a config nor a dataset, or a setting is given and to be chosen.
            ConfigError: the config or a setting is invalid.
        """
        from facetrain.config.loading import build_config, load_config, override_keys

        settings = [*self._overrides(), *overrides]

        def load(*more: str) -> Config:
            if config is not None:
                return load_config(config, [*settings, *more])
            return build_config({}, "the defaults", [*settings, *more])

        if config is None and self.data is None:
            raise UsageError(
                "facetrain train: give --config FILE, --preset NAME or --data DATASET; `facetrain config list` lists "
                "the presets"
            )
        keys, loaded = override_keys(settings), load()
        for option, is_chosen, chosen_keys in (
            ("--batch auto", self.batch == "auto", {"train.batch_size", "train.global_batch_size"}),
            ("--lr find", self.lr == "find", {"optim.lr"}),
        ):
            if is_chosen and (both := chosen_keys & keys):
                raise UsageError(f"{option} and --set {min(both)}: give one of them")
        if self.data is None or keys & {"eval", "eval.targets", "eval.dir"}:
            return loaded, keys
        present = [target for target in loaded.eval.targets if _exists(target, Path(loaded.eval_dir))]
        absent = [target for target in loaded.eval.targets if target not in present]
        if absent:
            echo_choice(
                f"{loaded.eval_dir} has no verification sets {', '.join(absent)}: training goes without; give the "
                "folder of others with --set eval.dir=FOLDER and their names with --set eval.targets=[NAME]"
            )
        return load(f"eval.targets={json.dumps(present)}"), keys | {"eval.targets"}

    def choices(self, set_keys: Set[str]) -> Choices:
        """Return what a new run chooses itself; `set_keys` are the keys that the command line sets."""
        from facetrain.run.choices import Choices

        find = self.lr == "find"
        if self.batch != "auto":
            return Choices(lr=find)
        from facetrain.plan.fit_batch import fit_batch  # needs 100 MB, for what counts operations

        return Choices(partial(fit_batch, keep_lr=find or "optim.lr" in set_keys), find)

    def _overrides(self) -> list[str]:
        batch, lr = _number("--batch", self.batch, int, "auto"), _number("--lr", self.lr, float, "find")
        given = {"train.epochs": self.epochs, "train.batch_size": batch, "optim.lr": lr}
        values: dict[str, object] = {key: value for key, value in given.items() if value is not None}
        if batch is not None:
            values["train.global_batch_size"] = None
        if self.data is not None:
            if not is_name(self.data) and not Path(self.data).exists():
                raise UsageError(f"--data {self.data}: no such file or folder")
            values |= {"data.train": self.data}
            values |= dict.fromkeys(("data.num_classes", "data.num_images"))
        return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _number(option: str, text: str | None, kind: type[int | float], word: str) -> int | float | None:
    """Return the number that an option gives; None if it gives the word instead, or was not given."""
    try:
        return None if text in (None, word) else kind(text)
    except ValueError:
        raise UsageError(f"{option} {text}: give a number or {word}") from None


def _exists(target: str, folder: Path) -> bool:
    names = (target, target.upper(), f"{target}.bin")
    return Path(target).exists() or any((folder / name).exists() for name in names)
