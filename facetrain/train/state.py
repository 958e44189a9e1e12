"""Everything that a run consists of at a step, to be saved and to go on from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.snapshot import Snapshot
from facetrain.distributed import collectives
from facetrain.distributed.world import World
from facetrain.errors import CheckpointError
from facetrain.head.margin_head import MarginHead
from facetrain.optim.stepper import Stepper
from facetrain.telemetry.meter import Meter
from facetrain.train.loss_spikes import SpikeDetector
from facetrain.train.precision import InPrecision


@dataclass
class TrainState:
    """What changes while training, after `step` steps."""

    world: World
    network: InPrecision
    head: MarginHead
    stepper: Stepper
    spikes: SpikeDetector | None = None
    meter: Meter = field(default_factory=Meter)
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest verification, as `set/number`."""
    unverified: bool = False
    """Whether the verification of this step was left for a signal, and is still to be done."""

    @property
    def backbone(self) -> Backbone:
        """The network that is trained, under its own names."""
        return self.network.backbone

    def snapshot(self, meta: dict[str, Any]) -> Snapshot:
        """Return the state as a checkpoint holds it. Collective: buffers are averaged over the ranks."""
        replicated = {
            **_prefixed("backbone.", averaged_state(self.backbone)),
            **_prefixed("optimizer.", self._optimizer_state()),
            **_prefixed("scale.", self.stepper.scale.state()),
            **_prefixed("head.", self.head.state()),
            **_prefixed("meter.", self.meter.state()),
            **_prefixed("spikes.", self.spikes.state() if self.spikes else {}),
        }
        return Snapshot(
            step=self.step,
            replicated=replicated,
            rows=self.head.row_state(),
            shard=(self.head.shard.start, self.head.shard.stop),
            num_classes=self.head.num_classes,
            rank_state=self._rank_state(),
            meta=meta | {"unverified": self.unverified},
            metrics=self.metrics,
            copy_rows=self.head.on_device,
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of any number of ranks; of the same number, exactly as before.

        Raises:
            CheckpointError: it belongs to another network or another set of identities, or holds what no run saves.
        """
        manifest = checkpoint.manifest
        if manifest.num_classes != self.head.num_classes:
            raise CheckpointError(
                f"{checkpoint.folder}: has {manifest.num_classes:,} identities, the dataset {self.head.num_classes:,}; "
                "give the dataset it was trained on, or start anew with model.init_from"
            )
        try:
            self._take_over(checkpoint)
        except (RuntimeError, KeyError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{checkpoint.folder}: belongs to another network, or was not written by a run "
                f"({' '.join(str(error).split())[:300]})"
            ) from error
        self.step, self.metrics = checkpoint.step, dict(manifest.metrics)
        self.unverified = checkpoint.meta.get("unverified") is True

    def _take_over(self, checkpoint: Checkpoint) -> None:
        self.backbone.load_state_dict(checkpoint.replicated("backbone."))
        self._load_optimizer(checkpoint.replicated("optimizer."))
        self.stepper.scale.load_state(checkpoint.replicated("scale."))
        self.meter.load_state(checkpoint.replicated("meter."), self.world.device)
        if self.spikes:
            self.spikes.load_state(checkpoint.replicated("spikes."))
        self.head.load_rows(checkpoint.rows)
        self.head.load_state(checkpoint.replicated("head."))
        if checkpoint.manifest.world_size == self.world.size:
            self._load_rank_state(checkpoint.rank_state(self.world.rank))

    def _optimizer_state(self) -> dict[str, Tensor]:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.backbone.named_parameters()}
        return {
            f"{names[parameter]}.{key}": value
            for parameter, values in self.stepper.optimizer.state.items()
            for key, value in values.items()
        }

    def _load_optimizer(self, saved: dict[str, Tensor]) -> None:
        parameters = dict(self.backbone.named_parameters())
        for name, value in saved.items():
            parameter_name, _, key = name.rpartition(".")
            parameter = parameters[parameter_name]
            if value.dim() and value.shape != parameter.shape:
                raise ValueError(f"optimizer state {name} has the shape {list(value.shape)}")
            if value.dim():
                # Laid out as the parameter is: fused kernels walk through both in the order of memory.
                value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
            self.stepper.optimizer.state[parameter][key] = value.to(parameter.device)

    def _rank_state(self) -> dict[str, Tensor]:
        state = {"random.cpu": torch.get_rng_state()}
        if self.world.device.type == "cuda":
            state["random.cuda"] = torch.cuda.get_rng_state(self.world.device)
        # Batch norm keeps statistics of its own on each rank; averaged ones would not go on exactly.
        return state | _prefixed("buffer.", dict(self.backbone.named_buffers()))

    def _load_rank_state(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state["random.cpu"])
        if "random.cuda" in state and self.world.device.type == "cuda":
            torch.cuda.set_rng_state(state["random.cuda"], self.world.device)
        for name, buffer in self.backbone.named_buffers():
            buffer.copy_(state[f"buffer.{name}"])


def averaged_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state of a module with its buffers averaged over the ranks. Collective."""
    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers() if name in state}
    collectives.mean_all_(buffers.values())
    return state | buffers


@contextmanager
def averaged_buffers(module: nn.Module) -> Iterator[None]:
    """Within, the buffers are those of `averaged_state`, so that all ranks verify one network. Collective."""
    own = {name: buffer.clone() for name, buffer in module.named_buffers()}
    collectives.mean_all_(buffer for _, buffer in module.named_buffers())
    try:
        yield
    finally:
        for name, buffer in module.named_buffers():
            buffer.copy_(own[name])


def _prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}
