"""Sharded head on 1 to 3 processes against the dense oracle, in float64."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from facetrain.distributed import collectives
from facetrain.head.class_shard import ClassShard
from tests.support.dense_head import MARGINS, dense_loss, sample_classes
from tests.support.dense_variants import VARIANTS
from tests.support.heads import combined, make_head
from tests.support.ranks import run_ranks
from tests.unit.head.test_expectations import STAGES, DenseReference

CLASSES, SIZE, BATCH, STEPS = 23, 8, 12, 3
CASES = [(margin, rate) for margin in MARGINS for rate in (1.0, 0.4, 0.0)]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    image = torch.randn(BATCH, 5, dtype=torch.float64, generator=generator)
    return image, torch.randint(0, CLASSES, (BATCH,), generator=generator)


def make_net():
    torch.manual_seed(0)
    return nn.Linear(5, SIZE).double()


def train_sharded():
    """Run every case; return losses, the backbone, the centers, and the bytes sent per step."""
    rank, world_size = collectives.rank(), collectives.world_size()
    results = []
    for margin, rate in CASES:
        net = make_net()
        wrapped = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        head = make_head(
            embedding_size=SIZE, num_classes=CLASSES, margin=combined(**MARGINS[margin]), rank=rank, seed=3,
            world_size=world_size, sample_rate=rate, weight_decay=0.01, chunk_size=4,
            weight_dtype=torch.float64, momentum_dtype=torch.float64,
        )  # fmt: skip
        losses = []
        for step in range(STEPS):
            image, label = batch(step)
            mine = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
            head.begin_step(step, lr=0.1)
            with collectives.measured_traffic() as traffic:
                if step % 2:  # labels gathered before the forward pass, as on a GPU
                    head.expect_labels(label[mine])
                loss = head(wrapped(image[mine]), label[mine])
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results.append((losses, net.state_dict(), head.weight.data, sum(traffic.values())))
    return results


def train_dense(margin, rate):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    head = make_head(
        embedding_size=SIZE,
        num_classes=CLASSES,
        margin=combined(scale=64.0),
        seed=3,
        weight_dtype=torch.float64,
    )
    weight = head.weight.data.clone().requires_grad_()
    momentum = torch.zeros_like(weight)
    losses = []
    for step in range(STEPS):
        image, label = batch(step)
        sample = None if rate == 1 else sample_classes(ClassShard(0, CLASSES), label, rate, seed=3, step=step)
        optimizer.zero_grad()
        loss = dense_loss(net(image), weight, label, MARGINS[margin], sample)
        loss.backward()
        optimizer.step()
        rows = torch.arange(CLASSES) if sample is None else sample
        with torch.no_grad():
            momentum[rows] = 0.9 * momentum[rows] + weight.grad[rows] + 0.01 * weight[rows]
            weight[rows] -= 0.1 * momentum[rows]
        weight.grad = None
        losses.append(loss.item())
    return losses, net.state_dict(), weight.detach()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_on_ranks_equals_the_dense_reference_for_every_margin_and_sample_rate(world_size):
    ranks = run_ranks(world_size, train_sharded)
    for number, (margin, rate) in enumerate(CASES):
        losses, state, weight = train_dense(margin, rate)
        results = [results[number] for results in ranks]
        for result in results:
            assert result[0] == pytest.approx(losses, rel=1e-9), (margin, rate)
            assert result[0] == results[0][0], "the loss must be the same number on every rank"
            torch.testing.assert_close(result[1], state)
        torch.testing.assert_close(torch.cat([result[2] for result in results]), weight)


def test_the_bytes_sent_per_step_equal_the_documented_formula():
    for result in run_ranks(2, train_sharded):
        # Embeddings and labels out, three statistics per gathered row, the gathered gradient back.
        local = BATCH // 2
        expected = local * SIZE * 8 + local * 8 + 3 * BATCH * 8 + BATCH * SIZE * 8
        assert {case[3] for case in result} == {expected}


VARIANT_CASES = [(name, rate) for name in VARIANTS for rate in (1.0, 0.4)]


def train_variants():
    """Run every kind of head; return losses, the backbone and the centers of each."""
    rank, world_size = collectives.rank(), collectives.world_size()
    results = []
    for name, rate in VARIANT_CASES:
        net = make_net()
        wrapped = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        head = make_head(
            embedding_size=SIZE, num_classes=CLASSES, **VARIANTS[name].margin_arguments(), rank=rank, seed=3,
            world_size=world_size, sample_rate=rate, weight_decay=0.01, chunk_size=4,
            weight_dtype=torch.float64, momentum_dtype=torch.float64, **VARIANTS[name].head,
        )  # fmt: skip
        losses = []
        for step in range(STEPS):
            image, label = batch(step)
            mine = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
            head.begin_step(step, lr=0.1)
            with collectives.measured_traffic() as traffic:
                loss = head(wrapped(image[mine]), label[mine])
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results.append((losses, net.state_dict(), head.weight.data, head.state(), sum(traffic.values())))
    return results


def train_dense_variant(name, rate):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    variant = VARIANTS[name]
    oracle = variant.oracle(CLASSES, rate)
    head = make_head(
        embedding_size=SIZE, num_classes=CLASSES, margin=combined(scale=64.0), seed=3, weight_dtype=torch.float64,
        sub_centers=variant.columns,
    )  # fmt: skip
    moving = [head.weight.data.clone().requires_grad_(), *oracle.parameters()]
    momenta = [torch.zeros_like(tensor) for tensor in moving]
    losses = []
    for step in range(STEPS):
        image, label = batch(step)
        rows = torch.arange(CLASSES)
        if rate < 1:
            rows = sample_classes(ClassShard(0, CLASSES), label, rate, seed=3, step=step)
        optimizer.zero_grad()
        loss = oracle.loss(net(image), moving[0][rows], torch.searchsorted(rows, label), rows, step)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for tensor, momentum in zip(moving, momenta, strict=True):
                of = rows if tensor is moving[0] else ...
                momentum[of] = 0.9 * momentum[of] + tensor.grad[of] + 0.01 * tensor[of]
                tensor[of] -= 0.1 * momentum[of]
                tensor.grad = None
        losses.append(loss.item())
    return losses, net.state_dict(), moving[0].detach()


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_adaptive_margin_and_loss_on_ranks_equals_its_equation(world_size):
    ranks = run_ranks(world_size, train_variants)
    for number, (name, rate) in enumerate(VARIANT_CASES):
        losses, state, weight = train_dense_variant(name, rate)
        results = [results[number] for results in ranks]
        for result in results:
            assert result[0] == pytest.approx(losses, rel=1e-9), (name, rate)
            assert result[0] == results[0][0], "the loss must be the same number on every rank"
            torch.testing.assert_close(result[1], state)
            for key, value in result[3].items():
                assert torch.equal(value, results[0][3][key]), f"{key} must be the same on every rank"
        torch.testing.assert_close(torch.cat([result[2] for result in results]), weight)


def test_the_bytes_sent_by_adaptive_margins_and_losses_equal_the_documented_formula():
    local = BATCH // 2
    plain = local * (SIZE * 8 + 8) + 3 * BATCH * 8 + BATCH * SIZE * 8
    # In addition: norms and their gradient; all target cosines; one number per row for the images that count.
    more = {
        "adaface": local * 8 + BATCH * 8, "magface": local * 8 + BATCH * 8, "curricularface": BATCH * 8,
        "sub-centers": BATCH * 8,
    }  # fmt: skip
    for result in run_ranks(2, train_variants):
        for (name, _), case in zip(VARIANT_CASES, result, strict=True):
            assert case[4] == plain + more.get(name, 0), name


def train_in_stages():
    """Run the stages of progressive cluster optimization; return losses, the backbone, and this rank's tables."""
    rank, world_size = collectives.rank(), collectives.world_size()
    net = make_net()
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    head = make_head(
        embedding_size=SIZE, num_classes=CLASSES, margin=combined(**MARGINS["cosface"]), rank=rank, seed=3,
        world_size=world_size, stages=STAGES, expectation_margin=0.3, chunk_size=4,
        weight_dtype=torch.float64, momentum_dtype=torch.float64,
    )  # fmt: skip
    losses = []
    for step in range(7):
        image, label = batch(step)
        mine = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
        head.begin_step(step, lr=0.1)
        loss = head(wrapped(image[mine]), label[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net.state_dict(), head.row_state()


@pytest.mark.parametrize("world_size", [2, 3])
def test_progressive_cluster_optimization_on_ranks_equals_the_dense_reference(world_size):
    ranks = run_ranks(world_size, train_in_stages)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    head = make_head(embedding_size=SIZE, num_classes=CLASSES, seed=3, margin=combined(scale=64.0),
                     weight_dtype=torch.float64)  # fmt: skip
    dense, losses = DenseReference(head.weight.data), []
    for step in range(7):
        image, label = batch(step)
        optimizer.zero_grad()
        loss, *rest = dense.loss(net(image), label, step)
        loss.backward()
        optimizer.step()
        dense.update(*rest, label)
        losses.append(loss.item())
    for found, state, _ in ranks:
        assert found == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(state, net.state_dict())
    for name, expected in (("weight", dense.weight.detach()), ("expectation", dense.expectation)):
        torch.testing.assert_close(torch.cat([tables[name] for *_, tables in ranks]), expected)
