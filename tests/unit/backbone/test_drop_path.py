"""Stochastic depth: which branches a vision transformer drops depends on the sample alone."""

import pytest
import torch

from facetrain.backbone.keypoint_vit import KeypointVisionTransformer
from facetrain.backbone.vit import VisionTransformer, drop_path_scales
from facetrain.data.images.augment import Augment

OPTIONS = {"heads": 2, "mlp_ratio": 2, "drop_path": 0.5, "embedding_size": 12, "image_size": 32}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", [VisionTransformer, KeypointVisionTransformer])
def test_a_batch_and_its_parts_in_any_order_drop_the_same_branches(kind, recompute):
    net = kind(16, 4, patch=8, checkpoint_activations=recompute, **OPTIONS)
    image = torch.randn(12, 3, 32, 32)
    key = Augment(seed=3).network_keys(torch.arange(12), epoch=1)

    def gradients(*parts):
        net.zero_grad()
        features = torch.empty(12, 16 * 16)
        for part in parts:
            features[part] = feature = net.trunk(image[part], key_B=key[part])
            feature.square().sum().backward()
        return features, [p.grad.clone() for p in net.parameters() if p.grad is not None]

    order = torch.randperm(12)
    whole, parts = gradients(torch.arange(12)), gradients(order[:5], order[5:])
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)
    again = Augment(seed=3).network_keys(torch.arange(12), epoch=2)
    assert not torch.equal(net.trunk(image, key_B=again), whole[0]), "an epoch draws anew"
    assert torch.equal(net.eval().trunk(image, key_B=key), net.trunk(image)), "nothing is dropped"


def test_branches_are_dropped_with_a_probability_that_grows_to_the_last_block():
    key = Augment(seed=0).network_keys(torch.arange(20_000), epoch=0)
    scale = drop_path_scales(0.4, 3, key)
    assert scale.shape == (3, 2, 20_000)
    for block, probability in zip(scale, (0.0, 0.2, 0.4), strict=True):
        assert set(block.unique().tolist()) == ({0.0} if probability else set()) | {1 / (1 - probability)}
        assert ((block == 0).double().mean(1) - probability).abs().max() < 0.015
    dropped = (scale[1:] == 0).flatten(0, 1).double()
    assert (torch.corrcoef(dropped) - torch.eye(4)).abs().max() < 0.03, "each branch is drawn by itself"
