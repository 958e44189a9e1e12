"""Sharded head on 2 and 3 processes against the dense oracles, in float64."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from facetrain.distributed import collectives
from facetrain.head.class_shard import ClassShard
from tests.support.dense_head import MARGINS, sample_classes
from tests.support.dense_stages import STAGES, DenseReference
from tests.support.dense_variants import CASES, HEADS
from tests.support.heads import combined, make_head, make_net
from tests.support.ranks import run_ranks

CLASSES, SIZE, BATCH, STEPS = 23, 8, 12, 3
LOCAL = BATCH // 2
# Embeddings and labels out, three statistics per gathered row, the gathered gradient back.
BYTES = LOCAL * (SIZE * 8 + 8) + 3 * BATCH * 8 + BATCH * SIZE * 8
# In addition: norms and their gradient; or all target cosines.
NORM_BYTES = LOCAL * 8 + BATCH * 8
MORE_BYTES = {
    "adaface": NORM_BYTES, "magface": NORM_BYTES, "curricularface": BATCH * 8, "of the batch": BATCH * 8,
}  # fmt: skip


def batch(step):
    generator = torch.Generator().manual_seed(step)
    # Norms of the embeddings on both sides of MagFace's smallest one, 10.
    image = 10 * torch.randn(BATCH, 5, dtype=torch.float64, generator=generator)
    return image, torch.randint(0, CLASSES, (BATCH,), generator=generator)


def small_head(**options):
    return make_head(
        embedding_size=SIZE, num_classes=CLASSES, seed=3, chunk_size=4, weight_dtype=torch.float64,
        momentum_dtype=torch.float64, **options,
    )  # fmt: skip


def train_sharded(steps=STEPS, **options):
    """Train a head on this rank; return losses, the backbone, the head's tables and state, and the bytes per step."""
    rank, world_size = collectives.rank(), collectives.world_size()
    net = make_net(SIZE)
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    head, losses = small_head(rank=rank, world_size=world_size, **options), []
    for step in range(steps):
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
    return losses, net.state_dict(), head.row_state(), head.state(), sum(traffic.values())


def train_every_head():
    return [
        train_sharded(
            **HEADS[name].margin_arguments(), sample_rate=rate, weight_decay=0.01, **HEADS[name].head
        )
        for name, rate in CASES
    ]


def train_dense(name, rate):
    net = make_net(SIZE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    oracle = HEADS[name].oracle(CLASSES, rate)
    head = small_head(margin=combined(scale=64.0))
    weight = head.weight.data.clone().requires_grad_()
    momentum = torch.zeros_like(weight)
    losses = []
    for step in range(STEPS):
        image, label = batch(step)
        rows = torch.arange(CLASSES)
        if rate < 1:
            rows = sample_classes(ClassShard(0, CLASSES), label, rate, seed=3, step=step)
        optimizer.zero_grad()
        loss = oracle.loss(net(image), weight[rows], torch.searchsorted(rows, label), rows, step)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            momentum[rows] = 0.9 * momentum[rows] + weight.grad[rows] + 0.01 * weight[rows]
            weight[rows] -= 0.1 * momentum[rows]
            weight.grad = None
        losses.append(loss.item())
    return losses, net.state_dict(), weight.detach()


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_margin_and_loss_on_ranks_equals_its_equation_and_sends_as_many_bytes_as_documented(world_size):
    ranks = run_ranks(world_size, train_every_head)
    for number, (name, rate) in enumerate(CASES):
        losses, state, weight = train_dense(name, rate)
        results = [results[number] for results in ranks]
        for result in results:
            assert result[0] == pytest.approx(losses, rel=1e-9), (name, rate)
            assert result[0] == results[0][0], "the loss must be the same number on every rank"
            torch.testing.assert_close(result[1], state)
            for key, value in result[3].items():
                assert torch.equal(value, results[0][3][key]), f"{key} must be the same on every rank"
            if world_size == 2:
                assert result[4] == BYTES + MORE_BYTES.get(name, 0), name
        torch.testing.assert_close(torch.cat([result[2]["weight"] for result in results]), weight)


def train_in_stages():
    return train_sharded(7, margin=combined(**MARGINS["cosface"]), stages=STAGES, expectation_margin=0.3)


@pytest.mark.parametrize("world_size", [2, 3])
def test_progressive_cluster_optimization_on_ranks_equals_the_dense_reference(world_size):
    ranks = run_ranks(world_size, train_in_stages)
    net = make_net(SIZE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    dense, losses = DenseReference(small_head(margin=combined(scale=64.0)).weight.data), []
    for step in range(7):
        image, label = batch(step)
        optimizer.zero_grad()
        loss, *rest = dense.loss(net(image), label, step)
        loss.backward()
        optimizer.step()
        dense.update(*rest, label)
        losses.append(loss.item())
    for found, state, *_ in ranks:
        assert found == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(state, net.state_dict())
    for name, expected in (("weight", dense.weight.detach()), ("expectation", dense.expectation)):
        torch.testing.assert_close(torch.cat([result[2][name] for result in ranks]), expected)
