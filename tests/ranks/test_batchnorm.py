import pytest
import torch
from torch import nn

from facetrain.backbone.zoo import build_backbone
from facetrain.distributed import collectives
from facetrain.distributed.sync_batch_norm import use_sync_batch_norm
from facetrain.errors import ConfigError
from tests.support.ranks import run_ranks

layers_of_timm = pytest.importorskip("timm.layers", reason="timm is not installed")


def make_net():
    torch.manual_seed(3)
    layers = [nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4, affine=False)]
    layers += [layers_of_timm.BatchNormAct2d(4), nn.Flatten()]
    net = nn.Sequential(*layers, nn.BatchNorm1d(4 * 16)).double()
    net[-1].weight.requires_grad_(False)
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
    net = make_net()
    use_sync_batch_norm(net, torch.device("cpu"))
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


CASES = [
    (dtype, memory_format)
    for dtype in (torch.float32, torch.bfloat16)
    for memory_format in (torch.contiguous_format, torch.channels_last)
]


def one_rank_of_all_cases():
    rank, results = collectives.rank(), []
    for dtype, memory_format in CASES:
        norm = nn.Sequential(nn.BatchNorm2d(5))
        use_sync_batch_norm(norm, torch.device("cpu"))
        x = images(2)[rank * 4 : rank * 4 + 4].to(dtype, memory_format=memory_format).requires_grad_()
        y = norm(x)
        (y.float() ** 3).sum().backward()
        results.append([y.detach(), x.grad])
    return results


@pytest.mark.slow
def test_in_other_dtypes_and_layouts_it_is_as_near_as_rounding_allows():
    ranks = run_ranks(2, one_rank_of_all_cases)
    for case, (dtype, memory_format) in enumerate(CASES):
        x = images(2).to(dtype).double().requires_grad_()
        expected = nn.BatchNorm2d(5).double()(x)
        # The gradient that comes back is that of the rounded output.
        expected.backward(3 * expected.detach().to(dtype).double() ** 2)
        tolerance = 4 * torch.finfo(dtype).eps
        for part, wanted in enumerate((expected.detach(), x.grad)):
            found = torch.cat([results[case][part] for results in ranks])
            assert found.dtype == dtype
            largest = wanted.abs().max().item()
            message = f"{dtype}, {memory_format}"
            torch.testing.assert_close(
                found.double(),
                wanted,
                rtol=0,
                atol=tolerance * largest,
                msg=lambda text, m=message: f"{m}: {text}",
            )


def test_on_one_process_batch_norms_are_not_replaced():
    net = make_net()
    use_sync_batch_norm(net, torch.device("cpu"))
    assert type(net[0]) is nn.BatchNorm2d


class NormWithReLU(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


class NormWithOtherEps(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels, eps=0.1)


DEVICES = pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cuda")], ids=str)


@DEVICES
@torch.no_grad()
def test_in_evaluation_mode_a_synchronized_network_computes_what_it_did(device, monkeypatch):
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    network = build_backbone("timm/test_efficientnet", embedding_size=8, image_size=32)
    network.add_module("last", NormWithOtherEps(3))
    network.eval()
    image = torch.randn(2, 3, 32, 32)
    names, expected = list(network.state_dict()), (network(image), network.last(image))
    use_sync_batch_norm(network, device)
    network.eval()
    local = nn.BatchNorm2d.forward, layers_of_timm.BatchNormAct2d.forward
    assert not any(type(module).forward in local for module in network.modules())
    assert list(network.state_dict()) == names
    torch.testing.assert_close((network(image), network.last(image)), expected)


@DEVICES
def test_a_batch_norm_with_a_forward_of_its_own_is_refused(device, monkeypatch):
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"cannot replace NormWithReLU.*set model\.batch_norm to local"):
        use_sync_batch_norm(nn.Sequential(nn.Conv2d(3, 4, 3), NormWithReLU(4)), device)
