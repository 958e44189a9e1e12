"""Training step: augmentation, forward, loss, backward, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from facetrain.backbone.base import Backbone
from facetrain.counter_rng import Stream, key_of
from facetrain.data.images.augment import Augment
from facetrain.data.loading.loader import Batch
from facetrain.device.profiler_ranges import profiler_range
from facetrain.distributed import collectives
from facetrain.errors import ConfigError, DivergedError
from facetrain.head.head_group import head_parts
from facetrain.head.margins.function_margin import is_own
from facetrain.optim.frozen_parts import trained_buffers
from facetrain.optim.parameter_names import named_plainly
from facetrain.optim.stepper import StepResult
from facetrain.torch_private import foreach_copy_
from facetrain.training.state import TrainState

MAX_SKIPPED_STEPS = 10
"""Number of consecutive steps whose loss or gradient is not finite, after which a run ends; in fp16 there are more."""


class TrainStep:
    """One step of training on a global batch, in one or more micro-batches.

    Never synchronizes with the GPU: losses, norms and the decision to skip a step stay on the device as scalar
    tensors, so the host can prepare the next steps while the GPU works. `check_divergence`, which does wait, is
    called only with reports, and before verifications and checkpoints. A network with torch's `SyncBatchNorm` waits
    in its forward pass.
    """

    def __init__(
        self,
        network: nn.Module,
        augment: Augment,
        *,
        seed: int = 0,
        max_skipped_steps: int = MAX_SKIPPED_STEPS,
        on_first_images: Callable[[Tensor], object] | None = None,
    ) -> None:
        """Take the network (in DDP if there are several ranks) and the bound on consecutive skipped steps.

        The seeds of torch's generators follow from `seed`, the step and the micro-batch. `on_first_images` gets the
        augmented images of the first micro-batch, before the network does.
        """
        self._network, self._augment, self._on_first_images = network, augment, on_first_images
        self._seed = seed
        self._max_skipped = max_skipped_steps
        # Found through the wrappers, which share the tensors of the backbone.
        self._statistics = _Statistics(network)
        self._number = 0
        self._loss: Tensor | float
        self._result: StepResult

    def __call__(self, state: TrainState, batches: tuple[Batch, ...]) -> None:
        """Take the step number `state.step`. Collective.

        Raises:
            DivergedError: on a CPU, if the loss or the gradient was not finite in too many consecutive steps.
            ConfigError: the embeddings have no gradient, or with several ranks and micro-batches, the network does not
                use one of its parameters.
        """
        # Set learning rate, stage and random keys of the step, all from its number alone, so that a resumed run repeats
        # them.
        lr = state.stepper.begin(state.step)
        if state.distillation:
            state.distillation.begin_step(state.step)
        # fp16 overflows now and then, until its loss scale is found. Such a step is skipped, but the statistics of the
        # batch norms have seen it. In the other formats a network whose activations overflow has diverged for good.
        restores_statistics = state.stepper.scale.enabled
        if restores_statistics:
            self._statistics.keep()

        # Forward and backward. Gradients add up over the micro-batches, and DDP exchanges them with the last one, while
        # its backward pass still runs.
        loss: Tensor | float = 0.0
        for number, batch in enumerate(batches, start=1):
            with self._gradient_exchange(state.backbone, enabled=number == len(batches)):
                loss = loss + self._forward_backward(state, batch, number, len(batches))

        # Clip, agree among the ranks that the gradient is finite, update backbone and class centers. Whether the step
        # is skipped stays on the device, where the optimizer's kernels read it: the host does not wait for the answer.
        with profiler_range("optimizer"):
            result = state.stepper.finish()
            if restores_statistics:
                self._statistics.restore_where(result.skipped)

        # Metrics: sums on the device, read by the host when a report is due.
        # Counted from 1, as in all reports: `state.step` grows only after this call.
        self._number, self._loss, self._result = state.step + 1, loss, result
        state.meter.add("loss", loss)
        state.meter.add("grad_norm", result.grad_norm)
        state.meter.add("skipped", result.skipped)
        state.meter.add("lr", lr)
        state.meter.add_images(sum(len(batch.label_B) for batch in batches) * state.world.size)
        # Counted on the device: n skipped steps in a row give n, and a step that was taken gives 0.
        state.skips_in_a_row = (state.skips_in_a_row + 1) * result.skipped
        if state.world.device.type == "cpu":  # nothing to wait for: check every step
            self.check_divergence(state, batches)

    def check_divergence(self, state: TrainState, batches: tuple[Batch, ...]) -> None:
        """Raise an error if too many consecutive steps were skipped. Waits for the device; all ranks decide the same.

        Raises:
            DivergedError: with a report that lists the images of this step.
        """
        skipped = int(state.skips_in_a_row)
        if skipped < self._max_skipped:
            return
        # `skipped` was reduced over the ranks, so all of them come here together.
        what = (
            f"the loss or the gradient was not finite in {skipped} consecutive steps, the last of them step"
        )
        raise self._diverged(state, batches, f"{what} {self._number}")

    def require_finite_network(self, state: TrainState, batches: tuple[Batch, ...]) -> None:
        """Check what was trained, after this step: the last steps of a run may have spoiled it. Collective.

        Raises:
            DivergedError: one of them is not finite on some rank; the report is that of `check_divergence`.
        """
        # What is not trained may be infinite, such as a mask of one's own network; so statistics go by their names.
        weights = [weight.detach() for weight in state.backbone.parameters() if weight.requires_grad]
        statistics = [value for name, value in trained_buffers(state.backbone) if "running_" in name]
        # A count is always finite, and a layer without weights has no largest one.
        numbers = [each for each in (*weights, *statistics) if each.is_floating_point() and each.numel()]
        largest = nn.utils.get_total_norm(numbers, math.inf)
        if collectives.any_rank(not largest.isfinite().item()):
            what = f"the network has weights or batch norm statistics that are not finite after step {self._number}"
            raise self._diverged(state, batches, what)

    def _diverged(self, state: TrainState, batches: tuple[Batch, ...], what: str) -> DivergedError:
        """Return the error of a run that has diverged, with a report that lists the images of this step. Collective."""
        loss, norm = float(self._loss), float(self._result.grad_norm)
        local_images = [[batch.sample_B.tolist(), batch.label_B.tolist()] for batch in batches]
        report = {
            "step": self._number,
            "epoch": batches[-1].epoch,
            "skipped_steps": int(state.skips_in_a_row),
            "loss": str(loss),
            "grad_norm": str(norm),
            "loss_scale": float(state.stepper.scale.value),
            "images_and_labels_by_rank": collectives.gather_json(local_images),
        }
        own = [part.head.margin.name for part in head_parts(state.head) if is_own(part.head.margin)]
        advice = (
            f"write the margin {own[0]} so that its value and its derivative are finite for each cosine (torch.where "
            "passes on a NaN of the branch that it does not take); if they are, "
            if own
            else ""
        )
        # The last step that was taken has weights from which no other could be taken.
        sound = self._number - int(state.skips_in_a_row)
        restart = (
            f"resume from a checkpoint before step {sound} (--checkpoint), or start again if there is none"
            if sound > 1
            else "start again"
        )
        # A short run ends while the scale is still too large. It multiplies the gradient, and not the loss.
        scale = state.stepper.scale
        if scale.enabled and float(scale.value) > 1 and math.isfinite(loss) and not math.isfinite(norm):
            advice = (
                "in fp16, steps are skipped until the loss scale is found: take more (train.max_steps, train.epochs); "
                f"if that does not help, {advice}"
            )
        return DivergedError(
            f"{what} (loss {loss:g}, gradient norm {norm:g}; diverged.json lists its images); {advice}lower "
            f"optim.lr, raise optim.warmup_epochs or set train.precision to fp32 if it is not, and {restart}",
            report,
        )

    def _forward_backward(
        self, state: TrainState, batch: Batch, number: int, num_micro_batches: int
    ) -> Tensor:
        """Add the gradient of the micro-batch `number`; return its share of the loss, a scalar on the device."""
        # For parts of one's own that draw from torch's generators, such as nn.Dropout: facetrain's own parts do not.
        # Each rank draws its own numbers, and a resumed run the same, without a saved state of the generators.
        self._seed_torch(state, number, state.world.rank)
        if batch.label_B.device.type != "cpu":
            # Before the forward pass, which hides the exchange: a head that samples selects its classes on the host.
            state.head.expect_labels(batch.host_label_B)
            if state.distillation:
                state.distillation.expect_labels(batch.host_label_B)
        with profiler_range("data"):
            # By sample and epoch, not by a random state: a resumed run, on any number of ranks, draws the same.
            image_BCHW = self._augment(batch.image_BHWC, batch.draw_B, batch.epoch)
            inputs = [image_BCHW]
            if batch.landmarks_B52 is not None:
                moved = self._augment.move_landmarks(batch.landmarks_B52, batch.draw_B, batch.epoch)
                inputs.append(moved.to(image_BCHW.device, non_blocking=True))
            keys = {}
            if state.backbone.draws_by_sample:
                key_B = self._augment.network_keys(batch.draw_B, batch.epoch)
                keys["key_B"] = key_B.to(image_BCHW.device, non_blocking=True)
        if self._on_first_images is not None:
            self._on_first_images(image_BCHW)
            self._on_first_images = None
        with profiler_range("forward"):
            # Through DDP, not the backbone itself: its hooks exchange gradients while the backward pass runs.
            embedding_BD = self._network(*inputs, **keys)
            if not embedding_BD.requires_grad:
                raise ConfigError(
                    "model.backbone: the network returns embeddings without a gradient, so it would not be trained; "
                    "remove torch.no_grad and detach from its code"
                )
        with profiler_range("head"):
            # A margin gets the batch of all ranks, and must draw the same on each.
            self._seed_torch(state, number)
            # The head gathers the embeddings of all ranks, because each rank has only a part of the class centers.
            # The loss is a mean over the micro-batch: divided, the gradients sum to the mean over the step. Without a
            # weight it is a report alone, in which the centers neither move nor decay.
            is_trained = state.distillation is None or state.distillation.margin_weight > 0
            with torch.set_grad_enabled(is_trained):
                loss = state.head(embedding_BD, batch.label_B) / num_micro_batches
        total = loss
        if state.distillation:
            with profiler_range("teacher"):
                weighted, value = state.distillation(batch, image_BCHW, embedding_BD)
            total = loss * state.distillation.margin_weight + weighted / num_micro_batches
            # Apart from `loss`, which the learning check compares with chance.
            state.meter.add("distill_loss", value)
        with profiler_range("backward"):
            # Scaled so that small fp16 gradients do not vanish; the optimizer divides by the scale again.
            (total * state.stepper.scale.value).backward()
        return loss.detach()

    def _seed_torch(self, state: TrainState, *purpose: int) -> None:
        """Seed torch's generators of the CPU and of this rank's GPU from the step and further numbers."""
        key = key_of(self._seed, Stream.TORCH, state.step, *purpose)
        # Not torch.manual_seed: it formats a stack for GPUs that are not in use, in 0.2 ms.
        torch.default_generator.manual_seed(key)
        if state.world.device.type == "cuda":
            torch.cuda.manual_seed(key)

    @contextmanager
    def _gradient_exchange(self, backbone: Backbone, *, enabled: bool) -> Iterator[None]:
        """Let DDP exchange the gradients of a backward pass only if enabled.

        In the first step, check that a micro-batch without an exchange uses all parameters: in it, DDP waits for each.
        """
        if enabled or not isinstance(self._network, DistributedDataParallel):
            yield
            return
        trained = [(name, each) for name, each in named_plainly(backbone) if each.requires_grad]
        used = set[Tensor]()
        hooks = [each.register_post_accumulate_grad_hook(used.add) for _, each in trained if not self._number]
        with self._network.no_sync():
            yield
        for hook in hooks:
            hook.remove()
        if hooks and (unused := [name for name, parameter in trained if parameter not in used]):
            raise ConfigError(
                f"model.backbone: the network does not use {', '.join(unused[:3])}; on several ranks with "
                "optim.accumulate above 1, remove such parameters from it, or list their names in model.freeze"
            )


class _Statistics:
    """Statistics of a network's batch norms. Activations that overflow in fp16 would make them infinite for good."""

    def __init__(self, network: nn.Module) -> None:
        self._tensors = [tensor for _, tensor in trained_buffers(network) if tensor.is_floating_point()]
        self._before: Tensor | None = None

    def keep(self) -> None:
        """Copy the present values."""
        # In one tensor: hundreds of copies would launch as many kernels.
        self._before = self._flat() if self._tensors else None

    @torch.no_grad()
    def restore_where(self, skipped: Tensor) -> None:
        """Set the values that `keep` has copied if `skipped` is 1, a scalar on the device."""
        if self._before is None:
            return
        chosen = torch.where(skipped > 0, self._before, self._flat())
        values = chosen.split([tensor.numel() for tensor in self._tensors])
        foreach_copy_(
            self._tensors,
            [value.view_as(tensor) for value, tensor in zip(values, self._tensors, strict=True)],
        )

    def _flat(self) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in self._tensors])
