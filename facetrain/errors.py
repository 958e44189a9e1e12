"""Exceptions of facetrain, and the exit code with which each ends a command.

    FacetrainError                    1
    ├── UsageError                    2   input that cannot be used
    │   ├── ConfigError               2   config: unknown key, value out of range, sections that contradict each other
    │   ├── DataError                 2   dataset or verification set
    │   │   ├── UnreadableError       2   bytes of a file that cannot be read, such as those of one image
    │   │   │   ├── RecordError       2   RecordIO file: framing, header or index
    │   │   │   └── ImageError        2   bytes that cannot be decoded to an image
    │   │   └── PairsError            2   .bin verification set or pair list
    │   └── ModelError                2   weights, name of a backbone, model file
    └── RunError                      1   failure with valid input
        ├── CheckpointError           1   failed save, or incomplete checkpoint
        │   ├── NoCheckpointError     2   no checkpoint at the given path
        │   ├── DamagedCheckpointError 1  a file of a checkpoint is missing or changed
        │   └── ForeignCheckpointError 1  checkpoint of another run or of another step
        ├── DivergedError             1   loss or gradients not finite for several steps
        ├── SkippedError              1   more unreadable images than the config allows
        ├── RankError                 1   another rank does not answer
        │   └── LostRankError         3   another rank has ended; the launcher exits with that rank's code
        └── LaunchError               1   worker processes that could not be started

A message is one line. It states the location, the fault with the value that was found, and the remedy. The command
line prints it after `error: `, and adds a traceback only with `--debug`.
"""

from typing import TypeVar


class FacetrainError(Exception):
    """Base class of all exceptions that facetrain raises on purpose."""

    exit_code = 1
    is_of_all_ranks = False
    """Whether all ranks end now, with this error or one that another of them prints."""


class UsageError(FacetrainError):
    """Input that cannot be used: an option, a config, a file."""

    exit_code = 2


class ConfigError(UsageError):
    """Invalid config: an unknown key, a value out of range, or sections that contradict each other."""


class DataError(UsageError):
    """Dataset that cannot be read or does not match the config."""


class UnreadableError(DataError):
    """Bytes of a file that cannot be read, or that its checksum contradicts, such as those of one image."""


class RecordError(UnreadableError):
    """RecordIO file with invalid framing, header or index."""


class ImageError(UnreadableError):
    """Bytes that cannot be decoded, or an image that is larger than facetrain accepts."""


class PairsError(DataError):
    """Verification set or pair list with an invalid format."""


class ModelError(UsageError):
    """Weights, a model file or a backbone name that cannot be used."""


class RunError(FacetrainError):
    """Failure of a run whose input was valid."""


class CheckpointError(RunError):
    """Checkpoint that could not be written, or that is incomplete."""


class NoCheckpointError(CheckpointError):
    """Missing checkpoint: there is none at the given path."""

    exit_code = 2


class DamagedCheckpointError(CheckpointError):
    """Damaged checkpoint: a file is missing, changed, or not a regular file."""


class ForeignCheckpointError(CheckpointError):
    """Checkpoint below a run folder that another run wrote, or that has the name of another step."""


class DivergedError(RunError):
    """Loss or gradients that were not finite for too many steps in a row."""

    def __init__(self, message: str, report: dict[str, object]) -> None:
        """Take the message, and the data that is needed to reproduce the last of these steps."""
        super().__init__(message)
        self.report = report


class SkippedError(RunError):
    """More unreadable images than `data.max_skipped`. All ranks raise it after the same step."""


class RankError(RunError):
    """Another rank that did not answer in time."""


class LostRankError(RankError):
    """Another rank that has ended. The command line prints nothing: the rank that failed prints the reason."""

    # Different from all other codes: the launcher takes the exit code of a rank that knows the reason.
    exit_code = 3


class LaunchError(RunError):
    """Worker processes that could not be started."""


def unprinted(message: str, exit_code: int) -> LostRankError:
    """Return an error that the command line does not print, because another rank does, with its exit code."""
    error = LostRankError(message)
    error.exit_code = exit_code
    return of_all_ranks(error)


def is_final(error: BaseException) -> bool:
    """Return whether every restart would end with the same error: not that of data, whose file system may come back."""
    is_of_input = isinstance(error, UsageError) and error.exit_code == UsageError.exit_code
    return is_of_input and not isinstance(error, DataError)


_Error = TypeVar("_Error", bound=FacetrainError)


def of_all_ranks(error: _Error) -> _Error:
    """Mark an error that all ranks have agreed on, and return it."""
    error.is_of_all_ranks = True
    return error


def missing_package(error: ImportError, extra: str) -> str:
    """Return which package a failed import needs, and the command that installs it, as the end of a message."""
    return f"needs {error.name}; install it with `pip install 'facetrain[{extra}]'`"


def install_torch() -> str:
    """Return how to install a torch and a torchvision that fit each other and facetrain, for a message."""
    from importlib import metadata  # slow, and rarely needed

    try:
        requirements = metadata.requires("facetrain") or []
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        requirements = ["torch", "torchvision"]
    packages = " ".join(f"'{line}'" for line in requirements if line.startswith("torch"))
    return f"install both in one command, from one index: pip install --force-reinstall {packages}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an operation failed because the GPU or the host has too little memory left.

    torch raises a plain RuntimeError for the host, and for NVIDIA's libraries, which allocate GPU memory themselves:
    only its text differs from that of other errors.
    """
    words = ("out of memory", "allocate memory", "_ALLOC_FAILED")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )
