"""Runs of this process: `train` with a config, and `resume` with the config that a user has written to the folder.

`write_tiny_config` writes the config of a short run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from facetrain.config.loading import dump_config, plain_config
from facetrain.config.schema import Config
from facetrain.files import write_atomically
from facetrain.run.request import TrainRequest, as_override
from facetrain.run.train import train as train_request


def write_tiny_config(
    folder: Path, dataset: Path, *, name: str = "tiny", **sections: Mapping[str, Any]
) -> Path:
    """Write `NAME.yaml`: a tiny network, which learns `dataset` / data on a CPU and is not verified.

    `sections` has further keys, by section.
    """
    config: dict[str, dict[str, Any]] = {
        "data": {"train": f"{dataset}/data", "image_size": 32, "workers": 0},
        "model": {"backbone": "iresnet", "layers": [1] * 4, "widths": [4] * 4, "embedding_size": 8},
        "train": {"global_batch_size": 24, "precision": "fp32", "device": "cpu"},
        "eval": {"targets": []},
        "log": {"tensorboard": False, "report": False},
    }
    for section, keys in sections.items():
        config[section] = config.get(section, {}) | dict(keys)
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config))
    return path


def train(config: Config, run_dir: Path | None = None, *, fit_batch: Any = None, **asked: Any) -> int:
    """Train a new run with a config; `asked` are further fields of the request."""
    folder = None if run_dir is None else str(run_dir)
    request = TrainRequest(config=plain_config(config), run_dir=folder, **asked)
    return train_request(request, fit_batch=fit_batch)


def go_on(run_dir: Path, step: int | None = None, changes: Iterable[str] = ()) -> int:
    """Continue the run in a folder as it is, with changes in the form of --set."""
    request = TrainRequest(command="resume", run_dir=str(run_dir), checkpoint=step, overrides=tuple(changes))
    return train_request(request)


def resume(config: Config, run_dir: Path, step: int | None = None, *, set_keys: Iterable[str] = ()) -> int:
    """Continue the run in a folder whose config was edited to `config`; the values of `set_keys` are given by --set."""
    write_atomically(run_dir / "config.yaml", dump_config(config))
    plain = plain_config(config)
    overrides = [
        as_override(key, reduce(lambda value, name: value[name], key.split("."), plain)) for key in set_keys
    ]
    request = TrainRequest(
        command="resume", run_dir=str(run_dir), checkpoint=step, overrides=tuple(overrides)
    )
    return train_request(request)
