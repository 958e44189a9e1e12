"""Execution modes of the backbone in training, and the choice between them.

- `eager` launches one kernel after the other, fused ones with `train.fused`.
- `compiled` runs code of torch.compile (`train.compile`).
- `graphs` replays the kernels of `eager` from CUDA graphs (`train.cuda_graphs`).

All of them compute the same function; compiled code rounds differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from facetrain.errors import ConfigError
from facetrain.telemetry.log import logger
from facetrain.training.cuda_graphs import CudaBackend, GraphedNetwork
from facetrain.training.precision import InPrecision

Mode = Literal["eager", "compiled", "graphs"]

MOST_GRAPHED_IMAGES = 128
"""Images per rank up to which `auto` tries CUDA graphs. With more, the kernels take clearly longer than their launches:
an r50 on fused kernels has 1,500 of them, some 12 ms of the host's time; 128 images take 16 to 20 ms on an H200."""


@dataclass(frozen=True)
class ExecutionSettings:
    """Settings of a run that decide which modes it may use."""

    compile: str
    """auto, on or off."""
    cuda_graphs: str
    """auto, on or off."""
    fused: str
    """auto, on or off."""
    device: torch.device
    batch_size: int
    """Images per rank and micro-batch."""
    accumulate: int = 1
    """Micro-batches per step."""
    deterministic: bool = False
    checkpoint_activations: bool = False
    synchronized: bool = False
    """Whether batch norm exchanges statistics between ranks."""


def possible_modes(settings: ExecutionSettings) -> tuple[Mode, ...]:
    """Return the modes that the run may use, `eager` first if it is among them.

    Raises:
        ConfigError: a mode is required that cannot be used; the message has the reason.
    """
    reason = _against_graphs(settings)
    if settings.cuda_graphs == "on":
        if reason:
            raise ConfigError(f"train.cuda_graphs: on is not possible: {reason}; set it to auto or off")
        return ("graphs",)
    if settings.compile == "on":
        return ("compiled",)
    modes: list[Mode] = ["eager"]
    if settings.device.type != "cuda":
        return tuple(modes)
    if settings.deterministic:
        logger.info(
            "train.compile, train.cuda_graphs: auto is off: train.deterministic excludes a choice by time"
        )
        return tuple(modes)
    if settings.compile == "auto":
        if settings.fused == "on":
            logger.info("train.compile: auto is off: train.fused: on runs the same blocks as fused kernels")
        else:
            modes.append("compiled")
    if settings.cuda_graphs == "auto":
        if not reason and settings.batch_size > MOST_GRAPHED_IMAGES:
            reason = (
                f"with {settings.batch_size} images per rank (more than {MOST_GRAPHED_IMAGES}) the host launches "
                "kernels faster than the GPU runs them"
            )
        if reason:
            logger.info("train.cuda_graphs: auto is off: %s", reason)
        else:
            modes.append("graphs")
    return tuple(modes)


def _against_graphs(settings: ExecutionSettings) -> str:
    """Return why the backbone's kernels cannot be recorded, "" if they can."""
    if settings.device.type != "cuda":
        return f"CUDA graphs need a GPU, and this run is on {settings.device.type}"
    if settings.compile == "on":
        return "train.compile: on compiles the same network"
    if settings.checkpoint_activations:
        return "model.checkpoint_activations saves random states on the host, which a graph cannot record"
    if settings.synchronized:
        return (
            "batch norm over all ranks (model.batch_norm, train.global_batch_size) exchanges statistics in the middle "
            "of the network"
        )
    return ""


class Execution:
    """A network in the mode that is in use."""

    def __init__(self, network: InPrecision, settings: ExecutionSettings) -> None:
        """Take the network; it runs in the only possible mode, or in `eager` if there are several.

        Raises:
            ConfigError: a mode is required that cannot be used; the message has the reason.
        """
        self.modes = possible_modes(settings)
        """Modes that the run may use."""
        self._network = network
        self._graphed: GraphedNetwork | None = None
        if "graphs" in self.modes:
            self._graphed = GraphedNetwork(
                network,
                CudaBackend,
                accumulates=settings.accumulate > 1,
                required=settings.cuda_graphs == "on",
            )
        self.use(self.modes[0])

    @property
    def network(self) -> nn.Module:
        """Network for training steps, to be wrapped in DDP. Evaluation uses the backbone directly."""
        return self._graphed or self._network

    def use(self, mode: Mode) -> None:
        """Run the following training steps in a mode."""
        self.mode = mode
        self._network.use_compiled_code(mode == "compiled")
        if self._graphed:
            self._graphed.enabled = mode == "graphs"

    def record_again(self) -> None:
        """Discard recorded CUDA graphs, because the batches from now on have another shape."""
        if self._graphed and self._graphed.enabled:
            self._graphed.enabled = False
            self._graphed.enabled = True

    def has_failed(self, mode: Mode) -> bool:
        """Return whether a mode did not work on this rank, so that its steps ran in eager mode."""
        if mode == "graphs":
            return self._graphed is None or bool(self._graphed.failure)
        return mode == "compiled" and self._network.compilation_has_failed
