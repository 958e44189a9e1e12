"""Runs of this process: `train` with a config, and `resume` with the config that a user has written to the folder.

`write_dataset` writes what the short runs of all tests learn, `write_run_config` and `write_tiny_config` their configs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from facetrain.config.loading import dump_config, plain_config
from facetrain.config.schema import Config
from facetrain.data.formats.bin import write_bin
from facetrain.files import write_atomically
from facetrain.run.request import TrainRequest, as_override
from facetrain.run.train import train as train_request
from tests.support.datasets import encoded_image, write_records

CONFIG = """
run: {{name: tiny, dir: {folder}/runs}}
data: {{train: {dataset}/data, image_size: 32, workers: {workers}}}
model: {{backbone: iresnet, layers: [1, 1, 1, 1], widths: [8, 8, 16, 16], embedding_size: 16, dropout: {dropout}}}
head: {{margin: {{type: {margin}, m2: 0.3, scale: 16}}, sample_rate: {sample_rate}, {head}}}
optim: {{lr: 0.05, warmup_epochs: 0.5, accumulate: {accumulate}}}
train: {{global_batch_size: 24, max_steps: {steps}, precision: {precision}, device: cpu}}
eval: {{targets: [val], every_steps: 6}}
checkpoint: {{{checkpoint}}}
log: {{every_steps: 1, tensorboard: false, report: false}}
"""


def write_dataset(folder: Path) -> None:
    """Write 20 identities of noise, and the verification pairs `val.bin`."""
    write_records(folder, [n // 6 for n in range(120)], size=32)
    images = [encoded_image(n if n % 4 < 2 or n % 2 else n + 1000, 32) for n in range(80)]
    write_bin(folder / "val.bin", images, [n % 2 == 0 for n in range(40)])


def write_run_config(folder: Path, dataset: Path, **options: Any) -> Path:
    """Write `tiny.yaml`: a network that learns `dataset` / data on a CPU, is verified and saves checkpoints."""
    # Each reading process takes half a second: tests of what it does, or of how it ends, ask for one.
    values = {"workers": 0, "dropout": 0.0, "sample_rate": 1.0, "accumulate": 1, "precision": "fp32"}
    values |= {"margin": "arcface", "head": "placement: device", "steps": 12}
    values |= {"checkpoint": "every_steps: 4, keep: 9"}
    path = folder / "tiny.yaml"
    path.write_text(CONFIG.format(folder=folder, dataset=dataset, **(values | options)))
    return path


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
