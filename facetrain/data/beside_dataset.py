"""Paths of the files that describe a dataset, such as its landmarks and its card: they are beside its images."""

from __future__ import annotations

from pathlib import Path

TRAINING_SET = "train.rec"
"""Images of InsightFace's training sets, which are folders: the other files of the folder describe them."""


def beside(dataset: Path, name: str, suffix: str) -> Path:
    """Return FOLDER/name of a folder, which a train.rec stands for, and FILE + suffix of another dataset in a file."""
    if dataset.is_dir():
        return dataset / name
    return dataset.with_name(name if dataset.name == TRAINING_SET else dataset.name + suffix)
