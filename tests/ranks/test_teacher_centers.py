"""Distillation with a teacher's class centers on 1 to 3 processes against plain losses, in float64."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from facetrain.distributed import collectives
from facetrain.head.class_shard import ClassShard
from facetrain.head.head_group import HeadGroup, head_parts
from facetrain.head.sampling import Stage
from facetrain.training.distillation import Distillation
from tests.support.dense_head import dense_loss, sample_classes
from tests.support.heads import combined, make_head, make_net
from tests.support.ranks import run_ranks

SIZE, TEACHER, BATCH, LR, STEPS, WEIGHT = 4, 6, 12, 0.05, 3, 2.0
CLASSES, FIRST = (7, 4), (0, 7)
MARGIN = {"scale": 8.0, "m2": 0.3}
LOSS_WEIGHTS = (1.0, 0.5)
ALL, SAMPLED, STAGED = (1.0, 1.0, 1.0), (0.4, 0.4, 0.4), (0.4, 1.0, 0.4)
"""Sample rates of the steps."""
CASES = [(ALL, 0), (SAMPLED, 0), (SAMPLED, 1), (STAGED, 0), (STAGED, 1)]


def batch(step, grouped):
    generator = torch.Generator().manual_seed(step)
    image = torch.randn(BATCH, 5, dtype=torch.float64, generator=generator)
    # Few classes, so that every batch has several images of a class, on several ranks.
    classes = sum(CLASSES) if grouped else CLASSES[0]
    return image, torch.randint(0, classes, (BATCH,), generator=generator)


def make_centers(rank, world_size, rates, grouped):
    starts = [step for step in range(STEPS) if step == 0 or rates[step] != rates[step - 1]]
    stages = tuple(Stage(step, rates[step], "off") for step in starts)
    heads = [
        make_head(
            embedding_size=TEACHER, num_classes=classes, margin=combined(**MARGIN), rank=rank, seed=3 + number,
            world_size=world_size, stages=stages, chunk_size=3, weight_dtype=torch.float64,
            update_in_backward=False, trained=False,
        )
        for number, classes in enumerate(CLASSES)
    ]  # fmt: skip
    return HeadGroup(heads, LOSS_WEIGHTS, (0.6, 0.4)) if grouped else heads[0]


class Given:
    """Teacher that gives no embeddings: the loss reads the class centers alone."""

    embedding_size, digest = TEACHER, "given"


def make_distillation(centers):
    taught = Distillation(Given(), weight=WEIGHT, embedding_size=SIZE, seed=1, centers=centers)
    return taught.double()


def train_on_ranks():
    """Train every case; return losses, weights, and this rank's centers by their classes."""
    rank, size = collectives.rank(), collectives.world_size()
    results = []
    for rates, grouped in CASES:
        net = make_net(SIZE)
        wrapped = DistributedDataParallel(net) if size > 1 else net
        centers = make_centers(rank, size, rates, grouped)
        distillation = make_distillation(centers)
        weights = [*net.parameters(), *distillation.parameters()]
        optimizer = torch.optim.SGD(weights, lr=LR)
        losses = []
        for step in range(STEPS):
            image, label = batch(step, grouped)
            mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
            distillation.begin_step(step)
            optimizer.zero_grad()
            weighted, value = distillation(SimpleNamespace(label_B=label[mine]), None, wrapped(image[mine]))
            weighted.backward()
            # As the optimizer step does for parameters that DDP does not wrap.
            collectives.mean_all_(parameter.grad for parameter in distillation.parameters())
            optimizer.step()
            losses.append([weighted.item(), value.item()])
        rows = [(part.shard, part.head.row_state()["weight"]) for part in head_parts(centers)]
        results.append((losses, [weight.detach() for weight in weights], rows))
    return results


def train_plainly(rates, grouped):
    """All logits at once by autograd."""
    net, group = make_net(SIZE), make_centers(0, 1, rates, grouped)
    tables = [part.head.weight.data.clone() for part in head_parts(group)]
    distillation = make_distillation(group)
    weights = [*net.parameters(), *distillation.parameters()]
    optimizer = torch.optim.SGD(weights, lr=LR)
    losses = []
    for step in range(STEPS):
        image, label = batch(step, grouped)
        optimizer.zero_grad()
        student, total = distillation.projection(net(image)), 0.0
        for number, table in enumerate(tables):
            inside = (label >= FIRST[number]) & (label < FIRST[number] + CLASSES[number])
            own, sample = label[inside] - FIRST[number], None
            if rates[step] < 1:
                shard = ClassShard(0, CLASSES[number])
                sample = sample_classes(shard, own, rates[step], seed=3 + number, step=step)
            share = len(own) / BATCH * (LOSS_WEIGHTS[number] if grouped else 1)
            total = total + share * dense_loss(student[inside], table, own, MARGIN, sample)
        (WEIGHT * total).backward()
        optimizer.step()
        losses.append([WEIGHT * total.item(), total.item()])
    return losses, [weight.detach() for weight in weights], torch.cat(tables)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_losses_weights_and_centers_equal_the_plain_ones(size):
    ranks = run_ranks(size, train_on_ranks) if size > 1 else [train_on_ranks()]
    for number, case in enumerate(CASES):
        losses, weights, centers = train_plainly(*case)
        found = [results[number] for results in ranks]
        for result in found:
            torch.testing.assert_close(result[0], losses, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(result[1], weights, rtol=1e-9, atol=1e-12)
        rows = sorted((row for result in found for row in result[2]), key=lambda row: row[0])
        torch.testing.assert_close(torch.cat([table for _, table in rows]), centers, rtol=1e-9, atol=1e-12)
