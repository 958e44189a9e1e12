"""Operations and random numbers of a training step."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from facetrain.backbone.own_network import OwnNetwork
from facetrain.backbone.zoo import build_backbone
from facetrain.data.images.augment import Augment
from facetrain.head.partial_fc import PartialFC
from facetrain.optim.build import build_optimizer
from facetrain.optim.loss_scale import LossScale
from facetrain.optim.optimizer import parameter_groups
from facetrain.optim.settings import OptimSettings
from facetrain.optim.stepper import Stepper
from facetrain.training.precision import InPrecision, memory_format_for
from facetrain.training.state import TrainState
from facetrain.training.step import TrainStep, _Statistics
from tests.support.datasets import batch_of
from tests.support.world import ONE_RANK


class Operations(TorchDispatchMode):
    """Counts the operations that launch a kernel."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and "split" not in func.name()
        return func(*args, **(kwargs or {}))


def test_the_statistics_of_a_skipped_step_are_restored_by_a_few_kernels():
    with torch.device("meta"):
        network = build_backbone("r18", embedding_size=8)
        statistics, skipped = _Statistics(network), torch.ones(())
        assert len(statistics._tensors) > 40
        with Operations() as operations:
            statistics.keep()
            statistics.restore_where(skipped)
    assert operations.count <= 6


def draws(steps, *, rank=0, accumulate=1):
    """Take these steps; return what a network and a margin of one's own drew from torch's generators in the last."""
    drawn = {}

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(3, 4)

        def forward(self, image):
            drawn.setdefault("network", []).append(torch.rand(()).item())
            return self.fc(image.mean((2, 3)))

    def margin(cos):
        drawn.setdefault("margin", []).append(torch.rand(()).item())
        return cos

    world = replace(ONE_RANK, rank=rank)
    backbone = OwnNetwork(Network(), embedding_size=4, image_size=8)
    network = InPrecision(backbone, "fp32", world.device, memory_format=torch.contiguous_format)
    optimizer = build_optimizer(OptimSettings(), parameter_groups(backbone, {}))
    head, scale = PartialFC(margin, 4, 3), LossScale(world.device, enabled=False)
    stepper = Stepper(backbone, [optimizer], head, scale, schedule=lambda step: 0.01, clip_grad_norm=5.0)
    state, step = TrainState(world, network, head, stepper), TrainStep(network, Augment(0), seed=1)
    for number in steps:
        drawn.clear()
        state.step = number
        pixels = torch.zeros(2, 8, 8, 3, dtype=torch.uint8)
        batch = batch_of(number, 0, pixels, torch.arange(2), torch.arange(2))
        step(state, (batch,) * accumulate)
    return drawn


class Kernels(torch.nn.Module):
    """Mean of several kernels, as in a dynamic convolution, of images that are changed in place."""

    def __init__(self):
        super().__init__()
        self.weight, self.fc = torch.nn.Parameter(torch.randn(2, 16, 3, 3, 3)), torch.nn.Linear(16, 4)

    def forward(self, image):
        image.add_(1).div_(2)
        return self.fc(torch.nn.functional.conv2d(image, self.weight.mean(0)).mean((2, 3)))


def test_a_network_of_ones_own_may_have_kernels_of_five_dimensions_and_change_its_images():
    backbone, cpu = OwnNetwork(Kernels(), embedding_size=4, image_size=8), torch.device("cpu")
    layout = memory_format_for(backbone, cpu)
    network = InPrecision(backbone.to(memory_format=layout), "fp32", cpu, memory_format=layout)
    image = torch.rand(2, 3, 8, 8)
    before = image.clone()
    assert network(image).isfinite().all() and torch.equal(image, before)


class Recorded(Augment):
    """Notes by which numbers and in which epoch each of its methods draws."""

    def __init__(self):
        super().__init__(0)
        self.draws = {}

    def _note(self, what, draw_B, epoch):
        self.draws[what] = draw_B.tolist(), epoch

    def __call__(self, image, draw_B, epoch):
        self._note("image", draw_B, epoch)
        return super().__call__(image, draw_B, epoch)

    def move_landmarks(self, points, draw_B, epoch):
        self._note("landmarks", draw_B, epoch)
        return super().move_landmarks(points, draw_B, epoch)

    def network_keys(self, draw_B, epoch):
        self._note("network", draw_B, epoch)
        return super().network_keys(draw_B, epoch)


def test_all_parts_of_a_step_draw_by_the_repetition_of_an_image_and_all_images_are_counted():
    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.backbone = torch.nn.Linear(3, 4), SimpleNamespace(draws_by_sample=True)

        def forward(self, image, points, key_B):
            return self.fc(image.mean((2, 3)))

    network, world, augment = Network(), replace(ONE_RANK, size=3), Recorded()
    optimizer = build_optimizer(OptimSettings(), parameter_groups(network, {}))
    head, scale = PartialFC("cosface", 4, 3), LossScale(world.device, enabled=False)
    stepper = Stepper(network, [optimizer], head, scale, schedule=lambda step: 0.01, clip_grad_norm=5.0)
    state, step = TrainState(world, network, head, stepper), TrainStep(network, augment)
    pixels = torch.zeros(2, 8, 8, 3, dtype=torch.uint8)
    again = {"landmarks_B52": torch.zeros(2, 5, 2), "repeat_B": torch.tensor([0, 1])}
    batch = batch_of(0, 7, pixels, torch.arange(2), torch.tensor([5, 5]), **again)
    step(state, (batch, batch))
    assert len(set(batch.draw_B.tolist())) == 2
    assert augment.draws == dict.fromkeys(("image", "landmarks", "network"), (batch.draw_B.tolist(), 7))
    assert state.meter._images == 2 * 2 * world.size


def test_what_own_parts_draw_from_torch_follows_from_the_step_and_in_a_network_from_the_rank():
    straight, resumed, other = draws((0, 1, 2)), draws((2,)), draws((2,), rank=1)
    assert straight == resumed
    assert other["network"] != resumed["network"] and other["margin"] == resumed["margin"]
    drawn = [number for step in (1, 2) for part in draws((step,), accumulate=2).values() for number in part]
    assert len(set(drawn)) == len(drawn) == 8
