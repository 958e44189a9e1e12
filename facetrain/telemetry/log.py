"""log.txt: what happened and when, in sentences."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("facetrain")


class _LogFile(logging.FileHandler):
    """A file that may be on a full disk: what it does not take is lost, and training goes on."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Keep quiet: logging's own way is a traceback for every line."""

    def close(self) -> None:
        """Close the file, whether or not it takes the last lines."""
        with suppress(OSError):
            super().close()


def warn(line: str) -> None:
    """Say what somebody should know while training goes on: in the log, which may be on a full disk, and aloud."""
    logger.warning(line)
    print(f"warning: {line}", file=sys.stderr, flush=True)


def log_to(path: Path, rank: int) -> logging.Handler:
    """Write the log of this process to a file from now on; return the handler, for `stop_logging`."""
    path.parent.mkdir(parents=True, exist_ok=True)  # a machine that does not share the run's folder has none
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return handler


def stop_logging(handler: logging.Handler) -> None:
    """Close what `log_to` opened."""
    logger.removeHandler(handler)
    handler.close()
