"""Jobs of a GPU session that measure time: whole steps, a whole run, head, backbone, loader."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.backbone import VARIANTS, BackboneWorkload, measure_backbone_steps
from benchmarks.gpu_session import expected
from benchmarks.gpu_session.memory import free_memory
from benchmarks.gpu_session.rows import Rows, row
from benchmarks.head import HeadWorkload, measure_variant
from benchmarks.plain_head import measure_plain
from facetrain.bench.generated_dataset import open_or_generate, write_noise
from facetrain.bench.loader import loader_rate
from facetrain.bench.workloads import Turns
from facetrain.cpu_cores import usable_cores
from facetrain.telemetry.jsonl import read_jsonl

_EMBEDDING_SIZE = 512
_BACKBONE_VARIANTS = ("facetrain", "facetrain_compiled", "facetrain_replayed")


def measure_steps(
    config: dict[str, Any],
    device: str,
    identities: int,
    gpus: int,
    turns: dict[str, int],
    failures: list[str],
) -> Rows:
    """Yield images/s of whole steps in the mode that users get, and of arcface_torch's recipe.

    One process per GPU; nothing on a machine with fewer GPUs.
    """
    if device == "cuda" and gpus > torch.cuda.device_count():
        print(f"this machine has {torch.cuda.device_count()} GPUs", file=sys.stderr)
        return
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    command += ["-m", "benchmarks.arcface_torch", "--identities", str(identities)]
    command += [word for name, value in turns.items() for word in (f"--{name}", str(value))]
    report = json.loads(_run_module(command, {**config, "train.device": device}))
    what = f"{gpus} × {_label(config)}, {identities:,} identities"
    for name, measured in report["inputs"].items():
        rates = measured["rounds"]
        yield row(f"{what}, {name}", "images/s", measured["images_per_s"])
        yield row(
            f"{what}, {name}", "spread of the rounds", (max(rates) - min(rates)) / statistics.median(rates)
        )
        yield row(f"{what}, {name}", "MFU", measured["mfu"])
        yield row(f"{what}, {name}", "times arcface_torch", report["times_arcface_torch"][name])
        shares = ", ".join(f"{part} {share:.0%}" for part, share in measured["share_of_time"].items())
        yield row(f"{what}, {name}", "parts of a step", shares)
    yield row(f"{what}, arcface_torch", "images/s", report["others"]["arcface_torch"]["images_per_s"])
    yield row(what, "products, TFLOP/s", report["matrix_flops"] / 1e12)
    yield row(what, "copies, GB/s", report["copied_bytes"] / 1e9)


def measure_run(config: dict[str, Any], device: str, steps: int, failures: list[str]) -> Rows:
    """Yield the speed at the end of a whole run, which starts everything that is on by default."""
    with tempfile.TemporaryDirectory() as scratch:
        write_noise(Path(scratch) / "data", config["data.image_size"])
        keys = {
            **config, "data.train": f"{scratch}/data", "train.device": device, "train.max_steps": steps,
            "run.dir": f"{scratch}/runs", "log.every_steps": max(steps // 10, 1),
        }  # fmt: skip
        file = Path(scratch) / "run.yaml"
        file.write_text("data: {train: data}\neval: {targets: []}\n")
        output = _run_module(["facetrain", "train", "--config", str(file)], keys)
        records = read_jsonl(Path(scratch) / "runs" / "run" / "metrics.jsonl")
    speeds = [record["images_per_s"] for record in records if "images_per_s" in record]
    what = f"{_label(config)}, {steps:,} steps"
    yield row(what, "images/s at the end", speeds[-1])
    yield row(what, "reports", len(speeds))
    yield row(what, "last line", output.strip().splitlines()[-1] if output.strip() else "")


def measure_backbone(
    device: str, name: str, batch: int, image_size: int, turns: dict[str, int], failures: list[str]
) -> Rows:
    """Yield images/s and peaks of memory of each execution of a backbone. One that fails does not stop the others."""
    workload = BackboneWorkload(name, batch, image_size, device)
    for label in _BACKBONE_VARIANTS:
        train = VARIANTS[label]
        if train.compile != "off" and device == "cpu":
            continue  # Compiling takes minutes on a CPU, which the rehearsal does not need.
        try:
            measured = measure_backbone_steps(workload, [label], Turns(**turns))["variants"][label]
        except Exception:
            failures.append(f"{name}, {label}: {traceback.format_exc()}")
            continue
        what = f"{name}, batch {batch}, {label}"
        yield row(what, "images/s", measured["images_per_s"])
        yield row(what, "GiB at most", measured["peak_gib"])
        yield row(what, "seconds of the first step", measured["first_step_s"])


def measure_head(
    device: str, identities: int, precision: str, batch: int, steps: int, failures: list[str]
) -> Rows:
    """Yield seconds and bytes of the head's step, and of plain PyTorch with all logits at once."""
    for name, stored in (
        (f"head_{precision}", "float32"),
        (f"head_{precision}_stored16", "bfloat16"),
        (f"plain_{precision}", ""),
    ):
        try:
            workload = HeadWorkload(identities, batch, _EMBEDDING_SIZE, steps, device)
            report = (measure_variant if stored else measure_plain)(name, workload)
        except Exception:
            failures.append(f"{name}, {identities:,} identities: {traceback.format_exc()}")
            continue
        finally:
            free_memory()
        size = None
        if stored:
            keys = {"train.batch_size": batch, "train.precision": precision}
            keys |= {"head.weight_dtype": stored, "head.momentum_dtype": stored}
            size = expected.expected_head(expected.run_config(keys, device), identities)
        what = f"{name}, {identities:,} identities, {batch} embeddings"
        yield row(what, "ms", 1e3 * report["step_s"])
        yield row(what, "GB at most", report["peak_bytes"] / 1e9, size and size / 1e9)


def measure_loader(device: str, batch: int, seconds: float, failures: list[str]) -> Rows:
    """Yield images/s of the loader with batches on the device."""
    with open_or_generate(None) as source:
        rate = loader_rate(source, usable_cores(), batch, seconds, torch.device(device), None)
    yield row(f"{usable_cores()} cores, batch {batch}", "images/s", rate)


def _run_module(words: list[str], keys: dict[str, Any]) -> str:
    """Run a module of Python with values of the config; return what it prints."""
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run([sys.executable, "-m", *words, *sets], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}; its message is above")
    return done.stdout


def _label(config: dict[str, Any]) -> str:
    """Return the values of a config in words."""
    return ", ".join(str(value) for key, value in config.items() if key != "data.image_size")
