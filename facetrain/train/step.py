"""One step: forward, loss, backward, update."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from facetrain.data.augment import Augment
from facetrain.data.loader import Batch
from facetrain.distributed import collectives
from facetrain.errors import DivergedError
from facetrain.optim.stepper import Stepped
from facetrain.profiling import profiler_range
from facetrain.train.state import TrainState


class TrainStep:
    """Train on one global batch, in as many micro-batches as come.

    The host never waits for the device here, but where it is the device.
    """

    def __init__(self, network: nn.Module, augment: Augment, *, max_skipped_steps: int) -> None:
        self._network, self._augment = network, augment
        self._max_skipped = max_skipped_steps
        self._streak: Tensor | None = None
        self._loss: Tensor | float
        self._last: Stepped

    def __call__(self, state: TrainState, batches: tuple[Batch, ...]) -> None:
        """Take the step `state.step`. Collective.

        Raises:
            DivergedError: the loss or the gradient was not finite in too many steps running.
        """
        lr = state.stepper.begin(state.step)
        total: Tensor | float = 0.0
        for number, batch in enumerate(batches, start=1):
            with self._reduction(last=number == len(batches)):
                total = total + self._accumulate(state, batch, len(batches))
        with profiler_range("optimizer"):
            stepped = state.stepper.finish()
        self._loss, self._last = total, stepped
        state.meter.add("loss", total)
        state.meter.add("grad_norm", stepped.grad_norm)
        state.meter.add("skipped", stepped.skipped)
        state.meter.add("lr", lr)
        if state.spikes:
            spike = state.spikes.look(state.step + 1, torch.as_tensor(total), stepped.grad_norm, batches)
            state.meter.add("loss_spike", spike)
        state.meter.add_images(sum(len(batch.label_B) for batch in batches) * state.world.size)
        self._streak = stepped.skipped if self._streak is None else (self._streak + 1) * stepped.skipped
        if state.world.device.type == "cpu":
            self.check(state, batches)

    def check(self, state: TrainState, batches: tuple[Batch, ...]) -> None:
        """Stop a run whose steps are skipped again and again. Waits for the device; all ranks decide alike."""
        if self._streak is None or self._streak.item() < self._max_skipped:
            return
        norm, skipped = float(self._last.grad_norm), int(self._streak.item())
        mine = [[batch.sample_B.tolist(), batch.label_B.tolist()] for batch in batches]
        report = {
            "step": state.step,
            "epoch": batches[-1].epoch,
            "skipped_steps": skipped,
            "loss": str(float(self._loss)),
            "grad_norm": str(norm),
            "loss_scale": float(state.stepper.scale.value),
            "images_and_labels_by_rank": collectives.gather_json(mine),
        }
        raise DivergedError(
            f"the loss or the gradient was not finite in {skipped} steps running, the last of them step "
            f"{state.step} (loss {float(self._loss):g}, gradient norm {norm:g}; diverged.json lists its images); "
            "lower optim.lr, warm up for longer, or use precision fp32; the last checkpoint is as it was",
            report,
        )

    def _accumulate(self, state: TrainState, batch: Batch, parts: int) -> Tensor:
        with profiler_range("data"):
            image_BCHW = self._augment(batch.image_BHWC, batch.sample_B, batch.epoch)
        with profiler_range("forward"):
            embedding_BD = self._network(image_BCHW)
        with profiler_range("head"):
            loss = state.head(embedding_BD, batch.label_B) / parts
        with profiler_range("backward"):
            (loss * state.stepper.scale.value).backward()
        return loss.detach()

    def _reduction(self, *, last: bool) -> AbstractContextManager[None]:
        # Gradients travel once per step, with the last micro-batch.
        if last or not isinstance(self._network, DistributedDataParallel):
            return nullcontext()
        return self._network.no_sync()
