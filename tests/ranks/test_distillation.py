"""Distillation on several ranks against one process."""

import pytest
import torch

from facetrain.config.loading import load_config
from facetrain.distributed import collectives
from facetrain.run import training
from facetrain.telemetry.jsonl import read_jsonl
from facetrain.training.distillation import LOSSES
from tests.ranks.test_resume import free_ports, with_rank
from tests.runs.conftest import dataset, describe  # noqa: F401
from tests.support.ranks import run_ranks, start_ranks

ROWS = 12


def losses_and_gradients():
    """Return the global loss and the gradient after DDP's average, for each loss, with a linear network."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, 5, dtype=torch.float64)
    target = torch.randn(ROWS, 4, dtype=torch.float64)
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    rank, size = collectives.rank(), collectives.world_size()
    own = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    found = {}
    for name, loss in LOSSES.items():
        value = loss(x[own] @ weight, target[own])
        (gradient,) = torch.autograd.grad(value, weight)
        mean = collectives.sum_(value.detach().clone()) / size
        found[name] = [mean, collectives.sum_(gradient.clone()) / size]
    return found


def by_definition():
    torch.manual_seed(0)
    x, target = torch.randn(ROWS, 5, dtype=torch.float64), torch.randn(ROWS, 4, dtype=torch.float64)
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    y = x @ weight
    cosines = [torch.nn.functional.cosine_similarity(z[:, None], z[None], dim=2) for z in (y, target)]
    apart = ~torch.eye(ROWS, dtype=torch.bool)
    values = {
        "cosine": 1 - torch.nn.functional.cosine_similarity(y, target).mean(),
        "mse": torch.nn.functional.mse_loss(y, target),
        "relational": (cosines[0] - cosines[1])[apart].square().mean(),
    }
    return {
        name: [value.detach(), torch.autograd.grad(value, weight, retain_graph=True)[0]]
        for name, value in values.items()
    }


@pytest.mark.parametrize("size", [1, 2, 3])
def test_loss_and_gradient_equal_those_of_one_process_in_float64(size):
    expected = by_definition()
    for found in run_ranks(size, losses_and_gradients) if size > 1 else [losses_and_gradients()]:
        assert found.keys() == expected.keys()
        for name in expected:
            for one, other in zip(found[name], expected[name], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def train_on_two_and_on_one(rank, config, folder, ports):
    torch.set_num_threads(1)
    options = ["data.workers=0", "eval.targets=[]", "optim.lr=0.01"]
    teacher = load_config(config, [*options, "train.max_steps=1"])
    with_rank(rank, 1, ports[0], training.train, teacher, folder / "teacher")
    options += [f"distill.teacher={folder}/teacher", "model.embedding_size=12", "distill.weight=20"]
    for size, port in ((2, ports[1]), (1, ports[2])):
        with_rank(rank, size, port, training.train, load_config(config, options), folder / f"{size}")


@pytest.mark.slow
def test_a_student_with_a_projection_learns_the_same_on_two_ranks_as_on_one(describe, tmp_path):  # noqa: F811
    config = describe(steps=4, checkpoint="every_steps: 4")
    # The teacher's process group ends before rank 1 joins the next one.
    start_ranks(train_on_two_and_on_one, (config, tmp_path, free_ports(3)), 2)
    losses = []
    for name in ("1", "2"):
        records = read_jsonl(tmp_path / name / "metrics.jsonl")
        losses.append([record["distill_loss"] for record in records if "loss" in record])
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] != pytest.approx(losses[0][0], rel=1e-3)
