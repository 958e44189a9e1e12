"""Training of a backbone on images of another size than the one that it is built for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from facetrain.backbone.base import resize_features
from facetrain.backbone.iresnet import IResNet
from facetrain.backbone.keypoint_vit import KeypointVisionTransformer
from facetrain.backbone.mobilefacenet import MobileFaceNet
from facetrain.backbone.timm_vit import TimmVisionTransformer
from facetrain.backbone.vit import VisionTransformer
from facetrain.backbone.zoo import build_backbone
from facetrain.errors import ModelError

BUILD = {
    "iresnet": lambda: IResNet((1, 1, 1, 1), (8, 8, 8, 16), embedding_size=12, image_size=112),
    "mbf": lambda: MobileFaceNet((1, 1, 1, 1), 1, embedding_size=12, image_size=112),
    "vit": lambda: VisionTransformer(16, 2, drop_path=0.0, patch=9, embedding_size=12, image_size=112),
    "kprpe": lambda: KeypointVisionTransformer(16, 2, drop_path=0.0, embedding_size=12, image_size=112),
    "timm": lambda: TimmVisionTransformer(64, 2, embedding_size=12, image_size=112),
    "timm_gap": lambda: TimmVisionTransformer(64, 2, class_token=False, embedding_size=12, image_size=112),
}
SIZES = {"iresnet": (56, 80), "mbf": (56, 80), "vit": (56, 84)}


def built(name):
    torch.manual_seed(0)
    net = BUILD[name]()
    if name == "kprpe":
        nn.init.normal_(net.keypoint_linear.weight, std=0.1)
    return net


def resized(x_BNC, side_from, side_to):
    x_BCHW = x_BNC.transpose(1, 2).reshape(len(x_BNC), -1, side_from, side_from)
    return F.interpolate(x_BCHW, (side_to, side_to), mode="bilinear").flatten(2).transpose(1, 2)


@pytest.mark.parametrize(("height", "width", "side"), [(4, 4, 7), (5, 5, 7), (12, 12, 9), (3, 5, 7)])
def test_features_are_interpolated_as_by_interpolate_with_the_same_gradient(height, width, side):
    x = torch.randn(2, 3, height, width, requires_grad=True)
    slope = torch.randn(2, 3, side, side)
    ours, theirs = resize_features(x, side), F.interpolate(x, (side, side), mode="bilinear")
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(y, x, slope)[0] for y in (ours, theirs)]
    torch.testing.assert_close(*gradients)


def test_features_of_the_right_size_are_returned_as_they_are_and_others_in_float32():
    x = torch.randn(2, 3, 7, 7, dtype=torch.bfloat16)
    assert resize_features(x, 7) is x
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            resize_features(x, 9), F.interpolate(x.float(), (9, 9), mode="bilinear"), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("name", BUILD)
def test_all_weights_learn_from_smaller_images_and_evaluation_stays_at_the_final_size(name):
    net = built(name)
    at_final_size = net(image := torch.randn(3, 3, 112, 112))
    for size in SIZES.get(name, (56, 80)):
        net.check_image_size(size)
        embedding = net(torch.randn(3, 3, size, size))
        assert embedding.shape == at_final_size.shape
        net.zero_grad()
        embedding.square().sum().backward()
        without = {n for n, p in net.named_parameters() if p.requires_grad and p.grad is None}
        assert without == set()
    torch.testing.assert_close(net(image), at_final_size, rtol=0, atol=0)
    net.eval()
    assert net(image).shape == at_final_size.shape
    if not name.startswith("timm"):  # a class token or an average has no size
        with pytest.raises(RuntimeError):
            net(torch.randn(3, 3, 56, 56))


def test_iresnet_interpolates_the_features_of_its_last_block():
    net, image = built("iresnet"), torch.randn(4, 3, 80, 80)
    x = net.stem(image)
    for block in net.blocks():
        x = block(x)
    assert x.shape[2:] == (5, 5)
    expected = net.neck(net.bn2(F.interpolate(x, (7, 7), mode="bilinear")).flatten(1))
    torch.testing.assert_close(net(image), expected)


def test_mobilefacenet_interpolates_the_input_of_its_global_convolution():
    net, image = built("mbf"), torch.randn(4, 3, 80, 80)
    x = image
    for layer in net.layers:
        x = layer(x)
    assert x.shape[2:] == (5, 5)
    expected = net.features(F.interpolate(net.conv_sep(x), (7, 7), mode="bilinear"))
    torch.testing.assert_close(net(image), expected)


def test_a_vit_interpolates_its_positions_and_its_last_tokens():
    net, image = built("vit"), torch.randn(4, 3, 84, 84)
    x = net.patch_embed(image) + resized(net.pos_embed, 12, 9)
    for block in net.blocks:
        x = block(x)
    expected = net.neck(resized(net.norm(x), 9, 12).flatten(1))
    torch.testing.assert_close(net(image), expected)


def test_a_vit_with_landmarks_measures_the_offsets_of_the_smaller_grid():
    net, image = built("kprpe"), torch.randn(4, 3, 80, 80)
    points = torch.rand(4, 5, 2)
    small = KeypointVisionTransformer(16, 2, drop_path=0.0, embedding_size=12, image_size=80)
    state = {name: value for name, value in net.state_dict().items() if not name.startswith("feature.0.")}
    state["pos_embed"] = resized(net.pos_embed.detach(), 14, 10)
    small.load_state_dict(state, strict=False)
    tokens = small.trunk(image, points).unflatten(1, (100, 16))
    torch.testing.assert_close(net.trunk(image, points), resized(tokens, 10, 14).flatten(1))


def test_a_timm_vit_keeps_the_position_of_the_class_token():
    net, image = built("timm"), torch.randn(4, 3, 56, 56)
    small = TimmVisionTransformer(64, 2, embedding_size=12, image_size=56)
    position = torch.cat([net.pos_embed[:, :1], resized(net.pos_embed[:, 1:], 14, 7)], 1)
    small.load_state_dict({**net.state_dict(), "pos_embed": position})
    torch.testing.assert_close(net(image), small(image))


@pytest.mark.parametrize(
    ("name", "size", "message", "suggested"),
    [
        ("iresnet", 60, r"16 × 16 pixels; use a multiple of 8 from 24 on, for example 64$", [24, 64]),
        ("mbf", 16, "use a multiple of 8 from 24 on, for example 24", [24]),
        ("vit", 80, "80 pixels do not fit patches of 9 .* at most 4 .* example 76 or 81", [76, 81]),
        ("vit", 16, "at least 2 × 2.* for example 22 or 27", [22, 27]),
        ("kprpe", 60, "patches of 8 pixels.* at most 0 .* use for example 56 or 64", [56, 64]),
        ("timm", 60, "use for example 56 or 64", [56, 64]),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_others_that_do(name, size, message, suggested):
    net = built(name)
    with pytest.raises(ModelError, match=message):
        net.check_image_size(size)
    for other in suggested:
        net.check_image_size(other)


def test_a_resnet_needs_larger_images():
    net = build_backbone("resnet18", embedding_size=8)
    with pytest.raises(ModelError, match="multiple of 16 from 48 on, for example 48"):
        net.check_image_size(40)
    assert net(torch.randn(2, 3, 48, 48)).shape == (2, 8)
