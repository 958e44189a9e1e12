#!/usr/bin/env python3
"""AdaFace's recipe, facetrain's and arcface_torch's loop on the same real faces with the same network and CPU time.

    python -m benchmarks.same_minutes data/real

Each run has one thread, bf16, and about 100 seconds of CPU time on one core of an AMD EPYC Zen 4 for the whole
command: start, reading, training, writing the model. `epochs` of ARMS is what fits, rounded down for facetrain and up
for the others; each schedule is stretched to it. Batch and rate of the others are the best of four, found with another
seed in longer trainings. The judge are the pairs of LFW's folds 1 and 2, whose people are not in the training set.
docs/log/log.md has the results.
A finished run is kept in `--output`; a second call continues after the last one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer

from facetrain.config.loading import load_config

_ROOT = Path(__file__).resolve().parents[1]
_LFW = "lfw_folds1-2"
_ADAFACE_MILESTONES = (12 / 26, 20 / 26, 24 / 26)
"""Epochs after which AdaFace's rate falls, as shares of the training."""
_METRICS = ("accuracy", "eer", "tar@1e-01", "tar@1e-02")


@dataclass(frozen=True)
class Arm:
    """Recipe with the batch and the rate that it gets here."""

    config: str
    """Path of the config from the root of the repository; empty: benchmarks/arcface_torch_training.py."""
    epochs: int
    batch: int
    lr: float
    milestones: tuple[float, ...] = ()
    """Epochs after which the rate falls, as shares of the training."""


ARMS = {
    "facetrain": Arm("recipes/same_minutes/facetrain.yaml", 6, 32, 0.05),
    "adaface": Arm("recipes/same_minutes/adaface.yaml", 11, 128, 0.02, _ADAFACE_MILESTONES),
    "arcface_torch": Arm("", 8, 32, 0.02),
}


@dataclass(frozen=True)
class Training:
    """One run, as it is kept."""

    model: str
    cpu_seconds: float
    seconds: float
    """Wall-clock time."""


def compare(
    data: Annotated[
        Path, typer.Argument(exists=True, help=f"folder with faces_train and lfw_verification/{_LFW}.bin")
    ],
    seeds: Annotated[list[int], typer.Option("--seed")] = [4, 5, 6],  # noqa: B006
    image_size: int = 32,
    output: Path = Path("runs/same_minutes"),
) -> None:
    """Train and judge every recipe with every seed, and print a table."""
    output.mkdir(parents=True, exist_ok=True)
    trainer = _Trainer(data, output, image_size)
    for seed in seeds:
        for name in ARMS:
            training = trainer.train(name, seed)
            print(name, seed, training, trainer.judge(training), flush=True)
    columns = ["recipe", "epochs", "CPU seconds", *_METRICS]
    print(f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n")
    for name in ARMS:
        trainings = [trainer.train(name, seed) for seed in seeds]
        cpu_seconds = mean(training.cpu_seconds for training in trainings)
        cells = _cells([trainer.judge(training) for training in trainings])
        print(f"| {name} | {ARMS[name].epochs} | {cpu_seconds:.0f} | {' | '.join(cells)} |")


@dataclass(frozen=True)
class _Trainer:
    data: Path
    output: Path
    image_size: int

    def train(self, name: str, seed: int) -> Training:
        """Train, or return the training of an earlier call."""
        run = self.output / f"{name}_{seed}"
        finished = self.output / f"{run.name}.json"
        config = ARMS[name].config
        model = run if config else self.output / f"{run.name}.safetensors"
        command = self._command(name, seed, run, model)
        settings = [*command, load_config(_ROOT / config).model_dump_json()] if config else command
        if finished.exists():
            kept = json.loads(finished.read_text(encoding="utf-8"))
            if kept.get("settings") == settings:  # and not of other data, another size or another config
                return Training(**kept["training"])
        # What a killed call has left: a run of the same name would get another folder.
        shutil.rmtree(run, ignore_errors=True)
        self._report_of(model).unlink(missing_ok=True)
        start = time.perf_counter()
        cpu_seconds = _run_module(command)
        training = Training(str(model), cpu_seconds, time.perf_counter() - start)
        kept = {"settings": settings, "training": asdict(training)}
        finished.write_text(json.dumps(kept), encoding="utf-8")
        return training

    def judge(self, training: Training) -> dict[str, float]:
        """Return the metrics of a model on the pairs of LFW, as shares from 0 to 1."""
        report = self._report_of(Path(training.model))
        if not report.exists():
            pairs = self.data / "lfw_verification" / f"{_LFW}.bin"
            _run_module(["facetrain", "eval", training.model, "--target", str(pairs), "--json", str(report)])
        metrics = json.loads(report.read_text(encoding="utf-8"))["sets"][_LFW]
        return {metric: metrics[metric] for metric in _METRICS}

    def _report_of(self, model: Path) -> Path:
        return self.output / f"{model.stem}_lfw.json"

    def _command(self, name: str, seed: int, run: Path, model: Path) -> list[str]:
        arm, faces = ARMS[name], self.data / "faces_train"
        if not arm.config:
            options = {
                "seed": seed,
                "lr": arm.lr,
                "batch": arm.batch,
                "image-size": self.image_size,
                "precision": "bf16",
            }
            words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
            return ["benchmarks.arcface_torch_training", *words, str(faces), str(model), str(arm.epochs)]
        values = {
            "seed": seed,
            "run.name": run.name,
            "run.dir": self.output,
            "data.train": faces,
            "data.image_size": self.image_size,
            "optim.lr": arm.lr,
            "optim.milestones": [round(share * arm.epochs, 3) for share in arm.milestones],
            "train.global_batch_size": arm.batch,
            "train.epochs": arm.epochs,
            "train.precision": "bf16",
        }
        words = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        return ["facetrain", "train", "--config", str(_ROOT / arm.config), *words]


def _run_module(words: list[str]) -> float:
    """Run a module with one thread; return the CPU seconds of its process and of those that it waited for.

    Its output goes to stderr: stdout has the results.
    """
    before = os.times()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", *words], check=True, stdout=sys.stderr, env=environment)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def _cells(results: list[dict[str, float]]) -> list[str]:
    """Return the mean of each metric and its value for each seed, in percent."""
    columns = {metric: [100 * result[metric] for result in results] for metric in _METRICS}
    return [
        f"{mean(values):.2f} ({', '.join(f'{value:.2f}' for value in values)})" for values in columns.values()
    ]


if __name__ == "__main__":
    typer.run(compare)
