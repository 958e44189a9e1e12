"""Jobs of a GPU session that measure time: backbone, head, whole steps, loader."""

from __future__ import annotations

import statistics
import sys
import time
import traceback
from collections.abc import Sequence

import torch

from benchmarks.gpu_session import expected
from benchmarks.gpu_session.memory import free_memory
from benchmarks.gpu_session.rows import Rows, row
from facetrain.bench.backbone import VARIANTS, BackboneVariant, BackboneWorkload, build_step
from facetrain.bench.generated_dataset import open_or_generate
from facetrain.bench.head import measure_variant
from facetrain.bench.loader import loader_rate
from facetrain.bench.machine_peak import synchronize
from facetrain.bench.train import BASELINE, measure_training
from facetrain.cpu_cores import usable_cores
from facetrain.telemetry.memory import peak_gib

_WARM_UP_STEPS = 5
_EMBEDDING_SIZE = 512
_BACKBONE_VARIANTS = {
    "plain": "facetrain",
    "compiled": "facetrain_compiled",
    "replayed": "facetrain_replayed",
    "fused": "facetrain_fused",
}


def measure_backbone(
    device: str,
    name: str,
    batch: int,
    image_size: int,
    steps: int,
    rounds: int,
    failures: list[str],
    labels: Sequence[str] = tuple(_BACKBONE_VARIANTS),
) -> Rows:
    """Yield images/s and peaks of memory of each execution of a backbone. One that fails does not stop the others."""
    for label in labels:
        variant = VARIANTS[_BACKBONE_VARIANTS[label]]
        if (reason := _unsuitable(variant, name, device)) is not None:
            print(f"{name}, {label}: {reason}", file=sys.stderr)
            continue
        workload = BackboneWorkload(name, batch, image_size, device, usable_cores())
        config = expected.run_config(name, batch, image_size=image_size, device=device, **_keys_of(variant))
        forecast = None if variant.compile != "off" else expected.expected_step(config, 1000)
        try:
            rates, gib, first_s = _step_rates(workload, variant, steps, rounds)
        except Exception:
            failures.append(f"{name}, {label}: {traceback.format_exc()}")
            continue
        finally:
            free_memory()
        what = f"{name}, batch {batch}, {label}"
        yield row(what, "images/s", statistics.median(rates), forecast and batch / forecast.backbone)
        yield row(what, "GiB at most", gib)
        yield row(what, "seconds of the first step", first_s)


def _unsuitable(variant: BackboneVariant, name: str, device: str) -> str | None:
    if variant.fused and not name.startswith("r"):
        return "only an IResNet has a fused trunk"
    if variant.fused and device == "cpu":
        return "Triton's interpreter takes minutes for a whole network; the group `kernels` rehearses the kernels"
    if variant.compile == "reduce-overhead" and device == "cpu":
        return "there are no CUDA graphs on a CPU"
    return None


def _keys_of(variant: BackboneVariant) -> dict[str, str]:
    return {"train.fused": "on" if variant.fused else "off", "train.compile": variant.compile}


def _step_rates(
    workload: BackboneWorkload, variant: BackboneVariant, steps: int, rounds: int
) -> tuple[list[float], float, float]:
    """Return images/s of each round, the peak of memory in GiB, and the seconds of the first step."""
    device = torch.device(workload.device)
    step = build_step(workload, variant, device)
    start = time.perf_counter()
    step()
    synchronize(device)
    first_s = time.perf_counter() - start
    for _ in range(min(_WARM_UP_STEPS, steps)):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    rates = []
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize(device)
        rates.append(steps * workload.batch / (time.perf_counter() - start))
    return rates, peak_gib(device), first_s


def measure_head(
    device: str, identities: int, precision: str, batch: int, steps: int, failures: list[str]
) -> Rows:
    """Yield seconds and bytes of the head's step, and of plain PyTorch with all logits at once."""
    for variant, stored in (("head", "float32"), ("head_stored16", "bfloat16"), ("plain", None)):
        name = (
            f"{variant}_{precision}"
            if stored is None or stored == "float32"
            else f"head_{precision}_stored16"
        )
        changes = {} if stored is None else {"head.weight_dtype": stored, "head.momentum_dtype": stored}
        config = expected.run_config(
            "r18",
            batch,
            image_size=112,
            precision=precision,
            device=device,
            **{"head.loss": "softmax"},
            **changes,
        )
        try:
            report = measure_variant(name, identities, _EMBEDDING_SIZE, batch, steps, device, None)
        except Exception:
            failures.append(f"{name}, {identities:,} identities: {traceback.format_exc()}")
            continue
        finally:
            free_memory()
        seconds, size = expected.expected_head(config, identities) if stored else (None, None)
        what = f"{name}, {identities:,} identities, {batch} embeddings"
        yield row(what, "ms", 1e3 * report["step_s"], seconds and 1e3 * seconds)
        yield row(what, "GB at most", report["peak_bytes"] / 1e9, size and size / 1e9)


def measure_steps(
    device: str,
    backbone: str,
    identities: int,
    precision: str,
    batch: int,
    image_size: int,
    steps: int,
    rounds: int,
    failures: list[str],
) -> Rows:
    """Yield images/s of whole steps, with a repeated batch and with records, and of arcface_torch's recipe."""
    config = expected.run_config(backbone, batch, image_size=image_size, precision=precision, device=device)
    report = measure_training(
        config, None, identities=identities, inputs=("synthetic", "records"), steps=steps, rounds=rounds,
        baseline=True,
    )  # fmt: skip
    assert report is not None
    what = f"{backbone}, {precision}, batch {batch}, {identities:,} identities"
    forecast = expected.expected_step(config, identities)
    for name, found in report["inputs"].items():
        speed = forecast and forecast.images_per_second
        yield row(f"{what}, {name}", "images/s", found["images_per_s"], speed)
        yield row(f"{what}, {name}", "MFU", found["mfu"])
        yield row(f"{what}, {name}", "times arcface_torch", report["times_arcface_torch"][name])
        shares = ", ".join(f"{part} {share:.0%}" for part, share in found["share_of_time"].items())
        yield row(f"{what}, {name}", "parts of a step", shares)
    yield row(f"{what}, arcface_torch", "images/s", report[BASELINE]["images_per_s"])
    yield row(what, "products, TFLOP/s", report["matrix_flops"] / 1e12)
    yield row(what, "copies, GB/s", report["copied_bytes"] / 1e9)


def measure_loader(device: str, decode: str, batch: int, seconds: float, failures: list[str]) -> Rows:
    """Yield images/s of the loader with batches on the device."""
    if device == "cpu":
        decode = "cpu"
    with open_or_generate(None) as source:
        rate = loader_rate(source, usable_cores(), batch, seconds, torch.device(device), None, decode=decode)
    yield row(f"decode: {decode}, {usable_cores()} cores, batch {batch}", "images/s", rate)
