"""Option `--checkpoint` of the commands that read a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from facetrain.errors import UsageError

if TYPE_CHECKING:
    from facetrain.checkpoint.load import CheckpointChoice

_NEWEST_SOUND = "newest-sound"
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        metavar="STEP|newest-sound",
        help="Checkpoint of the run to use: its step, or newest-sound, the newest one whose files all have their "
        "checksums. Default: the newest.",
    ),
]


def parse_checkpoint(value: str | None) -> CheckpointChoice:
    """Return the choice that a value of the option makes.

    Raises:
        UsageError: it is neither a step nor newest-sound.
    """
    if value is None or value == _NEWEST_SOUND:
        return value  # type: ignore[return-value]
    if not (value.isascii() and value.isdigit()):
        raise UsageError(f"--checkpoint {value}: give the step of a checkpoint, or {_NEWEST_SOUND}")
    return int(value)
