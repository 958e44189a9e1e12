"""Selection of the system that `facetrain eval` evaluates: a model, or scores or embeddings of another system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from facetrain.cli.checkpoints import parse_checkpoint
from facetrain.errors import UsageError


@dataclass(frozen=True)
class EvaluatedSystem:
    """Model, or file of another system's scores or embeddings."""

    path: Path
    """The file, or the model: for a checkpoint of a run its folder."""
    run: Path | None = None
    """MODEL as it was given, maybe a run; None for a file of scores or embeddings."""


def pick_system(
    model: Path | None,
    scores: Path | None,
    embeddings: Path | None,
    pairs: Path | None,
    targets: Sequence[str],
    checkpoint: str | None,
    slices: Sequence[str],
) -> EvaluatedSystem:
    """Return the one of MODEL, --scores and --embeddings that is given.

    Raises:
        UsageError: not exactly one is given, or --target, --pairs, --checkpoint or --slices does not fit it.
        CheckpointError: the run has no such checkpoint.
    """
    given = [one for one in (model, scores, embeddings) if one is not None]
    if len(given) != 1:
        raise UsageError("give one of MODEL, --scores and --embeddings: the system to evaluate")
    if model is not None and not targets:
        raise UsageError(f"{model}: give the evaluation set with --target")
    if model is None and targets:
        raise UsageError(
            f"{given[0]}: --target {targets[0]} needs a MODEL; to compare one with these scores: facetrain eval MODEL "
            f"--target {targets[0]} --against {given[0]}"
        )
    if (embeddings is None) != (pairs is None):
        raise UsageError(
            "--embeddings and --pairs are used together: a file of embeddings and the list of its pairs"
        )
    if model is None:
        _refuse_options_of_models(given[0], pairs, checkpoint, slices)
        return EvaluatedSystem(given[0])
    return EvaluatedSystem(_find_checkpoint(model, checkpoint), run=model)


def _refuse_options_of_models(
    system: Path, pairs: Path | None, checkpoint: str | None, slices: Sequence[str]
) -> None:
    if checkpoint is not None:
        raise UsageError(f"{system}: --checkpoint {checkpoint} needs a MODEL, the run; remove it")
    if slices:
        raise UsageError(
            f"{system}: --slices {slices[0]} needs a MODEL; add its columns to {pairs or system}, where every column "
            "without another meaning is a slice"
        )


def parse_slice_tables(slices: Sequence[str], targets: Sequence[str]) -> dict[str | None, Path]:
    """Parse the values of --slices: return the paths of the tables by the name of the set, None for the only set.

    Raises:
        UsageError: a value has no set, and there are several; or a set has two tables.
    """
    tables: dict[str | None, Path] = {}
    for value in slices:
        name, path = _split_set(value)
        if name is None and len(targets) > 1:
            raise UsageError(f"--slices {value}: there are {len(targets)} sets; write --slices SET={value}")
        if name in tables or (tables and len(targets) == 1):
            raise UsageError(
                f"--slices {value}: a second table of {name or targets[0]}; give one table with all columns"
            )
        tables[name] = path
    return tables


def _split_set(value: str) -> tuple[str | None, Path]:
    """Split `SET=CSV`; a folder or a file may have = in its own name, the name of a set has no folder."""
    name, equals, path = value.partition("=")
    if not equals or Path(name).name != name or Path(value).is_file():
        return None, Path(value)
    return name, Path(path)


def _find_checkpoint(model: Path, checkpoint: str | None) -> Path:
    """Return the folder of a checkpoint of a run; the model itself without `--checkpoint`."""
    if checkpoint is None:
        return model
    from facetrain.checkpoint.load import Checkpoint

    return Checkpoint.open(model, parse_checkpoint(checkpoint)).folder
