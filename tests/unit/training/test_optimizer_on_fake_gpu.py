"""Optimizer step on a fake GPU: no mixed devices, and no copy that blocks the host."""

import pytest
import torch

from facetrain.optim.loss_scale import LossScale
from facetrain.optim.optimizer import parameter_groups
from facetrain.optim.settings import OptimSettings
from facetrain.optim.stepper import Stepper
from facetrain.run.build.stepper import build_optimizers
from facetrain.telemetry.meter import Meter
from tests.support.fake_gpu import GPU, fake_gpu


class UpdatedHead:
    """Head whose centers the backward pass has updated."""

    update_in_backward = True

    def begin_step(self, step, *, lr, loss_scale):
        pass


@pytest.mark.parametrize("settings", [{"name": "sgd"}, {"name": "adamw"}, {"muon": {}}])
def test_the_optimizer_step_mixes_no_devices_and_never_blocks_the_host(settings):
    with fake_gpu() as gpu:
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
        meter = Meter()
        gpu.step = 0
        for number in range(2):
            stepper.begin(number)
            for parameter in backbone.parameters():
                parameter.grad = torch.empty_like(parameter)
            stepped = stepper.finish()
            meter.add("loss", stepped.grad_norm)
    assert stepped.grad_norm.device == stepped.skipped.device == GPU
    assert not gpu.faults and not gpu.waits[0]
