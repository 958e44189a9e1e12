import copy

import pytest
import torch
from torch import nn

from facetrain.backbone.prelu import PReLU


def gradients(module, x, grad, precision=None):
    """Return a module's output, and the gradients of its input and of its weight."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
        y = module(x)
    y.backward(grad)
    return y.detach(), x.grad, module.weight.grad


def pair(channels, dtype):
    ours = PReLU(channels).to(dtype)
    ours.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    plain = nn.PReLU(channels).to(dtype)
    plain.load_state_dict(copy.deepcopy(ours.state_dict()))
    return ours, plain


@pytest.mark.parametrize("shape", [(4, 5, 6, 7), (3, 5), (2, 1, 9)])
def test_output_and_gradients_equal_those_of_torchs_prelu(shape):
    ours, plain = pair(shape[1], torch.float64)
    x, grad = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    x.view(-1)[::3] = 0  # at 0 the slope is that of the negative side
    torch.testing.assert_close(gradients(ours, x, grad), gradients(plain, x, grad))


@pytest.mark.parametrize("channels", [8, 32, 48])  # 32 are a vector of AVX-512
def test_in_bfloat16_and_channels_last_it_keeps_the_layout_and_rounds_as_torch_does(channels):
    ours, plain = pair(channels, torch.float32)
    x = torch.randn(4, channels, 5, 6).bfloat16().contiguous(memory_format=torch.channels_last)
    grad = torch.randn_like(x)
    mine, torchs = gradients(ours, x, grad, torch.bfloat16), gradients(plain, x, grad, torch.bfloat16)
    assert mine[0].is_contiguous(memory_format=torch.channels_last)
    assert mine[1].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(mine[:2], torchs[:2], rtol=0, atol=0)
    torch.testing.assert_close(mine[2], torchs[2], rtol=2e-2, atol=2e-2)


def test_without_a_gradient_and_in_an_export_it_is_torchs_prelu():
    ours, plain = pair(5, torch.float32)
    x = torch.randn(2, 5, 3, 3)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), plain(x), rtol=0, atol=0)
    exported = torch.export.export(ours.eval(), (x,)).module()
    torch.testing.assert_close(exported(x), plain(x))
