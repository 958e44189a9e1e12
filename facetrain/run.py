"""The composition root: builds every part of a run from its config, and hands them to the loop."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from facetrain.backbone.zoo import build_backbone
from facetrain.checkpoint.foreign import load_weights_into, read_weights
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.model_file import describe_backbone, save_model
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.config.load import dump_config
from facetrain.config.schema import Config
from facetrain.counter import key_of
from facetrain.data.augment import Augment
from facetrain.data.dataset import FaceSource, check_counts, open_source
from facetrain.data.loader import Loader
from facetrain.data.order import epoch_size, order_of
from facetrain.distributed import collectives
from facetrain.distributed.batchnorm import synchronise_batchnorm
from facetrain.distributed.signals import StopRequest
from facetrain.distributed.world import World, join
from facetrain.errors import (
    ConfigError,
    DataError,
    DivergedError,
    FacetrainError,
    LostRankError,
    RankError,
    RunError,
)
from facetrain.head.margin import build_margin
from facetrain.head.margin_head import MarginHead
from facetrain.optim.groups import build_optimizer, freeze, parameter_groups
from facetrain.optim.scaler import LossScale
from facetrain.optim.schedule import polynomial
from facetrain.optim.stepper import Stepper
from facetrain.telemetry.console import Console
from facetrain.telemetry.jsonl import JsonLines
from facetrain.telemetry.log import log_to, logger, stop_logging
from facetrain.telemetry.plot import plot_curves
from facetrain.telemetry.recorder import Recorder, Sink
from facetrain.telemetry.tensorboard import TensorBoard
from facetrain.train.hooks import RunHooks
from facetrain.train.loop import fit
from facetrain.train.precision import InPrecision, memory_format_for
from facetrain.train.run_folder import claim_folder, open_folder, set_aside_later
from facetrain.train.state import TrainState, averaged_state
from facetrain.train.step import TrainStep
from facetrain.train.summary import summary
from facetrain.verify.pairs import PairSet, load_targets
from facetrain.verify.verifier import Verifier

_DEFAULT_BATCH = 128
# torch 2.13 renamed the option.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


@dataclass(frozen=True)
class Plan:
    """The whole numbers that follow from the config, the dataset and the number of ranks."""

    local_batch_size: int
    global_batch_size: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int


def train(config: Config, run_dir: Path | None = None) -> int:
    """Train a new run on this rank; return the exit code. Collective.

    Where an elastic agent has started the workers again, the run goes on from its newest checkpoint.
    """
    with _joined(config) as world:
        with _one_voice(world):
            folder, again = claim_folder(world, given=run_dir, default=Path(config.run.dir) / config.run.name)
        return _run(config, world, folder, Checkpoint.open(folder) if again else None)


def resume(config: Config, run_dir: Path, step: int | None = None) -> int:
    """Go on with a run from a checkpoint, the newest by default; return the exit code. Collective."""
    with _joined(config) as world:
        with _one_voice(world):
            # Workers that were started again have newer checkpoints than the one first asked for.
            checkpoint = Checkpoint.open(run_dir, step if world.restarts == 0 else None)
        if world.is_leader and world.restarts == 0:
            set_aside_later(run_dir, checkpoint.step)
        collectives.barrier()
        return _run(config, world, run_dir, checkpoint)


@contextmanager
def _joined(config: Config) -> Iterator[World]:
    with join(config.train.device, timeout_s=config.train.timeout_s) as world:
        try:
            yield world
        except FacetrainError:
            raise
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise RunError(
                f"rank {world.rank}: {where}{error.strerror or error}; what was saved before is whole"
            ) from error
        except RuntimeError as error:
            said = " ".join(str(error).split())
            if "imed out" in said or "imeout" in said:
                raise RankError(
                    f"rank {world.rank} waited {config.train.timeout_s:.0f} s for another: {said}"
                ) from error
            if world.size > 1 and any(
                word in said for word in ("onnection", "NCCL", "gloo", "reset by peer")
            ):
                raise LostRankError(said) from error
            raise


@contextmanager
def _one_voice(world: World) -> Iterator[None]:
    """Run what every rank may fail at, before any of them goes on: the first that failed says so. Collective."""
    fault: FacetrainError | None = None
    try:
        yield
    except FacetrainError as error:
        fault = error
    failed = collectives.gather_json(fault.exit_code if fault else 0)
    first = next((rank for rank, code in enumerate(failed) if code), None)
    if first is None:
        return
    if fault is not None and first == world.rank:
        raise fault
    silent = LostRankError(f"rank {first} failed")
    silent.exit_code = failed[first]
    raise silent


def _run(config: Config, world: World, folder: Path, checkpoint: Checkpoint | None) -> int:
    since = time.perf_counter()
    with _one_voice(world):
        _draw_synthetic(config, world)
    collectives.barrier()
    with _one_voice(world):
        source, sets = _open_data(config)
        plan = plan_steps(config, epoch_size(source), world.size)
        state = _build_state(config, world, source.num_classes, plan, folder)
        state.head.check_labels(source.labels)
        if world.is_leader:
            open_folder(folder, world, dump_config(config))
    network = _distribute(state.network, world, config.train.compress_gradients)
    if checkpoint is not None:
        state.restore(checkpoint)
    log = log_to(folder / "log.txt", world.rank)
    try:
        return _train(
            config, world, folder, source, sets, plan, state, network, since, resumed=checkpoint is not None
        )
    finally:
        stop_logging(log)


def _train(
    config: Config,
    world: World,
    folder: Path,
    source: FaceSource,
    sets: list[PairSet],
    plan: Plan,
    state: TrainState,
    network: nn.Module,
    since: float,
    *,
    resumed: bool,
) -> int:
    recorder, console = _open_recorder(config, world, folder, plan, state.step, resumed=resumed)
    order = order_of(
        source, seed=config.seed, global_batch_size=plan.global_batch_size, mode=config.data.shuffle
    )
    workers = _workers(config, world)
    loader = Loader(
        source,
        order,
        rank=world.rank,
        world_size=world.size,
        local_batch_size=plan.local_batch_size,
        accumulate=config.optim.accumulate,
        workers=workers,
        image_size=config.data.image_size,
        device=world.device,
        bad_records=config.data.bad_records,
        start_step=state.step,
        stop_step=plan.total_steps,
    )
    augment = Augment(key_of(config.seed, 3), **config.data.augment.model_dump())
    step = TrainStep(network, augment, max_skipped_steps=config.train.max_skipped_steps)
    description, started_at = _describe(config), state.step
    say = console.say if console else logger.info
    if console:
        _announce(console, config, world, source, plan, folder, state.step)
    with StopRequest() as stop:
        hooks = RunHooks(
            recorder=recorder,
            step=step,
            loader=loader,
            verifier=Verifier(
                sets,
                image_size=config.data.image_size,
                batch_size=config.eval.batch_size,
                device=world.device,
                workers=workers,
            ),
            writer=CheckpointWriter(
                folder / "checkpoints",
                keep=config.checkpoint.keep,
                asynchronous=config.checkpoint.asynchronous,
                best_metric=config.checkpoint.best_metric,
            ),
            stop=stop,
            meta=lambda _: {"model": description, "config": dump_config(config), "plan": vars(plan)},
            say=say,
            total_steps=plan.total_steps,
            log_every=config.log.every_steps,
            verify_every=config.eval.every_steps,
            save_every=config.checkpoint.every_steps,
            save_every_minutes=config.checkpoint.every_minutes,
        )
        try:
            if not resumed:
                hooks.verify_now(state)  # also finds out before days of training that verification works
            try:
                fit(state, loader, step, hooks)
            except DivergedError:
                hooks.finish()  # all ranks are here: the checkpoint in flight is from before
                raise
            if (
                state.step == plan.total_steps
                and state.step % config.checkpoint.every_steps
                and state.step > started_at
            ):
                hooks.save_now(state)
            hooks.finish()
        finally:
            loader.close()
            recorder.close()
    if hooks.signal:
        say(f"stopped at step {state.step}; `facetrain resume {folder}` goes on from step {hooks.last_saved}")
        return 128 + hooks.signal
    weights = averaged_state(state.backbone)
    if world.is_leader:
        save_model(folder / "model.safetensors", weights, description)
        plot_curves(folder / "metrics.jsonl", folder / "curves.png")
        print(
            summary(folder, config.eval.targets, config.eval_dir, loader.skipped, time.perf_counter() - since)
        )
    return 0


def _draw_synthetic(config: Config, world: World) -> None:
    wanted, folder = config.data.synthetic, Path(config.data.train)
    if wanted is None or folder.exists() or not world.is_leader:
        return
    from facetrain.data.synthetic import write_dataset

    write_dataset(
        folder,
        identities=wanted.identities,
        images_per_identity=wanted.images_per_identity,
        eval_identities=wanted.eval_identities,
        eval_pairs=wanted.eval_pairs,
        image_size=config.data.image_size,
        seed=wanted.seed,
    )


def _open_data(config: Config) -> tuple[FaceSource, list[PairSet]]:
    folder = Path(config.data.train)
    source = open_source(folder, min_images_per_identity=config.data.min_images_per_identity)
    check_counts(source, folder, num_classes=config.data.num_classes, num_images=config.data.num_images)
    return source, load_targets(config.eval.targets, Path(config.eval_dir))


def plan_steps(config: Config, num_images: int, world_size: int) -> Plan:
    """Work out batch sizes and steps.

    Raises:
        ConfigError: the global batch cannot be shared by the ranks.
        DataError: the dataset is smaller than one global batch.
    """
    parts = world_size * config.optim.accumulate
    wanted = config.train.global_batch_size
    if wanted and wanted % parts:
        raise ConfigError(
            f"train.global_batch_size: {wanted} images cannot be shared by {world_size} ranks in "
            f"{config.optim.accumulate} micro-batches; take a multiple of {parts}"
        )
    local = wanted // parts if wanted else config.train.batch_size or _DEFAULT_BATCH
    if local < 2:
        raise ConfigError(
            f"train: {local} image per rank and micro-batch is too few for batch normalisation; take 2"
        )
    steps = num_images // (local * parts)
    if steps == 0:
        raise DataError(
            f"{config.data.train}: {num_images:,} images are fewer than one global batch of {local * parts:,}"
        )
    total = min(steps * config.train.epochs, config.train.max_steps or steps * config.train.epochs)
    warmup = round(config.optim.warmup_epochs * steps)
    if warmup > total:
        raise ConfigError(
            f"optim.warmup_epochs: {warmup:,} steps of warm-up are more than the {total:,} of the run"
        )
    return Plan(local, local * parts, steps, total, warmup)


def _describe(config: Config) -> dict[str, Any]:
    return describe_backbone(
        config.model.backbone,
        **({"layers": config.model.layers, "widths": config.model.widths} if config.model.layers else {}),
        embedding_size=config.model.embedding_size,
        image_size=config.data.image_size,
    )


def _build_state(config: Config, world: World, num_classes: int, plan: Plan, folder: Path) -> TrainState:
    torch.manual_seed(config.seed)  # the same weights on every rank
    options = _describe(config)["backbone"]
    backbone = build_backbone(
        options.pop("name"),
        **options,
        dropout=config.model.dropout,
        checkpoint_activations=config.model.checkpoint_activations,
    )
    if config.model.init_from:
        load_weights_into(backbone, read_weights(Path(config.model.init_from))[0], config.model.init_from)
    freeze(backbone, config.model.freeze)
    memory_format = memory_format_for(backbone, world.device, channels_last=config.train.channels_last)
    backbone = backbone.to(world.device, memory_format=memory_format)  # type: ignore[call-overload]
    sync = config.model.batch_norm == "sync" or (
        config.model.batch_norm == "auto" and config.train.global_batch_size is not None
    )
    if sync:
        synchronise_batchnorm(backbone, world.device)
    network = InPrecision(
        backbone,
        config.train.precision,
        world.device,
        memory_format=memory_format,
        compile=config.train.compile,
    )
    scale = LossScale(world.device, enabled=config.train.precision == "fp16")
    head = _build_head(
        config, world, num_classes, folder, fused=config.optim.accumulate == 1 and not scale.enabled
    )
    stepper = Stepper(
        backbone,
        build_optimizer(
            parameter_groups(backbone, config.model.lr_factors),
            config.optim.name,
            momentum=config.optim.momentum,
            betas=config.optim.betas,
            eps=config.optim.eps,
            weight_decay=config.optim.weight_decay,
        ),
        head,
        scale,
        schedule=lambda step: polynomial(
            step,
            base=config.optim.lr,
            warmup_steps=plan.warmup_steps,
            total_steps=plan.total_steps,
            power=config.optim.power,
        ),
        clip_grad_norm=config.optim.clip_grad_norm,
    )
    torch.manual_seed(key_of(config.seed, 4, world.rank) & (2**63 - 1))  # dropout differs from rank to rank
    return TrainState(world, network, head, stepper)


def _build_head(config: Config, world: World, num_classes: int, folder: Path, *, fused: bool) -> MarginHead:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
    return MarginHead(
        embedding_size=config.model.embedding_size,
        num_classes=num_classes,
        margin=build_margin(**config.head.margin.model_dump()),
        rank=world.rank,
        world_size=world.size,
        sample_rate=config.head.sample_rate,
        seed=key_of(config.seed, 5),
        optimizer=config.optim.name,
        momentum=config.optim.momentum,
        betas=config.optim.betas,
        eps=config.optim.eps,
        weight_decay=config.optim.weight_decay,
        weight_dtype=dtypes[config.head.weight_dtype],
        momentum_dtype=dtypes[config.head.momentum_dtype],
        placement=config.head.placement,
        folder=folder / "centres" if config.head.placement == "disk" else None,
        fused=fused,
        chunk_size=None if config.head.chunk_size == "auto" else config.head.chunk_size,
        # The products of the sweep in 16 bits, its statistics and the own class's cosine never.
        product_dtype=torch.bfloat16 if config.train.precision == "bf16" else None,
        device=world.device,
    )


def _distribute(network: nn.Module, world: World, compress: str) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if world.size == 1:
        return network
    # Batch norm's statistics stay each rank's own until they are averaged.
    own_buffers: dict[str, Any] = {_SYNC_BUFFERS: False}
    wrapped = DistributedDataParallel(
        network,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **own_buffers,
    )
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    if compress in hooks:
        wrapped.register_comm_hook(None, hooks[compress])
    return wrapped


def _workers(config: Config, world: World) -> int:
    if config.data.workers != "auto":
        return config.data.workers
    return min(max((os.cpu_count() or 1) // world.local_size, 1), 16)


def _open_recorder(
    config: Config, world: World, folder: Path, plan: Plan, step: int, *, resumed: bool
) -> tuple[Recorder, Console | None]:
    if not world.is_leader:
        return Recorder(), None
    resume_at = step if resumed else None
    console = Console(total_steps=plan.total_steps, start_step=step)
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", resume_at=resume_at), console]
    if config.log.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", resume_at=resume_at))
    return Recorder(sinks), console


def _announce(
    console: Console, config: Config, world: World, source: FaceSource, plan: Plan, folder: Path, step: int
) -> None:
    console.say(
        f"{folder}: {source.num_images:,} images of {source.num_classes:,} identities; {config.model.backbone}, "
        f"{config.head.margin.type}; {plan.total_steps:,} steps of {plan.global_batch_size:,} images on {world.size} "
        f"× {world.device.type} in {config.train.precision}"
        + (f"; going on from step {step:,}" if step else "")
    )
