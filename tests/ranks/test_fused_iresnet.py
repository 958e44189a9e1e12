"""The fused trunk with synchronized batch norms, on two processes under Triton's interpreter."""

import numpy as np
import pytest
import torch
from torch import nn

from facetrain.backbone.iresnet import IResNet
from facetrain.distributed import collectives
from facetrain.distributed.sync_batch_norm import StatisticsAcrossRanks, use_sync_batch_norm
from tests.support.ranks import run_ranks

LOCAL_BATCH, SIDE = 3, 16


def make_network() -> IResNet:
    torch.manual_seed(3)
    net = IResNet((1, 1, 1, 1), (16, 16, 16, 16), embedding_size=8, image_size=SIDE)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
    return net.to(memory_format=torch.channels_last)


def images(world_size):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(LOCAL_BATCH * world_size, 3, SIDE, SIDE, generator=generator)


def step(net, trunk, image):
    feature = trunk(image.contiguous(memory_format=torch.channels_last))
    # The same numbers for an image, whichever rank has it.
    target = image.flatten(1)[:, : feature.shape[1]]
    (feature * target).sum().backward()
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    buffers = {name: b for name, b in net.named_buffers() if "features" not in name}
    return {"feature": feature.detach(), "gradients": gradients, "buffers": buffers}


def one_rank():
    from facetrain.backbone.fused_iresnet import FusedTrunk

    rank = collectives.rank()
    net = use_sync_batch_norm(make_network(), torch.device("cpu"))
    image = images(collectives.world_size())[rank * LOCAL_BATCH : (rank + 1) * LOCAL_BATCH]
    found = step(net, FusedTrunk(net, StatisticsAcrossRanks()), image)
    found["gradients"] = {name: collectives.sum_(gradient) for name, gradient in found["gradients"].items()}
    return found


@pytest.mark.slow
def test_synchronized_statistics_make_two_ranks_equal_one_process_with_the_global_batch(monkeypatch):
    triton = pytest.importorskip("triton", reason="Triton is not installed: its kernels are not used either")
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 does not run on NumPy 2.4")
    net = make_network().double()
    true = step(net, net.trunk, images(2).double())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    results = run_ranks(2, one_rank, fresh=True)
    feature = torch.cat([result["feature"] for result in results])
    torch.testing.assert_close(feature.double(), true["feature"], rtol=1e-4, atol=1e-4)
    for result in results:
        for name, gradient in true["gradients"].items():
            error = (result["gradients"][name].double() - gradient).norm()
            assert error <= 1e-4 * gradient.norm() + 1e-4, name
        for name, buffer in true["buffers"].items():
            torch.testing.assert_close(
                result["buffers"][name].double(), buffer.double(), rtol=1e-5, atol=1e-5
            )
