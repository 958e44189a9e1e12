"""Jobs of a GPU session that are whole runs: stopped and resumed, and a step in which the host never waits."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_session import expected
from benchmarks.gpu_session.rows import Rows, row
from benchmarks.gpu_session.speed import label_of, run_module
from facetrain.bench.generated_dataset import open_or_generate, write_noise
from facetrain.bench.train import build_run, repeated_batch
from facetrain.distributed.world import join
from facetrain.run.folder.run_files import METRICS_FILE, PROFILE_FOLDER
from facetrain.telemetry.jsonl import read_jsonl

_WARM_UP_STEPS = 3
_POLL_S = 0.05


def measure_run(
    config: dict[str, Any], device: str, steps: int, stopped_after: int, failures: list[str]
) -> Rows:
    """Yield the speed of a run that is deterministic and reports every step, and whether a resume repeats it.

    The run is profiled. A second one gets SIGTERM after a step, and is resumed: its losses are the same.
    """
    with tempfile.TemporaryDirectory() as scratch:
        write_noise(Path(scratch) / "data", config["data.image_size"])
        file = Path(scratch) / "run.yaml"
        file.write_text("data: {train: data}\neval: {targets: []}\n")
        keys = {
            **config, "data.train": f"{scratch}/data", "train.device": device, "train.max_steps": steps,
            "train.epochs": 1_000_000, "train.deterministic": device == "cuda", "log.every_steps": 1,
        }  # fmt: skip
        whole, stopped = (Path(scratch) / name for name in ("whole", "stopped"))
        start = ["facetrain", "train", "--config", str(file), "--run-dir"]
        run_module([*start, str(whole), "--profile"], keys)
        code = _stop_after(stopped_after, [*start, str(stopped)], keys, stopped)
        run_module(["facetrain", "resume", str(stopped)], {})
        records, losses = read_jsonl(whole / METRICS_FILE), _losses(stopped)
        profiles = len(list((whole / PROFILE_FOLDER).glob("*")))
    what = f"{label_of(config)}, {steps:,} steps"
    speeds = [record["images_per_s"] for record in records if "images_per_s" in record]
    # Each is of one step; the first ones are profiled.
    yield row(what, "images/s, deterministic", statistics.median(speeds[len(speeds) // 2 :]))
    yield row(what, "files of the profile", profiles)
    yield row(what, "exit code after SIGTERM", code, 128 + signal.SIGTERM)
    same = losses == {record["step"]: record["loss"] for record in records if "loss" in record}
    yield row(what, "losses after the resume", "the same" if same else "different")
    if not same or code != 128 + signal.SIGTERM:
        failures.append(f"{what}: exit code {code}; the losses are {'the same' if same else 'different'}")


def check_waits(config: dict[str, Any], device: str, identities: int, failures: list[str]) -> Rows:
    """Take a step in which each wait of the host for the GPU is an error."""
    described = expected.run_config(config, device)
    with (
        open_or_generate(None, image_size=described.data.image_size, num_images=128) as source,
        join(device, cpu_setting="train.device: cpu") as world,
        tempfile.TemporaryDirectory() as scratch,
    ):
        run = build_run(described, world, identities, Path(scratch), source)
        batches = repeated_batch(run, identities)
        run.take_steps(batches, _WARM_UP_STEPS)
        try:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            run.take_steps(batches, 1)
        except RuntimeError as error:
            failures.append(f"the host waits for the GPU: {error}")
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    yield row(label_of(config), "waits of the host", len(failures))


def _stop_after(step: int, words: list[str], keys: dict[str, Any], folder: Path) -> int:
    """Start a run, send SIGTERM after a step, and return its exit code."""
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    process = subprocess.Popen([sys.executable, "-m", *words, *sets])
    while process.poll() is None and max(_losses(folder), default=0) < step:
        time.sleep(_POLL_S)
    process.terminate()
    return process.wait()


def _losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step that a run has reported."""
    path = folder / METRICS_FILE
    records = read_jsonl(path) if path.exists() else []
    return {record["step"]: record["loss"] for record in records if "loss" in record}
