"""Log file of a run. All ranks of a host append to the same file, and those of other hosts to others."""

from __future__ import annotations

import errno
import logging
import os
import stat
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

from facetrain.errors import RunError
from facetrain.files import error_reason, sync_file
from facetrain.remote.address import public

logger = logging.getLogger("facetrain")
# Without a handler, logging itself prints warnings to standard error, where `warn` prints them already.
logger.addHandler(logging.NullHandler())


class _PrintableFormatter(logging.Formatter):
    """Formatter that escapes control characters: a name with a line break cannot forge a line.

    Passwords in addresses are left out: an exception of a library may have them.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record, without a traceback."""
        return public(super().formatMessage(record))


class LogFile(logging.FileHandler):
    """File handler for a disk that may be full: lines that cannot be written are lost, and training goes on."""

    _has_warned = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, if the file can be opened."""
        with suppress(OSError):
            super().emit(record)

    def sync(self) -> None:
        """Wait until the lines are on the disk; warn, once, if they cannot be written. For any thread."""
        try:
            self._sync()
        except OSError as error:
            with self.lock or nullcontext():
                self._let_open_again()
            if not self._has_warned:
                self._has_warned = True
                warn(f"{self.baseFilename}: {error_reason(error)}; lines of the log may be lost")

    def _sync(self) -> None:
        with self.lock or nullcontext():
            if self.stream is not None and was_replaced(self.stream.fileno(), self.baseFilename):
                self._let_open_again()
            if self.stream is None:
                return
            descriptor = os.dup(self.stream.fileno())
        # Without the lock, because a slow disk would hold up every line, and with it the training.
        try:
            sync_file(descriptor, self.baseFilename)
        finally:
            os.close(descriptor)

    def _let_open_again(self) -> None:
        """Close the file, which the next line opens again: a file server may have lost this one."""
        if self.stream is not None:
            with suppress(OSError):
                self.stream.close()
            self.stream = None

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: logging's default prints a traceback for every line."""

    def close(self) -> None:
        """Close the file, even if its last lines cannot be written."""
        with suppress(OSError):
            super().close()


def was_replaced(descriptor: int, path: Path | str) -> bool:
    """Return whether an open file is no longer the one at its path: it was removed, by another host maybe, or replaced.

    A folder that was moved has taken its files along.
    """
    try:
        ours, theirs = os.fstat(descriptor), os.lstat(path)
    except OSError as error:
        return error.errno in (errno.ESTALE, errno.ENOENT) and os.path.isdir(os.path.dirname(path))
    # Not by a link, which could lead to a file outside of the run.
    return stat.S_ISREG(theirs.st_mode) and (ours.st_dev, ours.st_ino) != (theirs.st_dev, theirs.st_ino)


def warn(message: str) -> None:
    """Write a warning to the log and, because the log may be on a full disk, to standard error."""
    message = public(message)
    logger.warning(message)
    print(f"warning: {message}", file=sys.stderr, flush=True)


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
    formatter = _PrintableFormatter(f"%(asctime)sZ rank {rank} %(levelname)s %(message)s")
    formatter.converter = time.gmtime  # as in state.json; hosts can have different time zones
    handler.setFormatter(formatter)
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
