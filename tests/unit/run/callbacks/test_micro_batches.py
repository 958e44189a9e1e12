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


@pytest.mark.parametrize("in_backward", [True, False])
def test_centers_whose_loss_has_no_weight_stay_as_they_are(state, step, loader, in_backward):
    state.stepper.schedule, state.distillation = lambda number: 0.1, Pull()
    state.head.update_in_backward = in_backward
    (batch,), *_ = loader
    before = {name: table.clone() for name, table in state.head.row_state().items()}
    step(state, (batch,))
    assert all(torch.equal(table, before[name]) for name, table in state.head.row_state().items())
    assert state.meter.report()["loss"] > 0
    state.distillation.margin_weight = 1.0
    step(state, (batch,))
    assert not torch.equal(state.head.row_state()["weight"], before["weight"])
