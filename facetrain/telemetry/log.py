"""Log file of a run: log.txt. All ranks of a host append to the same file."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

from facetrain.errors import RunError
from facetrain.files import printable, sync_file

logger = logging.getLogger("facetrain")
# Without a handler, logging itself prints warnings to standard error, where `warn` prints them already.
logger.addHandler(logging.NullHandler())


class _PrintableFormatter(logging.Formatter):
    """Formatter that escapes control characters: a name with a line break cannot forge a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record, without a traceback."""
        return printable(super().formatMessage(record))


class LogFile(logging.FileHandler):
    """File handler for a disk that may be full: lines that cannot be written are lost, and training goes on."""

    def sync(self) -> None:
        """Wait until the lines are on the disk. For any thread.

        Raises:
            OSError: they cannot be written.
        """
        with self.lock or nullcontext():
            if self.stream is None:
                return
            descriptor = os.dup(self.stream.fileno())
        # Without the lock, because a slow disk would hold up every line, and with it the training.
        try:
            sync_file(descriptor, self.baseFilename)
        finally:
            os.close(descriptor)

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: logging's default prints a traceback for every line."""

    def close(self) -> None:
        """Close the file, even if its last lines cannot be written."""
        with suppress(OSError):
            super().close()


def warn(message: str) -> None:
    """Write a warning to the log and, because the log may be on a full disk, to standard error."""
    logger.warning(message)
    print(f"warning: {printable(message)}", file=sys.stderr, flush=True)


def log_to(path: Path, rank: int) -> LogFile:
    """Write the log of this process to a file from now on; return the handler, for `stop_logging`.

    Raises:
        RunError: there is something else than a regular file: to open a pipe would wait without end, and a link could
            lead to a file outside of the run.
    """
    path.parent.mkdir(parents=True, exist_ok=True)  # missing on a host that does not share the run folder
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise RunError(f"{path}: not a regular file; remove it, and the run writes a new one")
    handler = LogFile(path, encoding="utf-8")
    handler.setFormatter(_PrintableFormatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # A program that calls facetrain may have a handler at the root, which would print every line again.
    logger.propagate = False
    return handler


def stop_logging(handler: logging.Handler) -> None:
    """Close the file that `log_to` has opened, and leave messages to the handlers of the program again."""
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    handler.close()
