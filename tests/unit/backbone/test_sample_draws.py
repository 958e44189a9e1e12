"""Dropout and stochastic depth: what a network drops depends on the sample alone."""

from functools import partial

import pytest
import torch

from facetrain.backbone.keypoint_vit import BUCKETS, KeypointBlock, KeypointVisionTransformer
from facetrain.backbone.sample_draws import drop_path_scales, dropout
from facetrain.backbone.vit import Block, VisionTransformer
from facetrain.backbone.zoo import build_backbone
from facetrain.data.images.augment import Augment

KEY = Augment(seed=0).network_keys(torch.arange(20_000), epoch=0)
SIZES = {"embedding_size": 12, "image_size": 32}
NETWORKS = {
    "iresnet": partial(build_backbone, "iresnet", layers=(1, 1, 1, 1), widths=(8, 8, 8, 8)),
    "resnet18": partial(build_backbone, "resnet18"),
    "timm": partial(build_backbone, "timm/vit_tiny_patch16_224"),
    "vit": partial(VisionTransformer, 64, 3, drop_path=0.3),
    "kprpe": partial(KeypointVisionTransformer, 64, 3, drop_path=0.3),
}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_batch_and_its_parts_in_any_order_drop_the_same(name, recompute):
    net = NETWORKS[name](**SIZES, dropout=0.3, checkpoint_activations=recompute)
    # Statistics of a batch would differ from those of its parts.
    for norm in net.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.eval()
    image = torch.randn(6, 3, 32, 32)
    key = KEY[:6]
    assert net.draws_by_sample

    def gradients(*parts):
        net.zero_grad()
        features = []
        for part in parts:
            feature = net.trunk(image[part], key_B=key[part])
            feature.square().sum().backward()
            features.append(feature)
        rows = torch.cat(features)[torch.cat(parts).argsort()]
        return rows, [p.grad.clone() for p in net.parameters() if p.grad is not None]

    order = torch.randperm(6)
    whole, parts = gradients(torch.arange(6)), gradients(order[:2], order[2:])
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)
    again = Augment(seed=0).network_keys(torch.arange(6), epoch=1)
    assert not torch.allclose(net.trunk(image, key_B=again), whole[0]), "an epoch draws anew"
    assert torch.equal(net.eval().trunk(image, key_B=key), net.trunk(image)), "nothing is dropped"


def test_dropout_is_unbiased_and_independent_among_samples_and_features():
    kept = dropout(torch.ones(4000, 3, 100, dtype=torch.float64), 0.3, KEY[:4000])
    assert kept.unique().tolist() == [0.0, pytest.approx(1 / 0.7, rel=1e-4)]
    assert kept.mean().item() == pytest.approx(1, abs=0.003)
    dropped = (kept == 0).double().flatten(1)
    for rows in (dropped.T, dropped[:250, :]):
        bound = 5.5 / rows.shape[1] ** 0.5
        assert (torch.corrcoef(rows) - torch.eye(len(rows))).abs().max() < bound
        assert (rows.mean(1) - 0.3).abs().max() < bound


@pytest.mark.parametrize("probability", [1e-9, 1 - 1e-9])
def test_extreme_probabilities_drop_nothing_or_keep_almost_nothing(probability):
    x = dropout(torch.ones(100, 7), probability, KEY[:100])
    assert x.isfinite().all() and (x == 1).all() == (probability < 0.5)


def test_branches_are_dropped_with_a_probability_that_grows_to_the_last_block():
    scale = drop_path_scales(0.4, 3, KEY)
    assert scale.shape == (3, 2, 20_000)
    for block, probability in zip(scale, (0.0, 0.2, 0.4), strict=True):
        assert set(block.unique().tolist()) == ({0.0} if probability else set()) | {1 / (1 - probability)}
        assert ((block == 0).double().mean(1) - probability).abs().max() < 0.015
    dropped = (scale[1:] == 0).flatten(0, 1).double()
    assert (torch.corrcoef(dropped) - torch.eye(4)).abs().max() < 0.03, "each branch is drawn by itself"


@pytest.mark.parametrize("block", [Block, KeypointBlock])
def test_each_branch_of_a_block_has_its_own_factor(block):
    net, x = block(8, heads=2, mlp_ratio=2), torch.randn(3, 4, 8)
    of_landmarks = torch.randn(3, 4, 11), torch.randn(2, BUCKETS, 11), torch.randint(BUCKETS, (4, 4))
    more = of_landmarks if block is KeypointBlock else ()
    branches = net.attn(net.norm1(x), *more), net.mlp(net.norm2(x))
    for branch, scale in zip(branches, torch.eye(2), strict=True):
        torch.testing.assert_close(net(x, scale[:, None].expand(2, 3), *more), x + branch)
