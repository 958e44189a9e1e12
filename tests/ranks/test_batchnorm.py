import torch
from torch import nn

from facetrain.distributed import collectives
from facetrain.distributed.sync_batch_norm import use_sync_batch_norm
from tests.support.ranks import run_ranks


def make_net():
    torch.manual_seed(3)
    net = nn.Sequential(nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.BatchNorm1d(4 * 16)).double()
    net[3].weight.requires_grad_(False)
    return net


def images(world_size):
    return torch.randn(
        4 * world_size, 5, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def run_net(net, x_BCHW, target):
    y = net(x_BCHW)
    (y * target).sum().backward()
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "gradients": gradients, "state": net.state_dict()}


def one_rank():
    world_size, rank = collectives.world_size(), collectives.rank()
    net = use_sync_batch_norm(make_net(), torch.device("cpu"))
    x = images(world_size)
    target = torch.linspace(-1, 1, x.shape[0] * 64, dtype=torch.float64).view(-1, 64)
    mine = slice(rank * 4, rank * 4 + 4)
    result = run_net(net, x[mine], target[mine])
    result["gradients"] = {name: collectives.sum_(g) for name, g in result["gradients"].items()}
    return result


def test_batch_norm_over_ranks_equals_batch_norm_of_the_global_batch_on_one_process():
    for world_size in (2, 3):
        x = images(world_size)
        target = torch.linspace(-1, 1, x.shape[0] * 64, dtype=torch.float64).view(-1, 64)
        expected = run_net(make_net(), x, target)
        results = run_ranks(world_size, one_rank)
        torch.testing.assert_close(torch.cat([r["y"] for r in results]), expected["y"])
        for result in results:
            torch.testing.assert_close(result["gradients"], expected["gradients"])
            torch.testing.assert_close(result["state"], expected["state"])


def test_on_one_process_batch_norms_are_not_replaced():
    net = make_net()
    assert type(use_sync_batch_norm(net, torch.device("cpu"))[0]) is nn.BatchNorm2d
