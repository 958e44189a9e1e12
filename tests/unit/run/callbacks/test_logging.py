"""Reports during training."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from facetrain.errors import DivergedError, RunError, SkippedError
from facetrain.run.callbacks.logging import Logging
from facetrain.run.outputs import RunOutputs
from tests.support.command import ROOT
from tests.unit.run.callbacks.helpers import Board, Lines


def logging_of(step, loader, board, lines, max_skipped=None, stages=()):
    console = Lines()
    console.lines = lines
    outputs = RunOutputs(board, console)
    schedule = SimpleNamespace(images_after=lambda step: 8 * (4 - step), stages=stages)
    return Logging(outputs, step, loader, schedule, max_skipped_images=max_skipped)


def test_a_stage_is_announced_before_its_first_step(state, step, loader):
    lines = []
    names = ("first_step", "first_epoch", "stop_step")
    stages = [
        SimpleNamespace(describe=lambda: "small images", **dict(zip(names, numbers, strict=True)))
        for numbers in ((0, 0, 2), (2, 1, 4))
    ]
    log = logging_of(step, loader, Board(), lines, stages=stages)
    for state.step in range(4):
        log.announce_stage(state)
    assert lines == [
        "stage 1 of 2, from step 0 (epoch 0) to step 2: small images",
        "stage 2 of 2, from step 2 (epoch 1) to step 4: small images",
    ]
    alone = logging_of(step, loader, Board(), lines, stages=stages[:1])
    state.step = 0
    alone.announce_stage(state)
    assert len(lines) == 2


def test_a_report_holds_the_metrics_of_the_steps_and_of_the_machine(state, step, loader):
    board = Board()
    log = logging_of(step, loader, board, [])
    for batches in loader:
        step(state, batches)
        state.step += 1
    log.report(state, (replace(batches[0], epoch=1), replace(batches[0], epoch=2)), at_once=True)
    ((number, values),) = board.written
    assert number == 4 and values["left_s"] == 0 and values["skipped_images"] == 0 and values["epoch"] == 2
    assert {"loss", "lr", "grad_norm", "images_per_s", "epoch", "wait_s", "peak_memory_gib"} <= values.keys()
    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert [name for name in values if f"\n| `{name}` |" not in page] == [], "metrics that no page describes"


def test_a_report_that_waits_for_no_device_is_written_once_after_the_next_step(state, step, loader):
    board, lines = Board(), []
    log = logging_of(step, loader, board, lines)
    batches = next(iter(loader))
    step(state, batches)
    state.step, state.world = 1, replace(state.world, device=torch.device("meta"))  # any but the CPU
    log.report(state, batches, at_once=False)
    assert board.written == []
    state.step = 2
    log.finish(state, batches)
    log.finish(state, batches)
    ((number, values),) = board.written
    assert number == 1 and values["left_s"] == pytest.approx(8 * 3 / values["images_per_s"])
    log.report(state, batches, at_once=True)
    assert [number for number, _ in board.written] == [1, 2]
    # The check of the first steps reads counts of the device that go with the report.
    assert log.has_learned and not lines
    log.learning_check = SimpleNamespace(is_finished=False, observe=lambda *_: "it does not learn")
    log.report(state, batches, at_once=False)
    assert [number for number, _ in board.written] == [1, 2, 2]
    assert not log.has_learned and lines == ["warning: it does not learn"]


def test_nothing_is_reported_once_another_process_writes_the_run(state, step, loader):
    def refuse():
        raise RunError("another process writes the run")

    board = Board()
    log = logging_of(step, loader, board, [])
    log.check_lock = refuse
    with pytest.raises(RunError, match="another process"):
        log.report(state, next(iter(loader)), at_once=True)
    assert board.written == []


def test_a_run_with_too_many_skipped_images_ends_after_its_report(state, step, loader):
    board = Board()
    log = logging_of(step, loader, board, [], max_skipped=1)
    batches = next(iter(loader))
    step(state, batches)
    state.skipped_images.add("key 5 is damaged")
    log.report(state, batches, at_once=True)
    state.skipped_images.add("key 6 is damaged")  # this rank has met none of the two
    with pytest.raises(SkippedError, match=r"\b2 images .*; the first: key 5 is damaged;"):
        log.report(state, batches, at_once=True)
    assert [values["skipped_images"] for _, values in board.written] == [1, 2]


def test_a_step_without_a_report_is_checked_as_one_with_it(state, step, loader):
    board = Board()
    log = logging_of(step, loader, board, [], max_skipped=0)
    batches = next(iter(loader))
    step(state, batches)
    log.check(state, batches)
    loader.skipped.add("key 5 is damaged")
    with pytest.raises(SkippedError, match="1 image could"):
        log.check(state, batches)
    state.backbone.conv1.register_forward_pre_hook(lambda conv, images: (images[0] * float("inf"),))
    step(state, batches)
    state.skips_in_a_row = torch.tensor(10.0)  # as a GPU counts them, which the host has not asked yet
    with pytest.raises(DivergedError):
        log.check(state, batches)
    with pytest.raises(DivergedError):
        log.report(state, batches, at_once=True)
    assert board.written == []


@pytest.mark.parametrize("name", ["conv1.weight", "bn1.running_var"])
def test_a_network_that_is_not_finite_ends_the_run_before_it_is_verified_or_saved(state, step, loader, name):
    board = Board()
    log = logging_of(step, loader, board, [])
    batches = next(iter(loader))
    step(state, batches)
    log.check(state, batches)
    state.backbone.state_dict()[name].view(-1)[0] = float("nan")  # by the update of this step
    for examine in (log.check, partial(log.report, at_once=True)):
        with pytest.raises(DivergedError, match="not finite after step 1 .* and start again$") as ended:
            examine(state, batches)
        assert ended.value.report["step"] == 1
    assert board.written == []


def test_a_network_may_have_masks_and_layers_without_weights(state, step, loader):
    batches = next(iter(loader))
    step(state, batches)
    state.backbone.levels = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    state.backbone.running_norm = nn.BatchNorm1d(2)  # whose count of batches has "running_" in its name, too
    state.backbone.mask = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)
    state.backbone.unused = nn.Parameter(torch.empty(0))
    logging_of(step, loader, Board(), []).check(state, batches)
