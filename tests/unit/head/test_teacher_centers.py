"""Head with class centers of a teacher, which are not trained, on one rank."""

import pytest
import torch

from facetrain.config.loading import build_config
from facetrain.distributed.world import World
from facetrain.head.class_shard import ClassShard
from facetrain.run.parts.head import build_teacher_centers
from facetrain.run.parts.step_schedule import schedule_steps
from tests.support.dense_head import dense_loss, sample_classes
from tests.support.heads import make_head, margin_settings

CLASSES, SIZE = 9, 5
CPU = torch.device("cpu")


def batch(images=20, classes=CLASSES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(images, SIZE, dtype=torch.float64, generator=generator)
    return student, torch.randint(0, classes, (images,), generator=generator)


@pytest.mark.parametrize("rate", [1.0, 0.4])
def test_a_head_that_is_not_trained_has_the_loss_and_gradient_of_a_trained_one_and_keeps_its_centers(rate):
    options = {"embedding_size": SIZE, "num_classes": CLASSES, "margin": margin_settings(), "chunk_size": 4}
    options |= {"weight_dtype": torch.float64, "sample_rate": rate, "update_in_backward": False}
    trained, fixed = make_head(**options), make_head(**options, trained=False)
    student, label = batch()
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


def test_the_stages_of_a_run_change_the_sample_rate_of_the_teachers_head_too(tmp_path):
    values = {
        "data": {"train": "unused"},
        "head": {"sample_rate": 0.4, "chunk_size": 4},
        "distill": {"teacher": "unused", "cache": "unused.safetensors", "loss": "fixed_centers"},
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
        (CLASSES, SIZE),
        tmp_path,
        schedule=schedule_steps(config, 20, 1),
    )
    assert set(head.row_state()) == {"weight"}
    student, label = batch()
    for step, rate in enumerate([0.7, 0.7, 1.0, 1.0, 0.4, 0.4]):
        head.begin_step(step, lr=0.1)
        found = head(student.float().requires_grad_(), label)
        found.backward()
        shard = ClassShard(0, CLASSES)
        sample = None if rate == 1 else sample_classes(shard, label, rate, seed=head.seed, step=step)
        margin = {"scale": 64.0, "m2": 0.5}
        expected = dense_loss(student, head.weight.data.double(), label, margin, sample)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0.0)
