"""State of a run after a number of steps, and its conversion to and from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.snapshot import ClassRows, Snapshot
from facetrain.distributed import collectives
from facetrain.distributed.world import World
from facetrain.errors import CheckpointError, ConfigError, is_out_of_memory
from facetrain.head.head_group import Head, head_parts
from facetrain.models.known_identities import IDENTITIES, Names
from facetrain.optim.frozen_parts import trained_buffers
from facetrain.optim.stepper import Stepper
from facetrain.telemetry.meter import Meter
from facetrain.training.distillation import Distillation
from facetrain.training.early_stop import EarlyStop
from facetrain.training.precision import InPrecision


@dataclass
class TrainState:
    """Everything that training changes: weights, optimizer states, and what else a resumed run needs."""

    world: World
    network: InPrecision
    head: Head
    stepper: Stepper
    distillation: Distillation | None = None
    """Teacher and its loss; None without `distill`."""
    earlier: dict[str, Any] = field(default_factory=dict)
    """Description of the model before it was trained on the data of this start of the run; empty without one."""
    names: Names | None = None
    """Names of the identities, on the leader; None on the other ranks, or if they have none."""
    centers_remark: str = ""
    """What class centers of another run the head began with, and by what they were chosen; empty if it has none."""
    head_remark: str = ""
    """Reason why the head does not use its kernels on a GPU that could run them."""
    meter: Meter = field(default_factory=Meter)
    step: int = 0
    """Number of steps taken."""
    resumed: bool = False
    """Whether the state comes from a checkpoint."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the newest verification, named `set/metric`."""
    verified_step: int | None = None
    """Step of that verification; None before the first."""
    unverified: bool = False
    """Whether a signal interrupted the verification of this step, so that a resumed run must do it."""
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    """Verifications that count for `train.stop_early`."""
    skips_in_a_row: Tensor | float = 0
    """Number of steps that were skipped since the last one that was taken, a scalar on the device; the same on all
    ranks."""
    skipped_images: set[str] = field(default_factory=set)
    """Messages about the images that a rank could not read so far, one for each image; the same on all ranks."""

    @property
    def backbone(self) -> Backbone:
        """Network without the precision wrapper, whose names checkpoints use."""
        return self.network.backbone

    def describe_execution(self) -> str:
        """Return how training runs backbone and head, in words, and why not otherwise."""
        remark = f"; the head runs without its kernels ({self.head_remark})" if self.head_remark else ""
        return self.network.describe_execution() + remark

    def add_skipped_images(self, messages: Iterable[str]) -> None:
        """Add this rank's messages about unreadable images to the list of all ranks. Collective."""
        new = sorted(set(messages) - self.skipped_images)
        # In nearly all steps no rank has a new one: this reduction is cheaper than a gather.
        if collectives.any_rank(bool(new)):
            self.skipped_images.update(*collectives.gather_json(new))

    def snapshot(self, meta: dict[str, Any]) -> Snapshot:
        """Return the state to be saved, with `meta`. Collective: batch norm buffers are averaged over the ranks."""
        # One flat name space, as safetensors has it: the prefix says who reads a tensor.
        replicated = {
            # One set of statistics that any number of ranks can continue from; `rank_state` has each rank's, for the
            # same number.
            **_prefixed("backbone.", averaged_state(self.backbone)),
            **_prefixed("optimizer.", self._optimizer_state()),
            **_prefixed("distill.", self.distillation.state() if self.distillation else {}),
            **_prefixed("scale.", self.stepper.scale.state()),
            **_prefixed("head.", self.head.state()),
            **_prefixed("meter.", self.meter.state()),
            **_prefixed("skipped.", _text_tensor(self.skipped_images)),
            **_prefixed(IDENTITIES, self.names.tensors() if self.names else {}),
        }
        rows = tuple(ClassRows(*part.shard, part.head.row_state()) for part in head_parts(self.head))
        return Snapshot(
            step=self.step,
            replicated=replicated,
            rows=rows,
            num_classes=self.head.num_classes,
            # The batch norm statistics differ between ranks; only with its own does a rank continue bit for bit.
            rank_state=_prefixed("buffer.", dict(self.backbone.named_buffers())),
            meta=meta
            | {"verified_step": self.verified_step, "unverified": self.unverified}
            | {"early_stop": self.early_stop.model_dump(), "skips_in_a_row": int(self.skips_in_a_row)},
            metrics=self.metrics,
            copy_rows=self.head.on_device,
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint, written by any number of ranks.

        If the number of ranks is the same, training continues bit for bit as if it had not been interrupted.

        Raises:
            CheckpointError: it has another network, or does not come from a run.
            ConfigError: a parameter is frozen that the run has trained.
        """
        try:
            self._load(checkpoint)
        # A checkpoint of another network fails in many ways: by a missing name, another shape, another kind of value.
        except (RuntimeError, KeyError, ValueError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            raise CheckpointError(
                f"{checkpoint.folder}: belongs to another network, or was not written by a run "
                f"({' '.join(str(error).split())[:300]})"
            ) from error
        # Only now: if the checkpoint does not fit, the state stays at its step.
        self.step, self.metrics, self.resumed = checkpoint.step, dict(checkpoint.manifest.metrics), True
        self.unverified = checkpoint.meta.get("unverified") is True
        verified_step = checkpoint.meta.get("verified_step")
        self.verified_step = verified_step if isinstance(verified_step, int) else None
        self.early_stop = EarlyStop.of(checkpoint.meta)
        skips = checkpoint.meta.get("skips_in_a_row")
        self.skips_in_a_row = skips if isinstance(skips, int) else 0

    def _load(self, checkpoint: Checkpoint) -> None:
        self.backbone.load_state_dict(checkpoint.replicated("backbone."))
        if self.distillation:
            self.distillation.load_state(checkpoint.replicated("distill."), str(checkpoint.folder))
        self._load_optimizer(checkpoint.replicated("optimizer."), str(checkpoint.folder))
        self.stepper.scale.load_state(checkpoint.replicated("scale."))
        self.meter.load_state(checkpoint.replicated("meter."), self.world.device)
        self.skipped_images = _texts(checkpoint.replicated("skipped."))
        self.head.load_state(checkpoint.replicated("head."))
        self.head.load_rows(checkpoint.rows)
        # Another number of ranks continues from the averaged statistics.
        if checkpoint.manifest.world_size == self.world.size:
            saved = checkpoint.rank_state(self.world.rank)
            for name, buffer in self.backbone.named_buffers():
                buffer.copy_(saved[f"buffer.{name}"])

    def _optimizer_state(self) -> dict[str, Tensor]:
        # By name and not by place: the groups change with `model.lr_factors`, which a resumed run may change.
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._named_parameters().items()}
        return {
            f"{names[parameter]}.{key}": value
            for parameter, values in self.stepper.optimizer_states().items()
            for key, value in values.items()
        }

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the optimizers by the names that checkpoints use, and those that are not trained."""
        projection = dict(self.distillation.named_parameters("distill")) if self.distillation else {}
        return dict(self.backbone.named_parameters()) | projection

    def _load_optimizer(self, saved: dict[str, Tensor], origin: str) -> None:
        parameters, states = self._named_parameters(), self.stepper.optimizer_states()
        for name, value in saved.items():
            parameter_name, _, key = name.rpartition(".")
            if parameter_name.startswith("distill.") and parameter_name not in parameters:
                continue  # the projection to a teacher that the run no longer has
            parameter = parameters[parameter_name]
            if parameter not in states:
                raise ConfigError(
                    f"model.freeze, model.train_batch_norm: {origin} has trained {parameter_name}, and cannot continue "
                    "with it frozen; restore the two keys, or start a new run from these weights with model.init_from"
                )
            held = states[parameter].get(key)
            if (value.dim() and value.shape != parameter.shape) or (
                held is None or held.dtype != value.dtype
            ):
                raise ValueError(
                    f"optimizer state {name} has the shape {list(value.shape)} and {value.dtype}"
                )
            if value.dim():
                # In the parameter's memory layout (channels_last), because the fused kernels walk through the
                # memory of parameter and moment side by side and do not look at strides.
                value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
            states[parameter][key] = value.to(parameter.device)


def averaged_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the `state_dict` of a module, with the buffers averaged over the ranks. Collective.

    Buffers of frozen batch norms are equal on all ranks; a mean over three ranks would round them.
    """
    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    buffers = {name: buffer.clone() for name, buffer in trained_buffers(module) if name in state}
    collectives.mean_all_(buffers.values())
    return state | buffers


@contextmanager
def averaged_buffers(module: nn.Module) -> Iterator[None]:
    """Replace the buffers by their averages over the ranks for the duration of the context. Collective."""
    # In place: a second network for verification would need its memory once more.
    buffers = [buffer for _, buffer in trained_buffers(module)]  # before the context changes the mode
    local = [buffer.clone() for buffer in buffers]
    collectives.mean_all_(buffers)
    try:
        yield
    finally:
        for buffer, value in zip(buffers, local, strict=True):
            buffer.copy_(value)


def _text_tensor(texts: set[str]) -> dict[str, Tensor]:
    """Return texts as a tensor, because there may be more than a manifest can hold; nothing for no texts."""
    encoded = json.dumps(sorted(texts)).encode()
    return {"messages": torch.frombuffer(bytearray(encoded), dtype=torch.uint8)} if texts else {}


def _texts(saved: dict[str, Tensor]) -> set[str]:
    """Return the texts of `_text_tensor`."""
    return set(json.loads(saved["messages"].numpy().tobytes())) if saved else set()


def _prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}
