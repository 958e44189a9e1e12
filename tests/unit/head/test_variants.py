"""Adaptive margins against their papers' equations, in float64."""

import math

import pytest
import torch

from facetrain.head.class_shard import ClassShard
from tests.support.dense_head import sample_classes
from tests.support.dense_variants import CASES, HEADS, VARIANTS
from tests.support.heads import make_head, make_margin
from tests.unit.head.helpers import CLASSES, SIZE, batch


def small_head(name, rate=1.0, **options):
    variant = HEADS[name]
    given = {
        "weight_dtype": torch.float64,
        "momentum_dtype": torch.float64,
        "weight_decay": 0.01,
        "chunk_size": 5,
    }
    head = make_head(
        embedding_size=SIZE, num_classes=CLASSES, **variant.margin_arguments(), sample_rate=rate, seed=3,
        **given | variant.head | options,
    )  # fmt: skip
    return head


@pytest.mark.parametrize(("name", "rate"), CASES)
def test_loss_gradients_and_updates_equal_the_papers_equations(name, rate):
    head, oracle = small_head(name, rate), HEADS[name].oracle(CLASSES, rate)
    weight = head.weight.data.clone().requires_grad_()
    momentum = torch.zeros_like(weight)
    for step in range(4):
        embedding, label = batch(step)
        reference = embedding.detach().clone().requires_grad_()
        head.begin_step(step, lr=0.1)
        loss = head(embedding, label)
        loss.backward()
        rows = torch.arange(CLASSES)
        if rate < 1:
            rows = sample_classes(ClassShard(0, CLASSES), label, rate, seed=3, step=step)
        expected = oracle.loss(reference, weight[rows], torch.searchsorted(rows, label), rows, step)
        expected.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(embedding.grad, reference.grad)
        with torch.no_grad():
            momentum[rows] = 0.9 * momentum[rows] + weight.grad[rows] + 0.01 * weight[rows]
            weight[rows] -= 0.1 * momentum[rows]
            weight.grad = None
        torch.testing.assert_close(head.weight.data, weight.detach())
        torch.testing.assert_close(head.row_state()["momentum"], momentum)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_head_with_loaded_state_continues_like_the_saved_one(name):
    saved, loaded = small_head(name), small_head(name)
    for step in range(3):
        saved.begin_step(step, lr=0.1)
        saved(*batch(step)).backward()
    loaded.load_state({key: tensor.clone() for key, tensor in saved.state().items()})
    loaded.load_rows(lambda table, start, stop: saved.row_state()[table][start:stop])
    losses = []
    for head in (saved, loaded):
        head.begin_step(3, lr=0.1)
        loss = head(*batch(3))
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    assert torch.equal(saved.weight.data, loaded.weight.data)


@pytest.mark.parametrize(
    ("name", "rate", "placement"),
    [
        ("arcface", 1.0, "device"),
        ("arcface", 0.3, "device"),
        ("arcface", 0.3, "host"),
        ("magface", 1.0, "device"),
    ],
)
def test_accumulated_micro_batches_equal_an_update_in_the_backward_pass(name, rate, placement):
    whole = small_head(name, rate)
    parts = small_head(name, rate, update_in_backward=False, placement=placement)
    scale = torch.tensor(1024.0)
    for step in range(2):
        whole.begin_step(step, lr=0.1)
        parts.begin_step(step, lr=0.1, loss_scale=scale)
        embedding, label = batch(step)
        if rate < 1:  # a micro-batch samples its own classes, so give both the same classes
            label = label[:6].repeat(2)
        whole(embedding, label).backward()
        for half in (slice(0, 6), slice(6, 12)):
            (parts(embedding[half], label[half]) / 2 * scale).backward()
        parts.step(scale, torch.tensor(0.0))
    torch.testing.assert_close(parts.row_state()["weight"], whole.row_state()["weight"])
    for key, tensor in whole.state().items():
        torch.testing.assert_close(parts.state()[key], tensor)


@pytest.mark.parametrize("name", ["adaface", "curricularface"])
def test_a_batch_that_is_not_finite_does_not_change_the_averages(name):
    head = small_head(name)
    head.begin_step(0, lr=0.1)
    head(*batch(0)).backward()
    before = {key: tensor.clone() for key, tensor in head.state().items()}
    embedding, label = batch(1)
    head.begin_step(1, lr=0.1)
    head(embedding * float("nan"), label).backward()
    assert all(torch.equal(head.state()[key], tensor) for key, tensor in before.items())


def test_adaface_takes_a_long_embedding_for_one_of_length_100():
    margins, targets = [make_margin("adaface") for _ in range(2)], []
    for margin, longest in zip(margins, (100.0, 1e6), strict=True):
        norm, cos = torch.tensor([20.0, 30.0, longest]), torch.zeros(3)
        targets.append(margin.apply(cos, norm).value_G.tolist())
        margin.update_averages(norm, cos)
    assert margins[0].state() == margins[1].state() and targets[0] == targets[1]


def test_margins_use_their_published_numbers_by_default():
    right_angle = torch.zeros(1, dtype=torch.float64)
    targets = [make_margin(name).apply(right_angle, None).value_G.item() for name in ("arcface", "cosface")]
    assert targets == pytest.approx([-math.sin(0.5), -0.4])
    assert (make_margin("adaface").m2, make_margin("curricularface").m2) == (0.4, 0.5)
    assert (make_margin("elastic_arcface").mean, make_margin("elastic_cosface").mean) == (0.5, 0.35)


@pytest.mark.parametrize("name", ["elastic_arcface", "elastic_cosface"])
def test_the_elastic_margins_have_the_deviation_their_authors_train_with(name):
    margin = make_margin(name)
    targets = margin.apply(torch.zeros(20_000, dtype=torch.float64), None).value_G
    margins = torch.arcsin(-targets) if name == "elastic_arcface" else -targets
    assert margins.std().item() == pytest.approx(0.05, rel=0.02)
