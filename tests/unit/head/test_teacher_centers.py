"""Class centers that follow a teacher, on one rank, against the rule of AdaDistill image by image in float64."""

import pytest
import torch

from facetrain.config.loading import build_config
from facetrain.distributed.world import World
from facetrain.head.class_centers import RowTable
from facetrain.head.class_shard import ClassShard
from facetrain.head.teacher_centers import follow_teacher, start_teacher_gather
from facetrain.run.build.head import build_teacher_centers
from facetrain.run.build.step_schedule import schedule_steps
from tests.support.dense_head import dense_loss, sample_classes
from tests.support.heads import make_head, margin_settings
from tests.support.teacher_centers import move_plainly

CLASSES, SIZE = 9, 5
CPU = torch.device("cpu")


def batch(images=20, classes=CLASSES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(images, SIZE, dtype=torch.float64, generator=generator) for _ in range(2))
    teacher = student + teacher  # cosines of both signs, most of them positive
    return student, teacher, torch.randint(0, classes, (images,), generator=generator)


def follow(centers, shard, student, teacher, label):
    follow_teacher(RowTable(centers, CPU), shard, label, start_teacher_gather(student, teacher).wait())


def test_one_image_of_a_class_moves_its_center_by_the_rule():
    student, teacher, _ = batch(2)
    centers = torch.randn(3, SIZE, dtype=torch.float64)
    before = centers.clone()
    follow(centers, ClassShard(0, 3), student, teacher, torch.tensor([2, 0]))
    cosine = torch.nn.functional.cosine_similarity
    for image, row in ((0, 2), (1, 0)):
        near = cosine(before[row], teacher[image], dim=0).clamp(1e-6, 1)
        factor = (cosine(student[image], teacher[image], dim=0) * near).clamp(1e-6, 1)
        unit = teacher[image] / teacher[image].norm()
        torch.testing.assert_close(centers[row], factor * before[row] + (1 - factor) * unit)
    assert torch.equal(centers[1], before[1])


def test_images_of_one_class_move_its_center_one_after_another_in_the_order_of_the_batch():
    student, teacher, label = batch(40)
    centers = 2 * torch.randn(CLASSES, SIZE, dtype=torch.float64)
    expected = centers.clone()
    move_plainly(expected, student, teacher, label)
    follow(centers, ClassShard(0, CLASSES), student, teacher, label)
    torch.testing.assert_close(centers, expected, rtol=1e-10, atol=1e-12)
    other = centers.clone()
    follow(other, ClassShard(0, CLASSES), student.flip(0), teacher.flip(0), label.flip(0))
    follow(centers, ClassShard(0, CLASSES), student, teacher, label)
    assert not torch.allclose(other, centers)


@pytest.mark.parametrize("shard", [ClassShard(0, 4), ClassShard(4, 9), ClassShard(9, 9), ClassShard(9, 12)])
def test_a_shard_moves_its_centers_only(shard):
    student, teacher, label = batch()
    whole = torch.randn(12, SIZE, dtype=torch.float64)
    part = whole[shard.start : shard.stop].clone()
    move_plainly(whole, student, teacher, label)
    follow(part, shard, student, teacher, label)
    torch.testing.assert_close(part, whole[shard.start : shard.stop])


def test_an_embedding_that_is_not_finite_moves_nothing():
    student, teacher, _ = batch(3)
    student[0, 0], teacher[2, 1] = float("nan"), float("inf")
    centers = torch.randn(3, SIZE, dtype=torch.float64)
    before = centers.clone()
    follow(centers, ClassShard(0, 3), student, teacher, torch.tensor([0, 1, 2]))
    assert torch.equal(centers[[0, 2]], before[[0, 2]]) and not torch.equal(centers[1], before[1])


@pytest.mark.parametrize("rate", [1.0, 0.4])
def test_a_head_that_is_not_trained_has_the_loss_and_gradient_of_a_trained_one_and_keeps_its_centers(rate):
    options = {"embedding_size": SIZE, "num_classes": CLASSES, "margin": margin_settings(), "chunk_size": 4}
    options |= {"weight_dtype": torch.float64, "sample_rate": rate, "update_in_backward": False}
    trained, fixed = make_head(**options), make_head(**options, trained=False)
    student, _, label = batch()
    results = []
    for head in (trained, fixed):
        before = head.weight.data.clone()
        embedding = student.clone().requires_grad_()
        head.begin_step(0, lr=0.1)
        loss = head(embedding, label)
        loss.backward()
        head.step(torch.tensor(1.0), torch.tensor(0.0))
        results.append((loss, embedding.grad))
        assert torch.equal(head.weight.data, before) == (head is fixed)
    torch.testing.assert_close(results[0], results[1])
    assert set(fixed.row_state()) == {"weight"} and set(trained.row_state()) > {"weight"}


@pytest.mark.parametrize("loss", ["fixed_centers", "adaptive_centers"])
def test_the_stages_of_a_run_change_the_sample_rate_of_the_teachers_head_too(loss, tmp_path):
    values = {
        "data": {"train": "unused"},
        "head": {"sample_rate": 0.4, "chunk_size": 4},
        "distill": {"teacher": "unused", "cache": "unused.safetensors", "loss": loss},
        "train": {
            "precision": "fp32",
            "batch_size": 10,
            "epochs": 3,
            "stages": [
                {"until_epoch": 1, "sample_rate": 0.7},
                {"until_epoch": 2, "sample_rate": 1.0, "expectations": "moving"},
            ],
        },
    }
    config = build_config(values, "test")
    head = build_teacher_centers(
        config,
        World(0, 0, 1, 1, CPU),
        CLASSES,
        tmp_path,
        embedding_size=SIZE,
        schedule=schedule_steps(config, 20, 1),
    )
    assert set(head.row_state()) == {"weight"}
    student, teacher, label = batch()
    for step, rate in enumerate([0.7, 0.7, 1.0, 1.0, 0.4, 0.4]):
        head.begin_step(step, lr=0.1)
        gathered = start_teacher_gather(student, teacher) if loss == "adaptive_centers" else None
        found = head(student.float().requires_grad_(), label, gathered)
        found.backward()
        shard = ClassShard(0, CLASSES)
        sample = None if rate == 1 else sample_classes(shard, label, rate, seed=head._run.seed, step=step)
        margin = {"scale": 64.0, "m2": 0.5, "beyond_pi": "linear"}
        expected = dense_loss(student, head.weight.data.double(), label, margin, sample)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0.0)
