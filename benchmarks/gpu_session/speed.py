"""Jobs of a GPU session that measure time: the machine, whole steps, head, backbone, loader."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import traceback
from typing import Any

import torch

from benchmarks.backbone import BackboneWorkload, measure_backbone_steps
from benchmarks.gpu_session import expected
from benchmarks.gpu_session.memory import free_memory
from benchmarks.gpu_session.rows import Rows, row
from benchmarks.head import VARIANTS, HeadWorkload, measure_variant
from benchmarks.plain_head import measure_plain
from facetrain.bench.generated_dataset import open_or_generate
from facetrain.bench.loader import loader_rate
from facetrain.bench.machine_peak import measure_peak
from facetrain.bench.workloads import Turns
from facetrain.cpu_cores import usable_cores

_EMBEDDING_SIZE = 512


def measure_steps(
    config: dict[str, Any],
    device: str,
    identities: int,
    gpus: int,
    turns: dict[str, int],
    failures: list[str],
) -> Rows:
    """Yield images/s of whole steps in the mode that users get, and of arcface_torch's recipe.

    One process per GPU.
    """
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    command += ["-m", "benchmarks.arcface_torch", "--identities", str(identities)]
    command += [word for name, value in turns.items() for word in (f"--{name}", str(value))]
    report = json.loads(run_module(command, {**config, "train.device": device}))
    what = f"{gpus} × {label_of(config)}, {identities:,} identities"
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
    yield row(what, "products, TFLOP/s", report["matrix_flops_per_s"] / 1e12)
    yield row(what, "copies, GB/s", report["copied_bytes_per_s"] / 1e9)


def measure_rates(device: str, precisions: list[str], failures: list[str]) -> Rows:
    """Yield the rates of the fastest matrix product in each precision, and of the fastest copy."""
    for precision in precisions:
        peak = measure_peak(precision, torch.device(device))
        yield row(f"products in {precision}", "TFLOP/s", peak.flops / 1e12)
    yield row("copies", "GB/s", peak.bytes / 1e9)


def measure_backbone(
    device: str,
    name: str,
    batch: int,
    image_size: int,
    turns: dict[str, int],
    variants: list[str],
    failures: list[str],
) -> Rows:
    """Yield images/s and peaks of memory of variants of a backbone's step, which take turns."""
    workload = BackboneWorkload(name, batch, image_size, device)
    groups = [variants]
    while groups:
        group = groups.pop(0)
        try:
            report = measure_backbone_steps(workload, group, Turns(**turns))
        except Exception:
            failures.append(f"{name}, batch {batch}, {', '.join(group)}: {traceback.format_exc()}")
            # One that cannot be compiled must not take the others along.
            groups += [[label] for label in group if len(group) > 1]
            continue
        for label, measured in report["variants"].items():
            what = f"{name}, batch {batch}, {label}"
            yield row(what, "images/s", measured["images_per_s"])
            yield row(what, "GiB at most", measured["peak_gib"])
            yield row(what, "seconds of the first step", measured["first_step_s"])


def measure_head(
    device: str, identities: int, precision: str, batch: int, steps: int, failures: list[str]
) -> Rows:
    """Yield seconds and bytes of the head's step, and of plain PyTorch with all logits at once."""
    plain, head = f"plain_{precision}", f"head_{precision}"
    # In the last one, the host launches a quarter of the operations.
    heads = [name for name in (head, f"{head}_stored16", f"{head}_stored16_long") if name in VARIANTS]
    for name in (*heads, plain):
        what = f"{name}, {identities:,} identities, {batch} embeddings"
        try:
            workload = HeadWorkload(identities, batch, _EMBEDDING_SIZE, steps, device)
            report = (measure_plain if name == plain else measure_variant)(name, workload)
        except Exception as error:
            if name == plain and isinstance(error, torch.OutOfMemoryError):
                yield row(what, "GB at most", "more than the GPU has")
            else:
                failures.append(f"{what}: {traceback.format_exc()}")
            continue
        finally:
            free_memory()
        size = None
        if name != plain:
            options = {key: value for key, value in VARIANTS[name].items() if key != "precision"}
            keys = {"train.batch_size": batch, "train.precision": precision}
            keys |= {f"head.{key}": value for key, value in options.items()}
            size = expected.expected_head(expected.run_config(keys, device), identities)
        yield row(what, "ms", 1e3 * report["step_s"])
        yield row(what, "GB at most", report["peak_bytes"] / 1e9, size and size / 1e9)


def measure_loader(device: str, batch: int, seconds: float, failures: list[str]) -> Rows:
    """Yield images/s of the loader with batches on the device."""
    with open_or_generate(None) as source:
        rate = loader_rate(source, usable_cores(), batch, seconds, torch.device(device), None)
    yield row(f"{usable_cores()} cores, batch {batch}", "images/s", rate)


def run_module(words: list[str], keys: dict[str, Any]) -> str:
    """Run a module of Python with values of the config; return what it prints."""
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run([sys.executable, "-m", *words, *sets], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}; its message is above")
    return done.stdout


def label_of(config: dict[str, Any]) -> str:
    """Return the values of a config in words."""
    return ", ".join(str(value) for key, value in config.items() if key != "data.image_size")
