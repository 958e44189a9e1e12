"""Options of `facetrain eval` that select what it evaluates and compares: models, or scores of other systems."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.options import (
    MODEL_HELP,
    DataDir,
    find_run,
    local_file,
    local_set,
)
from facetrain.cli.outputs import echo_line, require_existing
from facetrain.embeddings.inference import Inference
from facetrain.errors import UsageError
from facetrain.verify.protocol_options import EvaluationOptions


@dataclass(frozen=True)
class ModelOrScores:
    """The evaluated system, the sets or pairs that it is evaluated on, and the models beside it."""

    model: Annotated[
        Path | None,
        typer.Argument(
            parser=local_file,
            metavar="MODEL",
            help=f"{MODEL_HELP} Not with --scores. Default: the newest run in the folder runs.",
        ),
    ] = None
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SET",
            parser=local_set,
            help="Evaluation set: a .bin file, or a folder in the layout of IJB, TinyFace or CVLface; a path, an "
            "address, or a name in the folder --data-dir. Repeat the option for several sets. Default: the sets of the "
            "run (eval.targets).",
        ),
    ] = None
    scores: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV",
            help="Scores of another system instead of MODEL: a table with the columns score and genuine, see "
            "docs/evaluation.md.",
        ),
    ] = None
    data_dir: DataDir = None
    slices: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV",
            help="Table with one row for each pair or each image of the set of pairs, the only --target: report error "
            "rates for each value of each column.",
        ),
    ] = None
    gallery_model: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            parser=local_file,
            help="Model of the enrolled faces: it embeds the galleries, and the second image or template of each pair. "
            "Default: MODEL embeds both.",
        ),
    ] = None
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            parser=local_file,
            help="Second model, or a file of another system's scores: test the difference to it on the same pairs and "
            "bootstrap draws.",
        ),
    ] = None

    @property
    def targets(self) -> list[str]:
        """Evaluation sets of the model."""
        return self.target or []

    @property
    def given(self) -> Path:
        """The one of MODEL and --scores that is given, after `check`."""
        given = self.model or self.scores
        assert given is not None, "one is given"
        return given

    def completed(self, *, err: bool) -> ModelOrScores:
        """Return this system with the newest run if none is given, and with the sets of the run if it has no target.

        Raises:
            UsageError: no system is given, and there is no run.
        """
        from facetrain.config.loading import CONFIG_FILE, load_config

        if self.scores is not None:
            return self
        model = find_run(self.model, err=err)
        if not self.target:
            require_existing(model)
        # Only the folder of a run states its sets.
        if self.target or not (model / CONFIG_FILE).is_file():
            return replace(self, model=model)
        targets = list(load_config(model / CONFIG_FILE).eval.targets)
        echo_line(f"{model}: its own verification sets: {', '.join(targets) or 'none'}", err=err)
        return replace(self, model=model, target=targets)

    def check(self, options: EvaluationOptions, inference: Inference) -> None:
        """Check that exactly one system is given, with options that have an effect on it.

        Raises:
            UsageError: not exactly one is given, or there are other options.
        """
        if (self.model is None) == (self.scores is None):
            raise UsageError("give one of MODEL and --scores: the system to evaluate")
        if self.model is not None and not self.targets:
            raise UsageError(f"{self.model}: give the evaluation set with --target")
        if self.against is not None and not options.bootstrap:
            raise UsageError(
                f"--against {self.against}: the difference is tested on bootstrap draws; remove --bootstrap 0"
            )
        if self.model is not None:
            return
        if self.targets:
            raise UsageError(
                f"{self.given}: --target {self.targets[0]} needs a MODEL; to compare one with these scores: facetrain "
                f"eval MODEL --target {self.targets[0]} --against {self.given}"
            )
        if self.slices:
            raise UsageError(
                f"{self.given}: --slices {self.slices} needs a MODEL; add its columns to {self.given}:"
                " unknown columns become slices"
            )
        usual = Inference()
        of_models = {
            f"--data-dir {self.data_dir}": self.data_dir is not None,
            f"--gallery-model {self.gallery_model}": self.gallery_model is not None,
            "--no-flip": not options.flip,
            "--bf16": inference.bf16,
            f"--device {inference.device}": inference.device != usual.device,
            f"--batch-size {inference.batch_size}": inference.batch_size != usual.batch_size,
        }
        for option, is_given in of_models.items():
            if is_given:
                raise UsageError(f"{self.given}: {option} needs a MODEL; scores have no images")
