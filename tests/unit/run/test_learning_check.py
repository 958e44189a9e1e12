"""Planted mistakes that a run must report in its first epoch, and healthy runs that must not be reported."""

import functools

import numpy as np
import pytest
import torch

from facetrain.config.schema import Config
from facetrain.data.images.augment import Augment
from facetrain.errors import ConfigError
from facetrain.optim.settings import OptimSettings
from facetrain.run.parts.learning_check import build_learning_check
from facetrain.run.parts.state import build_state
from facetrain.run.parts.step_schedule import schedule_steps
from facetrain.training.learning_check import LearningCheck, RunConditions
from facetrain.training.step import TrainStep
from tests.support.datasets import batch_of
from tests.support.world import ONE_RANK

CLASSES, IMAGES_PER_CLASS, SIZE = 40, 60, 16
STEPS = 100
"""Steps of an epoch, the fewest that the check takes."""


@functools.cache
def make_images(*, black=False, shuffled=False):
    """Return noisy images of random patterns, one pattern per class, in random order, and the labels."""
    random = np.random.default_rng(0)
    pattern = random.integers(0, 255, (CLASSES, SIZE, SIZE, 3))
    label = random.permutation(np.repeat(np.arange(CLASSES), IMAGES_PER_CLASS))
    noise = random.normal(0, 40, (len(label), SIZE, SIZE, 3))
    image = np.zeros(noise.shape) if black else (pattern[label] * 0.5 + 64 + noise).clip(0, 255)
    return image.astype(np.uint8), random.permutation(label) if shuffled else label


def build(
    folder, *, lr=0.05, batch=24, freeze=(), margin="arcface", classes=CLASSES, sample_rate=1.0, start_step=0,
    lr_factors=None,
):  # fmt: skip
    config = Config.model_validate(
        {
            "data": {"train": "unused", "image_size": SIZE},
            "model": {"backbone": "iresnet", "layers": [1, 1, 1, 1], "widths": [4, 8, 8, 8], "embedding_size": 32,
                      "freeze": freeze, "lr_factors": lr_factors or {}},
            "head": {"margin": {"type": margin, "m2": 0.3, "scale": 16}, "sample_rate": sample_rate},
            "optim": {"lr": lr},
            "train": {"batch_size": batch, "max_steps": STEPS, "precision": "fp32", "device": "cpu"},
            "eval": {"targets": []},
        }
    )  # fmt: skip
    schedule = schedule_steps(config, CLASSES * IMAGES_PER_CLASS, 1)
    state = build_state(config, ONE_RANK, classes, schedule, folder, None)
    state.step = start_step
    return state, build_learning_check(config, state, schedule)


def train(folder, *, black=False, shuffled=False, batch=24, **options):
    """Train and return the message of the check, or None."""
    state, check = build(folder, batch=batch, **options)
    images, labels = make_images(black=black, shuffled=shuffled)
    step, message = TrainStep(state.network, Augment(0), max_skipped_steps=3), None
    for number in range(STEPS):
        rows = np.arange(number * batch, (number + 1) * batch)
        label_B = torch.from_numpy(labels[rows]).long()
        step(state, (batch_of(number, 0, torch.from_numpy(images[rows]), label_B, torch.from_numpy(rows)),))
        state.step += 1
        if state.step % 10 == 0:
            message = message or check.observe(state.step, state.meter.report(), *state.head.take_nearest())
    assert check.is_finished
    return message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "first_cause"),
    [
        ({"lr": 0.05 / 1000}, "1. optim.lr 5e-05 is too low: the weights of the backbone have moved by less"),
        ({"shuffled": True}, "1. optim.lr 0.05 is too low or too high"),
        pytest.param({"black": True}, "1. optim.lr 0.05 is too low or too high", marks=pytest.mark.long),
        ({"batch": 2}, "1. batch norm averages over 2 images"),
        ({"freeze": ("conv", "layer", "fc", "bn", "prelu")}, "1. model.freeze excludes almost all weights"),
    ],
    ids=["low_lr", "shuffled_labels", "black_images", "batch_of_2", "frozen_backbone"],
)
def test_a_planted_mistake_is_reported_with_its_likely_causes(tmp_path, mistake, first_cause):
    message = train(tmp_path, **mistake)
    assert message.startswith("training does not seem to learn: after 100 steps the loss is ")
    assert first_cause in message and "\n" not in message
    assert message.index("optim.lr") < message.index("the labels") < message.index("normalized")


@pytest.mark.slow
@pytest.mark.parametrize(
    "margin",
    [
        "arcface",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("adaface", "cosface", "magface", "elastic_arcface", "softmax")
        ),
    ],
)
def test_a_run_that_learns_is_not_reported(tmp_path, margin):
    assert train(tmp_path, margin=margin) is None


@pytest.mark.slow
def test_a_run_with_the_classes_of_its_images_only_is_compared_with_their_number(tmp_path):
    assert train(tmp_path, sample_rate=0.0) is None
    _, check = build(tmp_path, sample_rate=0.0)
    message = check.observe(STEPS, {"loss": 1.0, "lr": 0.05, "grad_norm": 1.0}, nearest=13, images=240)
    # 24 images of 40 classes have 40 · (1 − (39/40)^24) = 18.2 classes on average.
    assert f"of the images (chance: {1 / 18.2163:.2%})" in message


def test_a_run_that_resumes_in_the_second_half_of_the_first_steps_or_later_is_not_checked(tmp_path):
    for step, finished in ((STEPS // 2, False), (STEPS // 2 + 1, True), (5 * STEPS, True)):
        _, check = build(tmp_path, start_step=step)
        assert check.is_finished == finished


@pytest.mark.parametrize("norm", [1e4, float("nan")])
@pytest.mark.parametrize(("clip", "moves"), [(1.0, False), (None, True)])
def test_a_gradient_moves_the_weights_by_no_more_than_its_bound(clip, moves, norm):
    optim = OptimSettings(lr=1e-4, clip_grad_norm=clip)
    where = RunConditions(optim, normalized_images=64, is_frozen=False, weight_norm=100.0)
    check = LearningCheck(10, start_step=0, steps_per_epoch=STEPS, total_steps=STEPS, where=where)
    for step in range(10, STEPS + 1, 10):
        message = check.observe(step, {"loss": 1.0, "lr": 1e-4, "grad_norm": norm}, nearest=240, images=240)
    assert check.is_finished and (
        message is None if moves else "the weights of the backbone have moved" in message
    )


@pytest.mark.parametrize(("lr_factors", "moves"), [({"layer1": 0.1}, False), ({"layer1": 1e4}, True)])
def test_the_largest_rate_of_a_weight_bounds_how_far_the_weights_move(tmp_path, lr_factors, moves):
    _, check = build(tmp_path, lr=1e-5, lr_factors=lr_factors)
    for step in range(10, STEPS + 1, 10):
        message = check.observe(step, {"loss": 1.0, "lr": 1e-5, "grad_norm": 1.0}, nearest=240, images=240)
    assert check.is_finished and (message is None) == moves


def test_a_backbone_without_any_trained_weight_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.freeze: excludes every parameter"):
        build(tmp_path, freeze=("",))


def test_a_margin_that_changes_negatives_counts_no_nearest_classes_and_is_not_checked(tmp_path):
    state, check = build(tmp_path, margin="curricularface")
    state.head.begin_step(0, lr=0.1)
    # Hard negatives have smaller logits, so the largest logit is not that of the nearest class.
    state.head(torch.randn(1000, 32), torch.randint(CLASSES, (1000,)))
    assert state.head.take_nearest() == (0, 0) and check is None


def test_the_top_1_count_is_that_of_all_cosines_without_the_margin(tmp_path):
    state, _ = build(tmp_path)
    embedding_BD = state.head.row_state()["weight"].repeat(3, 1) + 0.02 * torch.randn(120, 32)
    label_B = torch.arange(CLASSES).repeat(3)
    unit_KD = torch.nn.functional.normalize(state.head.row_state()["weight"])
    expected = int(((embedding_BD @ unit_KD.T).argmax(1) == label_B).sum())
    assert 0 < expected < 120
    state.head.begin_step(0, lr=0.1)
    state.head(embedding_BD, label_B)
    assert state.head.take_nearest() == (expected, 120) and state.head.take_nearest() == (0, 0)
