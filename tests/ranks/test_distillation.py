"""Distillation on several ranks against one process."""

import pytest
import torch

from facetrain.config.loading import load_config
from facetrain.distributed import collectives
from facetrain.telemetry.jsonl import read_jsonl
from facetrain.training.distillation import cosine_loss
from tests.support import training
from tests.support.ranks import free_ports, run_ranks, start_ranks
from tests.support.worlds import with_rank

ROWS = 12


def inputs():
    """Return images, the teacher's embeddings, and the weight of a linear network."""
    torch.manual_seed(0)
    shapes = ((ROWS, 5), (ROWS, 4), (5, 4))
    image, target, weight = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return image, target, weight.requires_grad_()


def loss_and_gradient():
    """Return the global loss and the gradient after DDP's average."""
    image, target, weight = inputs()
    rank, size = collectives.rank(), collectives.world_size()
    part = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    value = cosine_loss(image[part] @ weight, target[part])
    (gradient,) = torch.autograd.grad(value, weight)
    return [collectives.sum_(each.clone()) / size for each in (value.detach(), gradient)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_loss_and_gradient_equal_those_of_one_process_in_float64(size):
    image, target, weight = inputs()
    value = 1 - torch.nn.functional.cosine_similarity(image @ weight, target).mean()
    expected = [value.detach(), torch.autograd.grad(value, weight)[0]]
    for found in run_ranks(size, loss_and_gradient) if size > 1 else [loss_and_gradient()]:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def train_on_two_and_on_one(rank, config, folder, ports):
    torch.set_num_threads(1)
    options = ["data.workers=0", "eval.targets=[]", "optim.lr=0.01"]
    teacher = load_config(config, [*options, "train.max_steps=1"])
    with_rank(rank, 1, ports[0], training.train, teacher, folder / "teacher")
    options += [f"distill.teacher={folder}/teacher", "model.embedding_size=12", "distill.weight=20"]
    for size, port in ((2, ports[1]), (1, ports[2])):
        with_rank(rank, size, port, training.train, load_config(config, options), folder / f"{size}")


@pytest.mark.slow
def test_a_student_with_a_projection_learns_the_same_on_two_ranks_as_on_one(describe, tmp_path):
    config = describe(steps=4, checkpoint="every_steps: 4")
    # The teacher's process group ends before rank 1 joins the next one.
    start_ranks(train_on_two_and_on_one, (config, tmp_path, free_ports(3)), 2)
    losses = []
    for name in ("1", "2"):
        records = read_jsonl(tmp_path / name / "metrics.jsonl")
        losses.append([record["distill_loss"] for record in records if "loss" in record])
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] != pytest.approx(losses[0][0], rel=1e-3)
