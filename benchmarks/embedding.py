"""Embedding benchmark: images per second of a network on the CPU, beside onnxruntime with the same weights."""

# B batch   D embedding

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import run
from facetrain.backbone.registry import BACKBONES
from facetrain.backbone.zoo import build_backbone
from facetrain.bench.workloads import in_turn
from facetrain.cpu_cores import usable_cores
from facetrain.data.images.normalize import normalize
from facetrain.distributed.world import join
from facetrain.models.embedding_model import EmbeddingModel, open_model
from facetrain.models.export.example_inputs import example_pixels
from facetrain.models.export.export import export
from facetrain.models.export.formats import ExportOptions
from facetrain.models.inference_network import inference_network
from facetrain.models.model_file import describe_backbone

RIVAL = "onnxruntime"
VARIANTS = ("plain", "facetrain", "facetrain_bf16", RIVAL)
_CPU = torch.device("cpu")
_PAUSE_S = 0.02
"""Pause between two variants: the threads of both libraries wait actively for their next work for some milliseconds."""


def measure_networks(
    model: list[str] = ["r18", "r50", "mbf"],  # noqa: B006
    variant: list[str] = list(VARIANTS),  # noqa: B006
    batch_size: int = 32,
    rounds: int = 10,
) -> dict[str, Any]:
    """Return the report of each model: a backbone, which gets random weights, or a model file."""
    options: dict[str, Any] = {"batch_size": batch_size, "rounds": rounds, "threads": usable_cores()}
    return {name: measure_embedding(name, variants=variant, **options) for name in model}


def measure_embedding(
    model: str, *, batch_size: int, rounds: int, threads: int, variants: Sequence[str] = VARIANTS
) -> dict[str, Any]:
    """Return the images per second of each variant, and its ratio to onnxruntime where that is installed.

    The variants take turns for `rounds` rounds; each rate is the rate of the fastest round, because other work on the
    machine can only slow a round down. `plain` is the network as it is, `facetrain` and `facetrain_bf16` are the forms
    in which `facetrain eval` and `embed` run it.

    Args:
        model: name of a backbone, which gets random weights, or path of a model file.
        batch_size: images at a time.
        rounds: number of rounds.
        threads: threads of each variant.
        variants: names from VARIANTS.

    Raises:
        ModelError: there is no such backbone or file.
    """
    with join("cpu"):
        torch.set_num_threads(threads)
        opened = _random_model(model, batch_size) if model in BACKBONES else open_model(Path(model), _CPU)
        image = opened.prepare(example_pixels(opened, batch_size))
        installed = all(find_spec(package) for package in ("onnx", "onnxscript", RIVAL))
        embed = {name: _variant(name, opened, image) for name in variants if installed or name != RIVAL}
        expected = _unit(opened.network(image))
        # This is also the first run of each variant, which allocates memory and chooses kernels.
        gaps = {name: float((_unit(run()) - expected).abs().max()) for name, run in embed.items()}
        turns = in_turn({name: partial(_seconds, run) for name, run in embed.items()}, rounds)
        seconds = {name: min(of_rounds) for name, of_rounds in turns.items()}
    return {
        "torch": torch.version.__version__,
        "model": opened.description,
        "batch": batch_size,
        "threads": threads,
        "variants": {
            name: {
                "images_per_s": batch_size / least,
                f"times_{RIVAL}": seconds[RIVAL] / least if RIVAL in seconds else None,
                "largest_difference": gaps[name],
            }
            for name, least in seconds.items()
        },
    }


def _seconds(run: Callable[[], Tensor]) -> float:
    time.sleep(_PAUSE_S)
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _variant(name: str, opened: EmbeddingModel, image: Tensor) -> Callable[[], Tensor]:
    network = opened.network
    if name == RIVAL:
        with tempfile.TemporaryDirectory() as folder:
            export(opened, "onnx", Path(folder, "model.onnx"), ExportOptions())
            # The session has as many threads as torch.
            network, image = open_model(Path(folder, "model.onnx"), _CPU).network, image.contiguous()
    elif name != "plain":
        network = inference_network(network, _CPU, bf16=name == "facetrain_bf16")
    return torch.no_grad()(lambda: network(image).float())


def _unit(embedding_BD: Tensor) -> Tensor:
    return nn.functional.normalize(embedding_BD.detach())


def _random_model(name: str, batch_size: int) -> EmbeddingModel:
    """Return a backbone with random weights, and batch norm statistics that fit them."""
    torch.manual_seed(0)
    network = build_backbone(name)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.momentum = 1.0
    opened = EmbeddingModel(network, 112, network.embedding_size, normalize, name, describe_backbone(name))
    with torch.no_grad():
        # Without fitting statistics, the activations of a deep network overflow.
        network.train()(normalize(example_pixels(opened, max(batch_size, 8))))
    network.eval()
    return opened


if __name__ == "__main__":
    run(measure_networks)
