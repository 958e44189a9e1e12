"""The network on several ranks against the plain one with the whole batch."""

import pytest
import torch
from torch import nn

from facetrain.backbone.zoo import build_backbone
from facetrain.distributed import collectives
from facetrain.distributed.ddp import wrap_in_ddp
from facetrain.distributed.world import World
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
LOCAL, STEPS = 4, 3
WAYS = [("none", 1, False), ("none", 2, False), ("none", 1, True), ("bf16", 1, False), ("fp16", 2, True)]


def make_net(again):
    torch.manual_seed(5)
    net = build_backbone(
        "iresnet",
        layers=(1, 1, 1, 1),
        widths=(4, 4, 8, 8),
        embedding_size=8,
        image_size=16,
        checkpoint_activations=again,
    )
    # Norms of single images, so that micro-batches and one batch are the same function.
    for module in net.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(1, child.num_features))
    net.features = nn.Identity()
    return net


def train(network, accumulate, batches):
    """Take some steps of plain SGD; return the gradients of each."""
    optimizer, found = torch.optim.SGD(network.parameters(), lr=0.1), []
    for image in batches:
        parts = image.chunk(accumulate)
        for number, part in enumerate(parts, start=1):
            last = number == len(parts) or not hasattr(network, "no_sync")
            with torch.enable_grad() if last else network.no_sync():
                (network(part).square().mean() / accumulate).backward()
        found.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
        optimizer.step()
        optimizer.zero_grad()
    return found


def batches(world_size):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(world_size * LOCAL, 3, 16, 16, generator=generator) for _ in range(STEPS)]


def every_way():
    world_size, rank = collectives.world_size(), collectives.rank()
    world = World(rank=rank, local_rank=rank, size=world_size, local_size=world_size, device=CPU)
    mine = [batch[rank * LOCAL : (rank + 1) * LOCAL] for batch in batches(world_size)]
    found = []
    for compress, accumulate, again in WAYS:
        network = wrap_in_ddp(make_net(again), world, compress, accumulate=accumulate)
        found.append(train(network, accumulate, mine))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_have_the_gradients_of_one_process_whatever_the_way_they_exchange_them(world_size):
    expected = train(make_net(False), 1, batches(world_size))
    for found in run_ranks(world_size, every_way):
        for (compress, _, _), gradients in zip(WAYS, found, strict=True):
            # Later steps start from weights that rounded gradients have moved.
            rtol = 1e-4 if compress == "none" else 0.02
            for step, gradient in enumerate(gradients):
                away = (gradient - expected[step]).norm() / expected[step].norm()
                assert away < rtol, (compress, step, float(away))


def test_one_rank_trains_the_network_itself():
    net = make_net(False)
    assert wrap_in_ddp(net, World(rank=0, local_rank=0, size=1, local_size=1, device=CPU), "bf16") is net
