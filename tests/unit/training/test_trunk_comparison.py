"""The comparison of two trunks: what it refuses, and that it changes nothing."""

import re

import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.training.trunk_comparison import trunk_difference

IMAGE = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(
    memory_format=torch.channels_last
)


@pytest.fixture
def network():
    torch.manual_seed(0)
    small = {"layers": (1, 1, 1, 1), "widths": (16, 16, 24, 32), "embedding_size": 16, "image_size": 32}
    return build_backbone("iresnet", **small, dropout=0.2).to(memory_format=torch.channels_last)


class Changed(torch.autograd.Function):
    """Multiplies the features of the last image, or their gradient, by a factor."""

    @staticmethod
    def forward(ctx, feature, factor, gradient_factor):
        ctx.factor = gradient_factor
        changed = feature.clone()
        changed[-1] *= factor
        return changed

    @staticmethod
    def backward(ctx, grad):
        changed = grad.clone()
        changed[-1] *= ctx.factor
        return changed, None, None


@pytest.mark.parametrize(
    ("factors", "reason"),
    [
        ((1, 1), ""),
        ((1.5, 1), "the embedding differs from float32 by"),
        ((1, 2), "the gradient of .* differs from float32"),
        ((float("nan"), 1), "the embedding differs from float32 by nan"),
    ],
)
def test_a_trunk_that_errs_in_one_image_is_refused(network, factors, reason):
    found = trunk_difference(
        network, lambda image: Changed.apply(network.trunk(image), *factors), IMAGE, torch.bfloat16
    )
    assert re.fullmatch(reason + ".*" * bool(reason), found)


def test_errors_that_are_somewhat_larger_everywhere_are_refused(network):
    # As if the kernels rounded to 5 bits in place of 8: no tensor is far off.
    def trunk(image):
        with torch.no_grad():
            image = image * (1 + 0.02 * torch.sign(torch.sin(1e4 * image)))
        return network.trunk(image)

    assert "in the median" in trunk_difference(network, trunk, IMAGE, torch.bfloat16)


def test_the_comparison_leaves_buffers_gradients_and_random_numbers_as_they_were(network):
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    state = torch.get_rng_state()
    trunk_difference(network, network.trunk, IMAGE, torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(buffer, before[name]) for name, buffer in network.named_buffers())
    assert all(parameter.grad is None for parameter in network.parameters())
