"""Builder of a run's state: network, head and optimizers on this rank's device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.device.capability import bfloat16_fault
from facetrain.distributed import collectives
from facetrain.distributed.agreement import fail_together
from facetrain.distributed.sync_batch_norm import use_sync_batch_norm
from facetrain.distributed.world import World
from facetrain.errors import ConfigError, DataError
from facetrain.models.known_identities import CenterChoice, Names
from facetrain.models.saved_centers import choose_centers_of, initialize_centers
from facetrain.optim.loss_scale import LossScale
from facetrain.remote.download import local_path
from facetrain.run.parts.backbone import build_initial_backbone
from facetrain.run.parts.distillation import build_distillation
from facetrain.run.parts.head import build_head
from facetrain.run.parts.step_schedule import StepSchedule
from facetrain.run.parts.stepper import build_stepper
from facetrain.telemetry.log import warn
from facetrain.training.precision import InPrecision, memory_format_for
from facetrain.training.state import TrainState


def check_precision(config: Config, world: World) -> None:
    """Check that the GPU computes in the number format of the config without emulating it.

    Raises:
        ConfigError: it has no bfloat16, in which PyTorch would compute many times slower, without a word.
    """
    if config.train.precision != "bf16" or world.device.type != "cuda":
        return
    if fault := bfloat16_fault(world.device):
        raise ConfigError(f"{fault}; set it to fp16")


@dataclass(frozen=True)
class Identities:
    """Names of the identities, and the class centers of another run with which they begin."""

    names: Names | None = None
    """For the checkpoints, on the leader; None on the other ranks, or if they have none."""
    centers: CenterChoice | None = None
    """None: a new run draws all of them."""


def read_identities(config: Config, world: World, num_classes: int, source: FaceDataset) -> Identities:
    """Read the names of the identities on the leader, and let it choose the centers for all ranks. Collective.

    The other ranks read no names: 29 million take gigabytes in each process.

    Raises:
        ModelError: the centers do not fit the people; see `choose_centers`.
        CheckpointError: the checkpoint of the other run is damaged.
        DataError: the names cannot be read, and centers are chosen by them.
    """
    names, centers = None, None
    with fail_together(world):
        if world.is_leader:
            names = _names_of(source, required=config.inherits_centers)
            centers = _choose_centers(config, names, num_classes)
    if config.inherits_centers:
        centers = centers or CenterChoice(np.empty(num_classes, np.int64), remark="")
        collectives.broadcast_(torch.from_numpy(centers.number))
    return Identities(names, centers)


def _choose_centers(config: Config, names: Names | None, num_classes: int) -> CenterChoice | None:
    if not config.model.init_from or not config.inherits_centers:
        return None
    path, may_grow = local_path(config.model.init_from), config.head.init_from == "extend"
    min_images = config.data.min_images_per_identity
    return choose_centers_of(path, names, num_classes, may_grow=may_grow, min_images=min_images)


def build_state(
    config: Config,
    world: World,
    num_classes: int,
    schedule: StepSchedule,
    folder: Path,
    source: FaceDataset,
    identities: Identities = Identities(),
) -> TrainState:
    """Build network, head and optimizers on this rank's device.

    The weights of the backbone are the same on every rank, and a class center is the same whichever rank holds it.
    """
    # On the CPU, and from one seed: its weights do not depend on the device or on the number of ranks.
    backbone, first_model = build_initial_backbone(config, source)
    memory_format = memory_format_for(backbone, world.device)
    # Before the optimizers are built: their moments take the layout of the weights.
    backbone = backbone.to(world.device, memory_format=memory_format)  # type: ignore[call-overload]
    if is_batch_norm_synced(config):
        # Before the compiler and the fused kernels look at the modules.
        use_sync_batch_norm(backbone, world.device)
    network = InPrecision(
        backbone,
        config.train.precision,
        world.device,
        memory_format=memory_format,
        compile=config.train.compile,
    )
    scale = LossScale(world.device, enabled=config.train.precision == "fp16")
    head = build_head(config, world, num_classes, folder, schedule=schedule, source=source)
    centers = identities.centers
    if config.model.init_from and centers:
        initialize_centers(head, local_path(config.model.init_from), centers.number)
    distillation = build_distillation(config, world, num_classes, folder, schedule, source)
    # After the head and the teacher: it takes the projection, and sets the rate of the head in each step.
    stepper = build_stepper(config, backbone, head, scale, schedule, distillation)
    remark = centers.remark if centers else ""
    return TrainState(
        world,
        network,
        head,
        stepper,
        distillation,
        first_model,
        names=identities.names,
        centers_remark=remark,
    )


def _names_of(source: FaceDataset, *, required: bool) -> Names | None:
    """Return the names of the identities; None if they have none, or cannot be read and are not required."""
    try:
        found = source.identity_names()
        return Names.of(found) if found else None
    except DataError as error:
        if required:
            raise
        warn(f"{error}; the checkpoints have no names of identities")
        return None


def is_batch_norm_synced(config: Config) -> bool:
    """Return whether batch norm uses the statistics of all ranks, if there are several."""
    if config.model.batch_norm == "auto":
        # A global batch size promises a result that does not depend on the number of ranks.
        return config.train.global_batch_size is not None
    return config.model.batch_norm == "sync"
