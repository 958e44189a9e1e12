"""Every error that facetrain raises on purpose, and the exit code that each one ends the command with.

    FacetrainError                    1
    ├── UsageError                    2   what the user gave cannot be used
    │   ├── ConfigError               2   a run description: unknown key, value out of range, parts that disagree
    │   ├── DataError                 2   a dataset or verification set
    │   │   ├── RecordError           2   a RecordIO file: framing, header, index
    │   │   ├── ImageError            2   bytes that are no image, or not one that we accept
    │   │   └── PairsError            2   a .bin verification set or a list of pairs
    │   └── ModelError                2   weights, a backbone's name, a model file
    └── RunError                      1   what was given was right, and the run failed
        ├── CheckpointError           1   a save that failed, or a checkpoint that is not whole
        │   └── NoCheckpointError     2   none is where the user says
        ├── DivergedError             1   loss or gradients are not finite, step after step
        ├── SkippedError              1   more images could not be read than the run allows
        ├── RankError                 1   another rank does not answer
        │   └── LostRankError         3   another rank has ended; the launcher makes 1 of it
        └── LaunchError               1   the processes could not be started

A message says what is wrong, where, what was found, and what to do. It is one line: the command line
prints it after `error: `, and a traceback only with `--debug`.
"""


class FacetrainError(Exception):
    """The root: anything that facetrain itself has recognized as wrong."""

    exit_code = 1


class UsageError(FacetrainError):
    """What the user gave cannot be used as it is."""

    exit_code = 2


class ConfigError(UsageError):
    """A run description that cannot be followed."""


class DataError(UsageError):
    """A dataset that cannot be read, or does not agree with the config."""


class RecordError(DataError):
    """A RecordIO file whose framing, header or index is wrong."""


class ImageError(DataError):
    """Bytes that do not decode to an image that facetrain accepts."""


class PairsError(DataError):
    """A verification set that is not what its format says."""


class ModelError(UsageError):
    """Weights or a model name that do not fit."""


class RunError(FacetrainError):
    """The run failed although what was given was right."""


class CheckpointError(RunError):
    """A checkpoint could not be written, or is not whole."""


class NoCheckpointError(CheckpointError):
    """There is no checkpoint where one was asked for."""

    exit_code = 2


class DivergedError(RunError):
    """The loss or the gradients were not finite for too many steps in a row."""

    def __init__(self, message: str, report: dict[str, object] | None = None) -> None:
        """Take the message, and what is needed to see the last of these steps again."""
        super().__init__(message)
        self.report = report or {}


class SkippedError(RunError):
    """More images had to be skipped than `data.max_skipped`; every rank raises it after the same step."""


class RankError(RunError):
    """Another rank did not answer in time."""


class LostRankError(RankError):
    """Another rank has ended. That rank, or whoever ended it, says why: the command line keeps quiet about this."""

    # Of its own, so that the launcher can tell the ranks that know the reason from those that do not.
    exit_code = 3


class LaunchError(RunError):
    """The worker processes could not be started."""
