"""Heads of two datasets whose micro-batches have unequal shares of them, against one plain step in float64."""

import pytest
import torch

from facetrain.distributed import collectives
from facetrain.head.head_group import HeadGroup
from tests.support.dense_head import MARGINS, dense_loss
from tests.support.heads import combined, make_head
from tests.support.ranks import run_ranks

SIZE, CLASSES, BATCH, LR, DECAY, STEPS = 8, (40, 5), 24, 0.1, 0.01, 3
SHARES = (4, 17)
"""Images of the first dataset in each micro-batch."""
CASES = [(placement, optimizer) for placement in ("device", "host") for optimizer in ("sgd", "adamw")]


def micro_batches(step):
    """Return embeddings and labels of the group, for each micro-batch of a step."""
    generator = torch.Generator().manual_seed(step)
    parts = []
    for share in SHARES:
        label = torch.cat(
            [
                torch.randint(0, CLASSES[0], (share,), generator=generator),
                torch.randint(CLASSES[0], sum(CLASSES), (BATCH - share,), generator=generator),
            ]
        )
        mixed = torch.randperm(BATCH, generator=generator)
        parts.append((torch.randn(BATCH, SIZE, dtype=torch.float64, generator=generator), label[mixed]))
    return parts


def make_heads(**options):
    return [
        make_head(
            embedding_size=SIZE, num_classes=classes, margin=combined(**MARGINS["arcface"]), seed=number,
            weight_decay=DECAY, weight_dtype=torch.float64, momentum_dtype=torch.float64, **options,
        )
        for number, classes in enumerate(CLASSES)
    ]  # fmt: skip


def small_chunks(logits_per_class, columns, device_type):
    """Return the classes per chunk: as `default_chunk_size`, fewer for more logits."""
    return 5 + 40 // logits_per_class


def train_group():
    """Train every case; return the centers of this rank's classes, by their labels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("facetrain.head.partial_fc.default_chunk_size", small_chunks)
        return [train_case(*case) for case in CASES]


def train_case(placement, optimizer):
    rank, size = collectives.rank(), collectives.world_size()
    options = {"placement": placement, "optimizer": optimizer, "update_in_backward": False}
    group = HeadGroup(make_heads(**options, rank=rank, world_size=size), (1.0, 1.0), (0.5, 0.5))
    for step in range(STEPS):
        group.begin_step(step, lr=LR)
        for embedding, label in micro_batches(step):
            mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
            (group(embedding[mine].requires_grad_(), label[mine]) / len(SHARES)).backward()
        group.step(torch.tensor(1.0), torch.tensor(0.0))
    return {part.shard: part.head.row_state()["weight"] for part in group.parts}


def train_plainly(name):
    """Update all centers once per step, by the optimizers of torch; return them."""
    weights = [head.weight.data.clone().requires_grad_() for head in make_heads()]
    optimizer = (
        torch.optim.SGD(weights, lr=LR, momentum=0.9, weight_decay=DECAY)
        if name == "sgd"
        else torch.optim.AdamW(weights, lr=LR, weight_decay=DECAY)
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        for embedding, label in micro_batches(step):
            first = 0
            for weight in weights:
                inside = (label >= first) & (label < first + len(weight))
                loss = dense_loss(embedding[inside], weight, label[inside] - first, MARGINS["arcface"])
                (loss * inside.sum() / len(label) / len(SHARES)).backward()
                first += len(weight)
        optimizer.step()
    return torch.cat(weights).detach()


@pytest.mark.parametrize(
    "size", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_micro_batches_with_unequal_shares_of_a_dataset_update_its_centers_once_per_step(size):
    ranks = run_ranks(size, train_group) if size > 1 else [train_group()]
    plain = {optimizer: train_plainly(optimizer) for optimizer in ("sgd", "adamw")}
    for number, (_, optimizer) in enumerate(CASES):
        rows = sorted((shard, table) for results in ranks for shard, table in results[number].items())
        torch.testing.assert_close(torch.cat([table for _, table in rows]), plain[optimizer])
