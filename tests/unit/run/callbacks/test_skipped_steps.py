"""A step that is skipped in fp16 leaves the network as it was; too many in a row end the run."""

from types import SimpleNamespace

import pytest
import torch

from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.errors import ConfigError, DivergedError
from facetrain.head.margins.function_margin import own_margin
from facetrain.optim.loss_scale import LossScale
from facetrain.run.open_run import _most_skipped_steps
from tests.unit.run.callbacks.helpers import CPU


def values_of(state):
    return {name: value.clone() for name, value in state.backbone.state_dict().items() if value.dim()}


def test_activations_that_overflow_in_one_step_do_not_change_the_batch_norm_statistics(state, step, loader):
    state.stepper.scale = LossScale(CPU, enabled=True, start=1024.0)
    first, second, third, _ = loader
    step(state, first)
    before = values_of(state)

    overflow = state.backbone.conv1.register_forward_pre_hook(
        lambda conv, images: (images[0] * float("inf"),)
    )
    step(state, second)
    overflow.remove()
    after = values_of(state)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert state.stepper.scale.value == 512

    step(state, third)
    assert not torch.equal(values_of(state)["bn1.running_var"], before["bn1.running_var"])
    for name, value in values_of(state).items():
        assert value.isfinite().all(), name


def test_only_skipped_steps_in_a_row_end_a_run(state, step, loader):
    state.stepper.scale = LossScale(CPU, enabled=True, start=1024.0)
    batches, *_ = loader

    def take(*, overflows):
        hook = state.backbone.conv1.register_forward_pre_hook(
            lambda conv, images: (images[0] * (float("inf") if overflows else 1.0),)
        )
        step(state, batches)
        state.step += 1
        hook.remove()

    for overflows in (True, True, False, True, True):  # the fixture ends the run at the third in a row
        take(overflows=overflows)
    with pytest.raises(
        DivergedError, match=r"in 3 consecutive steps.* resume from a checkpoint before step 3 "
    ):
        take(overflows=True)


@pytest.mark.parametrize("overflows", ["loss", "gradient"])
def test_a_run_in_fp16_that_ends_before_its_loss_scale_is_found_is_told_to_be_longer(
    overflows, state, step, loader
):
    state.stepper.scale = LossScale(CPU, enabled=True, start=1024.0)
    conv, (batches, *_) = state.backbone.conv1, loader
    if overflows == "loss":  # which no scale changes
        conv.register_forward_pre_hook(lambda conv, images: (images[0] * float("inf"),))
    else:
        conv.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(DivergedError, match=r"lower optim\.lr") as ended:
        for _ in range(3):
            step(state, batches)
    assert ("take more" in str(ended.value)) == (overflows == "gradient")


def test_a_resume_goes_on_counting_the_steps_that_were_skipped_in_a_row(state, step, loader, tmp_path):
    batches, *_ = loader
    state.backbone.conv1.register_forward_pre_hook(lambda conv, images: (images[0] * float("inf"),))
    for _ in range(2):
        step(state, batches)
    CheckpointWriter(tmp_path / "checkpoints", asynchronous=False).save(state.snapshot({}))
    state.skips_in_a_row = 0
    state.restore(Checkpoint.open(tmp_path))
    with pytest.raises(DivergedError, match="in 3 consecutive steps"):
        step(state, batches)


@pytest.mark.parametrize(
    ("first_step", "skipped", "in_fp16", "total", "expected"),
    [
        (0, 0, False, 3, 3),
        (0, 0, False, 60, 10),
        (2, 2, False, 3, 3),
        (2, 1, False, 3, 10),
        (0, 0, True, 3, 3),
        (0, 0, True, 60, 34),
        (2, 0, True, 3, 34),
    ],
)
def test_a_short_run_without_a_step_may_skip_fewer_and_one_in_fp16_more_until_its_loss_scale_could_be_1(
    first_step, skipped, in_fp16, total, expected
):
    scale = LossScale(CPU, enabled=in_fp16, start=1024.0)
    state = SimpleNamespace(step=first_step, skips_in_a_row=skipped, stepper=SimpleNamespace(scale=scale))
    parts = SimpleNamespace(state=state, schedule=SimpleNamespace(total_steps=total))
    assert _most_skipped_steps(parts) == expected


def sharper(cos):
    return torch.where(cos > 0, cos**1.5, cos)


def above_1(cos):
    return torch.arccos(cos + 2)


@pytest.mark.parametrize("margin", [sharper, above_1])
def test_an_own_margin_whose_value_or_slope_is_not_finite_is_named(state, step, loader, margin):
    state.head.margin = own_margin(margin, {}, {})
    batches, *_ = loader
    message = f"gradient norm nan.* write the margin {margin.__name__} so that its value and its derivative"
    with pytest.raises(DivergedError, match=message):
        for _ in range(3):
            step(state, batches)


def test_a_network_whose_embeddings_have_no_gradient_is_refused(state, step, loader):
    batches, *_ = loader
    neck = state.backbone.neck
    state.backbone.neck = lambda feature: neck(feature).detach()
    with pytest.raises(ConfigError, match=r"model\.backbone: .*without a gradient"):
        step(state, batches)
