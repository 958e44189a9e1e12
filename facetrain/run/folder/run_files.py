"""Files of a run folder: those that make it one, and the names that several modules use."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from facetrain.checkpoint.commit import CHECKPOINTS
from facetrain.checkpoint.run_id import RUN_ID_FILE
from facetrain.config.loading import CONFIG_FILE, dump_config
from facetrain.config.schema import Config
from facetrain.errors import RunError, UsageError
from facetrain.files import make_folder, os_errors_as, write_atomically

ENVIRONMENT_FILE = "environment.json"
CARDS_FILE = "dataset_cards.yaml"
"""Cards of the training data."""
LOG_FILE = "log.txt"
"""Log of the ranks on the host of rank 0."""
METRICS_FILE = "metrics.jsonl"
REPORT_FILE = "report.html"
AUGMENTED_FILE = "augmented.png"
"""The first images, as the network gets them."""
PAIRS_FILE = "hardest_pairs.json"
"""Hardest pairs of the last verification."""
SKIPPED_FILE = "skipped_images.txt"
"""Images that could not be read."""
LEFT_OUT_FILE = "skipped_files.csv"
"""Files beside the images that are no images of the dataset."""
DIVERGED_FILE = "diverged.json"
"""The last step of a run that has diverged."""
PROFILE_FOLDER = "profile"
"""Traces of `--profile`."""


def write_run_files(folder: Path, run_id: str, config: Config, environment: dict[str, Any]) -> None:
    """Write the run id, the config and a description of the environment. For the owner of the folder only.

    Raises:
        RunError: the folder cannot be written to.
    """
    with os_errors_as(RunError, folder):
        make_folder(folder / CHECKPOINTS)
        # Before the first checkpoint: without this file, the folder would accept the checkpoints of any run.
        write_atomically(folder / RUN_ID_FILE, run_id + "\n")
        # Before the config, whose changes the next start would refuse otherwise, if a kill comes between the two.
        write_atomically(folder / ENVIRONMENT_FILE, json.dumps(environment, indent=1) + "\n")
        write_atomically(folder / CONFIG_FILE, dump_config(config))


def log_of_host(first_rank: int) -> str:
    """Return the name of the log of a host in a folder that hosts may share. `first_rank` is its first rank."""
    # On NFS, lines that two hosts append to one file at once overwrite each other.
    return f"log_{first_rank:05d}.txt" if first_rank else LOG_FILE


def logs_of_run(folder: Path) -> list[Path]:
    """Return the logs of all hosts that share a run folder."""
    return [folder / LOG_FILE, *sorted(folder.glob(f"log_{'[0-9]' * 5}.txt"))]


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run folder."""
    return (folder / CONFIG_FILE).is_file() and (folder / ENVIRONMENT_FILE).is_file()


def name_of_run(folder: Path) -> str:
    """Return the name of the folder of a run, also where the path is another word for it.

    A link to a folder beside it, as `newest`, is such a word. One to another place, a larger disk, has the name of the
    run itself.
    """
    path = Path(os.path.abspath(folder))  # without `..`
    beside = path.parent.resolve()
    while path.is_symlink() and path.exists():
        target = Path(os.path.abspath(beside / path.readlink()))
        if target.parent.resolve() != beside:
            break
        path = beside / target.name
    return path.name


def find_advice(folder: Path) -> str:
    """Return where to find the run that a folder, which is none, was taken for: for a message."""
    inside = folder / "run"  # of a fine-tuning
    return f"its run is {inside}" if is_run(inside) else "`facetrain runs` lists the runs"


def newest_run() -> Path:
    """Return the run in the folder `runs` that has started last.

    Raises:
        UsageError: there is none.
    """
    folder = Path("runs")
    runs = [path.parent for path in folder.glob(f"*/{ENVIRONMENT_FILE}") if is_run(path.parent)]
    if not runs:
        raise UsageError(f"{folder}: has no run; give the folder of one")
    # The file is written when a run starts, and when it continues.
    return max(runs, key=lambda run: (run / ENVIRONMENT_FILE).stat().st_mtime)
