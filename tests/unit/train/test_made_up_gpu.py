"""What surrounds the head in a step on CUDA, without a GPU: its devices, and that its host does not wait."""

import pytest
import torch

from facetrain.data.augment import Augment, normalize
from facetrain.data.loader import Batch
from facetrain.optim.groups import build_optimizer, parameter_groups
from facetrain.optim.scaler import LossScale
from facetrain.optim.stepper import Stepper
from facetrain.telemetry.meter import Meter
from facetrain.train.loss_spikes import SpikeDetector
from tests.support.made_up_gpu import GPU, made_up_gpu


class FusedHead:
    """A head that the backward pass has updated."""

    lr, fused = 0.0, True

    def begin_step(self, step):
        pass


def test_augmentations_mix_no_devices_and_wait_for_none(monkeypatch):
    names = ("blur", "gray", "color", "crop", "erase", "jpeg")
    augment, sample = Augment(1, **dict.fromkeys(names, 1.0)), torch.arange(6)
    with made_up_gpu(monkeypatch) as waiting:
        image = normalize(torch.empty(6, 32, 32, 3, dtype=torch.uint8, device=GPU), sample > 3)
        for _, _, change in augment._others:  # not as a whole: which images they are for is chosen by content
            image = change(image, sample, 0)
    assert image.device == GPU and image.shape == (6, 3, 32, 32)
    assert not waiting


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_end_of_a_step_mixes_no_devices_and_waits_for_none(name, monkeypatch):
    with made_up_gpu(monkeypatch) as waiting:
        layers = torch.nn.Conv2d(3, 16, 3, device=GPU), torch.nn.BatchNorm2d(16, device=GPU)
        backbone = torch.nn.Sequential(*layers)
        stepper = Stepper(
            backbone,
            build_optimizer(
                parameter_groups(backbone, {}),
                name,
                momentum=0.9,
                betas=(0.9, 0.99),
                eps=1e-8,
                weight_decay=0,
            ),
            FusedHead(),
            LossScale(GPU, enabled=True),
            schedule=lambda step: 0.1,
            clip_grad_norm=5.0,
        )
        spikes, meter = SpikeDetector(5.0, GPU), Meter()
        batch = Batch(0, 0, torch.empty(0), torch.empty(6, dtype=torch.int64, device=GPU), torch.arange(6))
        waiting.clear()
        for number in range(2):
            stepper.begin(number)
            for parameter in backbone.parameters():
                parameter.grad = torch.empty_like(parameter)
            stepped = stepper.finish()
            meter.add("loss", stepped.grad_norm)
            meter.add("spike", spikes.look(number, stepped.grad_norm, stepped.grad_norm, (batch,)))
    assert stepped.grad_norm.device == stepped.skipped.device == GPU
    assert not waiting
