"""Settings of the soak: short runs that together use every state that a checkpoint has, on 1 to 3 ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from facetrain.data.formats.bin import write_bin
from tests.support.datasets import encoded_image, write_records

_SIZE = 32
STEPS, SAVE_EVERY = 16, 3


@dataclass(frozen=True)
class Setting:
    """Config of a run, and its numbers of ranks."""

    name: str
    ranks: tuple[int, ...] = (1,)
    """Each start draws one of these. The undisturbed run uses the first."""
    changes: dict[str, object] = field(default_factory=dict)
    """Config values that differ from the other settings."""
    is_command: bool = False
    """Start `facetrain` as a user does, on a disk that is full at times, and kill single processes of it, too."""

    @property
    def slug(self) -> str:
        """Return the name of its folder."""
        return "_".join(self.name.replace(",", "").replace("-", "_").split())


_SAMPLED = {"head.sample_rate": 0.3}
_VIT = {"model.backbone": "vit_t", "model.layers": None, "model.widths": None, "data.image_size": 36}
_MBF = {"model.backbone": "mbf_small", "model.layers": None, "model.widths": None}
_MARGIN = "head.margin.type"
# Long enough to be killed while it trains: to start Python and the readers takes most of a short run.
_COMMAND = {"data.workers": 1, "train.max_steps": 200, "checkpoint.every_steps": 8, "eval.every_steps": 33}
SETTINGS = [
    Setting("fp32"),
    Setting("bf16", changes={"train.precision": "bf16"}),
    Setting("fp16", changes={"train.precision": "fp16"}),
    Setting("sampling", changes=_SAMPLED),
    Setting("accumulation, sampling", changes=_SAMPLED | {"optim.accumulate": 2}),
    Setting("AdaFace", changes={_MARGIN: "adaface"}),
    Setting("CurricularFace", changes={_MARGIN: "curricularface"}),
    Setting("MagFace", changes={_MARGIN: "magface"}),
    Setting("elastic margins", changes={_MARGIN: "elastic_arcface"}),
    Setting("ViT, AdamW, dropout", changes=_VIT | {"optim.name": "adamw", "optim.lr": 0.001, "model.dropout": 0.2}),
    Setting("host placement, sampling", changes=_SAMPLED | {"head.placement": "host"}),
    Setting("disk placement, sampling", changes=_SAMPLED | {"head.placement": "disk"}),
    Setting("int8 momentum", changes={"head.momentum_dtype": "int8"}),
    Setting("bfloat16 centers", changes={"head.weight_dtype": "bfloat16"}),
    Setting("mixture, augmentation", changes={
        "data.train": "mixture.yaml",
        "data.augment": {
            "low_resolution": 0.2, "blur": 0.2, "gray": 0.2, "color": 0.3, "crop": 0.3,
        },
    }),
    Setting("MobileFaceNet", changes=_MBF),
    Setting("activation checkpointing", changes={"model.checkpoint_activations": True}),
    Setting("synchronous saves, best kept", changes={
        "checkpoint.async": False, "checkpoint.best_metric": "val/accuracy",
    }),
    Setting("a reading process", changes={"data.workers": 1}),
    Setting("2 ranks, fp16, sampling", (2,), _SAMPLED | {"train.precision": "fp16"}),
    Setting("2 ranks, AdaFace, int8 momentum", (2,), {_MARGIN: "adaface", "head.momentum_dtype": "int8"}),
    Setting("2 ranks, CurricularFace, host placement", (2,), _SAMPLED | {
        _MARGIN: "curricularface", "head.placement": "host",
    }),
    Setting("3 ranks, sampling, accumulation", (3,), _SAMPLED | {"optim.accumulate": 2}),
    Setting("3 ranks, AdamW, disk placement", (3,), _SAMPLED | {
        "optim.name": "adamw", "optim.lr": 0.001, "head.placement": "disk",
    }),
    Setting("command", (1,), _COMMAND | {"checkpoint.async": False, "model.dropout": 0.2}, is_command=True),
    Setting("command, 2 ranks, fp16", (2,), _COMMAND | {"train.precision": "fp16"}, is_command=True),
    # Few steps and a low learning rate: differences of rounding grow from step to step.
    Setting("command, 1 to 3 ranks", (1, 2, 3), _COMMAND | _SAMPLED | {
        "optim.lr": 0.002, "train.max_steps": 60, "checkpoint.every_steps": 4,
    }, is_command=True),
]  # fmt: skip


def write_data(folder: Path) -> None:
    """Write datasets of noise, with verification pairs and a mixture."""
    write_records(folder, [number // 6 for number in range(120)], size=_SIZE)
    write_records(folder / "second", [number // 4 for number in range(40)], size=_SIZE)
    (folder / "mixture.yaml").write_text("datasets: [{path: .}, {path: second, weight: 0.5}]")
    images = [encoded_image(n if n % 4 < 2 or n % 2 else n + 1000, _SIZE) for n in range(40)]
    write_bin(folder / "val.bin", images, [number % 2 == 0 for number in range(20)])


def write_config(setting: Setting, data: Path, path: Path) -> Path:
    """Write the config of a setting."""
    config: dict[str, dict[str, object]] = {
        "data": {"train": str(data), "image_size": _SIZE, "workers": 0},
        "model": {
            "backbone": "iresnet", "layers": [1, 1, 1, 1], "widths": [8, 8, 16, 16], "embedding_size": 16,
        },
        "head": {"margin": {"type": "arcface", "m2": 0.3, "scale": 16}},
        "optim": {"lr": 0.02, "warmup_epochs": 0.5},
        "train": {
            "global_batch_size": 24, "epochs": 10_000, "max_steps": STEPS, "precision": "fp32", "device": "cpu",
        },
        "eval": {"targets": ["val"], "every_steps": STEPS // 2, "dir": str(data)},
        "checkpoint": {"every_steps": SAVE_EVERY, "keep": 2},
        "log": {"every_steps": 1, "tensorboard": False, "report": False},
    }  # fmt: skip
    for key, value in setting.changes.items():
        *sections, name = key.split(".")
        target: Any = config
        for section in sections:
            target = target[section]
        if value is None:
            target.pop(name, None)
        else:
            target[name] = str(data / "mixture.yaml") if value == "mixture.yaml" else value
    path.write_text(yaml.safe_dump(config))
    return path
