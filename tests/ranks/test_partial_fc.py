"""The head in a loop with an optimizer of PyTorch, split over ranks, against one process in float64."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import facetrain
from facetrain.distributed import collectives
from facetrain.head.dense import dense_loss
from tests.support.dense_head import sample_classes
from tests.support.heads import make_net
from tests.support.ranks import run_ranks

CLASSES, SIZE, BATCH, STEPS = 23, 8, 12, 4


def cosface(cos):
    return cos - 0.4


def batch(step):
    generator = torch.Generator().manual_seed(step)
    image = torch.randn(BATCH, 5, dtype=torch.float64, generator=generator)
    return image, torch.randint(0, CLASSES, (BATCH,), generator=generator)


def make_head(rate, **options):
    return facetrain.PartialFC(cosface, SIZE, CLASSES, rate, seed=3, chunk_size=4, **options).double()


def train_in_groups(rate, of_group):
    """Train in this rank's group of ranks; return losses, network, and `state_dict` of the head."""
    world = dist.get_world_size()
    groups = [
        dist.new_group(list(range(first, min(first + of_group, world))))
        for first in range(0, world, of_group)
    ]
    group = groups[dist.get_rank() // of_group]
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    net = make_net(SIZE)
    wrapped = DistributedDataParallel(net, process_group=group)
    head = make_head(rate, process_group=group if of_group < world else None)
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        image, label = batch(step)
        mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        loss = head(wrapped(image[mine]), label[mine, None])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net.state_dict(), head.state_dict()


def train_plainly(rate):
    net = make_net(SIZE)
    head = make_head(1.0, place=(0, 1))
    weight = nn.Parameter(head.weight.detach().clone())
    optimizer = torch.optim.SGD([*net.parameters(), weight], lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        image, label = batch(step)
        sample = None if rate == 1 else sample_classes(head.shard, label, rate, seed=3, step=step)
        loss = dense_loss(net(image), weight, label, cosface, class_S=sample)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net.state_dict(), weight.detach()


class Follows(nn.Module):
    """CosFace whose margin follows the cosines of the global batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, cos_G):
        self.mean.lerp_(cos_G.detach().mean(), 0.1)
        return cos_G - 0.4 - self.mean


def losses_of_a_module():
    rank, size = collectives.rank(), collectives.world_size()
    head = facetrain.PartialFC(Follows(), SIZE, CLASSES, seed=3).double()
    losses = []
    for step in range(3):
        image, label = batch(step)
        mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        losses.append(head(image[mine] @ torch.eye(5, SIZE, dtype=torch.float64), label[mine]).item())
    return losses, head.margin.state()


def test_the_buffers_of_a_margin_are_the_same_on_all_ranks():
    expected, state = losses_of_a_module()
    for losses, found in run_ranks(2, losses_of_a_module):
        assert losses == pytest.approx(expected, rel=1e-9)
        torch.testing.assert_close(found, state)


@pytest.mark.parametrize(("world_size", "of_group"), [(2, 2), (3, 3), (3, 2)])
def test_a_loop_on_ranks_equals_one_process_and_its_state_loads_on_another_number(world_size, of_group):
    for rate in (1.0, 0.4):
        ranks = run_ranks(world_size, train_in_groups, rate, of_group)
        expected, network, weight = train_plainly(rate)
        for losses, found, _ in ranks:
            assert losses == pytest.approx(expected, rel=1e-9)
            torch.testing.assert_close(found, network)
        joined = facetrain.PartialFC.join_state_dicts(state for _, _, state in ranks[:of_group])
        torch.testing.assert_close(joined["weight"], weight)
        for size in (1, 2):
            heads = [make_head(rate, place=(rank, size)) for rank in range(size)]
            for head in heads:
                head.load_state_dict(joined)
            assert torch.equal(torch.cat([head.weight.detach() for head in heads]), joined["weight"])
            assert {head.get_extra_state()["calls"] for head in heads} == {STEPS}
