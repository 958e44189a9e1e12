"""Augmentation and optimizer on a fake CUDA device: no mixed devices, and no copy that blocks the host."""

import pytest
import torch

from facetrain.data.images.augment import Augment, normalize
from facetrain.data.loading.loader import Batch
from facetrain.data.settings import AugmentSettings
from facetrain.optim.loss_scale import LossScale
from facetrain.optim.optimizer import parameter_groups
from facetrain.optim.settings import OptimSettings
from facetrain.optim.stepper import Stepper
from facetrain.run.build.stepper import build_optimizers
from facetrain.telemetry.meter import Meter
from facetrain.training.loss_spikes import SpikeDetector
from tests.support.fake_cuda import GPU, fake_cuda


class UpdatedHead:
    """Head whose centers the backward pass has updated."""

    update_in_backward = True

    def begin_step(self, step, *, lr, loss_scale):
        pass


def test_augmentations_mix_no_devices_and_never_block_the_host(monkeypatch):
    names = ("blur", "gray", "color", "crop", "erase", "jpeg")
    augment, sample = Augment(1, AugmentSettings(**dict.fromkeys(names, 1.0))), torch.arange(6)
    with fake_cuda(monkeypatch) as blocking:
        image = normalize(torch.empty(6, 32, 32, 3, dtype=torch.uint8, device=GPU), sample > 3)
        for (
            _,
            _,
            change,
        ) in augment._augmentations:  # not as a whole: which images they are for is chosen by content
            image = change(image, sample, 0)
    assert image.device == GPU and image.shape == (6, 3, 32, 32)
    assert not blocking


@pytest.mark.parametrize("settings", [{"name": "sgd"}, {"name": "adamw"}, {"muon": {}}])
def test_the_optimizer_step_mixes_no_devices_and_never_blocks_the_host(settings, monkeypatch):
    with fake_cuda(monkeypatch) as blocking:
        layers = torch.nn.Conv2d(3, 16, 3, device=GPU), torch.nn.BatchNorm2d(16, device=GPU)
        backbone = torch.nn.Sequential(*layers)
        stepper = Stepper(
            backbone,
            build_optimizers(OptimSettings(**settings), parameter_groups(backbone, {}), {layers[0].weight}),
            UpdatedHead(),
            LossScale(GPU, enabled=True),
            schedule=lambda step: 0.1,
            clip_grad_norm=5.0,
        )
        spikes, meter = SpikeDetector(5.0, GPU), Meter()
        batch = Batch(0, 0, torch.empty(0), torch.empty(6, dtype=torch.int64, device=GPU), torch.arange(6))
        blocking.clear()
        for number in range(2):
            stepper.begin(number)
            for parameter in backbone.parameters():
                parameter.grad = torch.empty_like(parameter)
            stepped = stepper.finish()
            meter.add("loss", stepped.grad_norm)
            meter.add("spike", spikes.observe(number, stepped.grad_norm, stepped.grad_norm, (batch,)))
    assert stepped.grad_norm.device == stepped.skipped.device == GPU
    assert not blocking
