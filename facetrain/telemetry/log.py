"""log.txt: what happened and when, in sentences."""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger("facetrain")


def log_to(path: Path, rank: int) -> logging.Handler:
    """Write the log of this process to a file from now on; return the handler, for `stop_logging`."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return handler


def stop_logging(handler: logging.Handler) -> None:
    """Close what `log_to` opened."""
    logger.removeHandler(handler)
    handler.close()
