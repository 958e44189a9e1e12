"""Networks of face.evoLVe, InsightFace_Pytorch, TFace, CVLface and MagFace: converted weights compute the same."""

import pytest
import torch
from torch import nn

from facetrain.backbone.iresnet import IResNet
from facetrain.errors import ModelError
from facetrain.models.published_weights import convert_published

SIZE, LAYERS, WIDTHS = 32, (2, 1, 1, 1), (16, 32, 48, 64)


class Squeeze(nn.Module):
    """SEModule of these programs."""

    def __init__(self, channels):
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, channels // 16, 1, bias=False)
        self.relu = nn.ReLU()
        self.fc2 = nn.Conv2d(channels // 16, channels, 1, bias=False)
        self.sigmoid = nn.Sigmoid()

    def forward(self, x):
        return x * self.sigmoid(self.fc2(self.relu(self.fc1(self.avg_pool(x)))))


class Unit(nn.Module):
    """Block of these programs, with its parameter names."""

    def __init__(self, inner, channels, stride, *, norm_between, squeeze):
        super().__init__()
        self.shortcut_layer = (
            nn.MaxPool2d(1, stride)
            if inner == channels
            else nn.Sequential(nn.Conv2d(inner, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
        )
        self.res_layer = nn.Sequential(
            nn.BatchNorm2d(inner),
            nn.Conv2d(inner, channels, 3, 1, 1, bias=False),
            *([nn.BatchNorm2d(channels)] if norm_between else []),
            nn.PReLU(channels),
            nn.Conv2d(channels, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        if squeeze:
            self.res_layer.add_module("se_block" if norm_between else "5", Squeeze(channels))

    def forward(self, x):
        return self.res_layer(x) + self.shortcut_layer(x)


class Published(nn.Module):
    """Network of these programs, with its parameter names."""

    def __init__(self, **variant):
        super().__init__()
        self.input_layer = nn.Sequential(
            nn.Conv2d(3, WIDTHS[0], 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTHS[0]), nn.PReLU(WIDTHS[0])
        )
        units, inner = [], WIDTHS[0]
        for depth, channels in zip(LAYERS, WIDTHS, strict=True):
            for number in range(depth):
                units.append(Unit(inner, channels, 2 if number == 0 else 1, **variant))
                inner = channels
        self.body = nn.Sequential(*units)
        features = inner * (SIZE // 16) ** 2
        self.output_layer = nn.Sequential(
            nn.BatchNorm2d(inner), nn.Dropout(), nn.Flatten(), nn.Linear(features, 8), nn.BatchNorm1d(8)
        )

    def forward(self, image):
        return self.output_layer(self.body(self.input_layer(image)))


@pytest.mark.parametrize("channels", ["RGB", "BGR"])
@pytest.mark.parametrize("norm_between", [True, False])
@pytest.mark.parametrize("squeeze", [True, False])
def test_converted_weights_give_the_embeddings_of_the_published_network(
    tmp_path, norm_between, squeeze, channels
):
    torch.manual_seed(0)
    variant = {"norm_between": norm_between, "squeeze": squeeze}
    published = Published(**variant).eval()
    for value in published.state_dict().values():
        if value.is_floating_point():
            value.add_(0.1 * torch.rand_like(value))
    # Programs with the same names trained on different orders, as face.evoLVe (RGB) and InsightFace_Pytorch (BGR).
    with pytest.raises(ModelError, match="InsightFace_Pytorch: BGR; face.evoLVe: RGB"):
        convert_published(published.state_dict(), tmp_path / "m.pth")
    (tmp_path / "m.yaml").write_text(f"color_space: {channels}")
    converted = convert_published(published.state_dict(), tmp_path / "m.pth")
    network = IResNet(
        LAYERS, WIDTHS, subsample_shortcut=True, embedding_size=8, image_size=SIZE, **variant
    ).eval()
    network.load_state_dict(converted.weights)
    rgb = torch.randn(2, 3, SIZE, SIZE)
    taken = rgb.flip(1) if channels == "BGR" else rgb
    with torch.no_grad():
        torch.testing.assert_close(network(rgb), published(taken), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prefix", ["features.", "features.module."])
def test_converted_weights_of_magface_give_its_embeddings(tmp_path, prefix):
    torch.manual_seed(0)
    options = {"embedding_size": 8, "image_size": SIZE}
    published = IResNet(LAYERS, WIDTHS, **options).eval()
    for module in published.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.eps = 2e-5
    published.features.running_var.fill_(1e-3)  # so small that the epsilon counts
    state = {f"{prefix}{name}": value for name, value in published.state_dict().items()}
    converted = convert_published(state | {"fc.weight": torch.ones(8, 5)}, tmp_path / "m.pth")
    assert converted.takes_fractions
    network = IResNet(LAYERS, WIDTHS, **options).eval()
    network.load_state_dict(converted.weights)
    rgb = torch.rand(2, 3, SIZE, SIZE)
    with torch.no_grad():
        torch.testing.assert_close(network(rgb), published(rgb.flip(1)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head", [{}, {"fc.weight": torch.ones(5, 8)}])
def test_an_own_network_with_a_part_named_as_in_magface_is_not_taken_for_it(tmp_path, head):
    own = IResNet(LAYERS, WIDTHS, embedding_size=8, image_size=SIZE).state_dict()
    state = {f"features.{name}": value for name, value in own.items()} | head
    with pytest.raises(ModelError, match="does not state whether its network takes RGB or BGR"):
        convert_published(state, tmp_path / "m.ckpt")
    (tmp_path / "m.yaml").write_text("color_space: RGB")
    converted = convert_published(state, tmp_path / "m.ckpt")
    assert (converted.program, converted.takes_fractions) == ("IResNet, trained on RGB", False)
    assert all(torch.equal(converted.weights[name], value) for name, value in own.items())
