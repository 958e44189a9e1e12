"""Micro-batches of a step."""

import pytest
import torch


class Pull:
    """Distillation whose loss is the only one."""

    margin_weight = 0.0

    def begin_step(self, step):
        pass

    def __call__(self, batch, image, embedding):
        loss = (embedding * torch.arange(embedding.numel()).view_as(embedding)).mean()
        return loss, loss.detach()


def test_the_loss_of_the_teacher_is_a_mean_over_the_micro_batches(state, step, loader):
    state.stepper.schedule, state.distillation = lambda number: 0.0, Pull()
    state.head.update_in_backward = False  # as a run builds it for several micro-batches
    (batch,), *_ = loader
    norms = []
    for count in (1, 2, 3):
        step(state, (batch,) * count)
        norms.append(state.meter.report()["grad_norm"])
    assert norms[0] > 0 and norms == pytest.approx([norms[0]] * 3, rel=1e-4)
