import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from facetrain.backbone.own_network import OwnNetwork
from facetrain.backbone.zoo import build_backbone
from facetrain.errors import ConfigError
from facetrain.optim.build import build_optimizers
from facetrain.optim.muon import Muon, hidden_weights, orthogonalize, split_groups
from facetrain.optim.settings import OptimSettings

LR, MOMENTUM, DECAY = 0.03, 0.9, 0.2


def muon_of(weights):
    optimizer = Muon([{"params": weights}], momentum=MOMENTUM, weight_decay=DECAY)
    optimizer.param_groups[0]["lr"] = LR
    return optimizer


def take_step(optimizer, weights, gradients, *, scale=1.0, skip=0.0):
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = None if gradient is None else gradient * scale
    optimizer.step(torch.tensor(scale), torch.tensor(skip))


def plain_steps(weight, gradients):
    """Muon by its formulas, for one matrix in float64."""
    weight, buffer = weight.detach().double(), torch.zeros_like(weight).double()
    for gradient in gradients:
        buffer = MOMENTUM * buffer + (1 - MOMENTUM) * gradient.double()
        x = MOMENTUM * buffer + (1 - MOMENTUM) * gradient.double()
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        weight = (1 - LR * DECAY) * weight - LR * max(1, weight.shape[0] / weight.shape[1]) ** 0.5 * x
    return weight


def test_steps_are_those_of_the_formulas_for_matrices_and_convolutions_of_any_layout():
    torch.manual_seed(0)
    shapes = [(6, 4), (4, 9), (6, 4), (5, 2, 3, 3), (16, 4, 3, 3), (8, 8, 1, 1)]
    weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    weights[4].data = weights[4].data.contiguous(memory_format=torch.channels_last)
    gradients = [[torch.randn(shape) for shape in shapes] for _ in range(4)]
    expected = [
        plain_steps(weight.flatten(1), [step[n].flatten(1) for step in gradients])
        for n, weight in enumerate(weights)
    ]
    optimizer = muon_of(weights)
    for n, step in enumerate(gradients):
        take_step(optimizer, weights, step, scale=2.0**n)
    for weight, matrix in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach().flatten(1), matrix.float(), rtol=1e-5, atol=1e-5)
    assert weights[4].is_contiguous(memory_format=torch.channels_last)


def test_steps_are_those_of_torch_up_to_its_rounding_to_bfloat16():
    torch.manual_seed(0)
    ours, theirs = nn.Parameter(torch.randn(12, 20)), nn.Parameter(torch.empty(12, 20))
    theirs.data.copy_(ours.data)
    start = ours.detach().clone()
    optimizer = muon_of([ours])
    reference = torch.optim.Muon([theirs], lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for _ in range(3):
        gradient = torch.randn(12, 20)
        theirs.grad = gradient.clone()
        take_step(optimizer, [ours], [gradient])
        reference.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-3), (torch.bfloat16, 0.04)])
def test_orthogonalized_matrices_keep_the_singular_vectors_and_have_singular_values_near_1(dtype, error):
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(2, side, 5)).Q for side in (7, 30))
    values = torch.tensor([[9.0, 3.0, 1.0, 0.3, 0.1], [5e4, 4e4, 3e4, 2e4, 1e3]])
    for matrices in (left @ values.diag_embed() @ right.mT, right @ values.diag_embed() @ left.mT):
        found = orthogonalize(matrices.to(dtype))
        assert found.dtype == torch.float32
        inner = (left.mT @ found @ right) if found.shape[1] == 7 else (right.mT @ found @ left)
        diagonal = inner.diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(inner, diagonal.diag_embed(), rtol=0, atol=error)
        assert diagonal.min() > 0.65 and diagonal.max() < 1.25
    assert orthogonalize(torch.zeros(1, 3, 4)).abs().max() == 0


def test_a_skipped_step_and_a_weight_without_gradient_change_nothing():
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, 3)) for _ in range(2)]
    optimizer = muon_of(weights)
    take_step(optimizer, weights, [torch.randn(4, 3), torch.randn(4, 3)])
    before = [weight.detach().clone() for weight in weights]
    buffers = [optimizer.state[weight]["momentum_buffer"].clone() for weight in weights]
    take_step(optimizer, weights, [torch.full((4, 3), float("nan")), None], skip=1.0)
    take_step(optimizer, weights, [None, None])
    for weight, old, buffer in zip(weights, before, buffers, strict=True):
        assert torch.equal(weight, old)
        assert torch.equal(optimizer.state[weight]["momentum_buffer"], buffer)
    take_step(optimizer, weights, [torch.randn(4, 3), None])
    assert not torch.equal(weights[0], before[0]) and torch.equal(weights[1], before[1])


@pytest.mark.parametrize(
    ("name", "hidden", "others"),
    [
        (
            "r18",
            {"conv1.weight", "layer1.0.conv1.weight", "layer2.0.downsample.0.weight"},
            {"fc.weight", "bn1.weight"},
        ),
        ("mbf", {"layers.0.layers.0.weight"}, {"features.layers.0.layers.0.weight"}),
        (
            "vit_t",
            {"blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight"},
            {"pos_embed", "blocks.0.norm1.weight", "feature.0.weight"},
        ),
        ("vit_s_kprpe", {"keypoint_linear.weight"}, {"keypoint_linear.bias", "feature.0.weight"}),
    ],
)
def test_the_hidden_weights_are_those_of_layers_before_the_last_whose_channels_all_mix(name, hidden, others):
    backbone = build_backbone(name, image_size=112, embedding_size=32)
    chosen = hidden_weights(backbone, backbone.last_layers())
    names = {name for name, parameter in backbone.named_parameters() if parameter in chosen}
    assert hidden <= names
    assert others <= {name for name, _ in backbone.named_parameters()} - names
    for layer in backbone.modules():
        if isinstance(layer, nn.Conv2d) and layer.groups > 1:
            assert layer.weight not in chosen


def test_the_last_layer_of_an_own_network_is_found_in_an_only_child_and_before_layers_without_parameters():
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 4), nn.Identity())
    for network in (layers, nn.Sequential(nn.Identity(), nn.Sequential(layers))):
        backbone = OwnNetwork(network, embedding_size=4, image_size=3)
        assert hidden_weights(backbone, backbone.last_layers()) == {layers[0].weight}


def test_a_batch_norm_at_the_end_of_an_own_network_is_not_its_last_layer():
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 4), nn.BatchNorm1d(4)]
    backbone = OwnNetwork(nn.Sequential(*layers), embedding_size=4, image_size=3)
    assert hidden_weights(backbone, backbone.last_layers()) == {layers[0].weight}


def test_the_search_for_hidden_weights_changes_no_buffer_of_a_parametrization():
    network = nn.Sequential(spectral_norm(nn.Linear(4, 3)), nn.Linear(3, 3), nn.Linear(3, 2))
    before = [buffer.clone() for buffer in network.buffers()]
    assert hidden_weights(network, ("2.",)) == {network[1].weight}
    assert before and all(map(torch.equal, before, network.buffers()))


def test_muon_and_the_other_optimizer_share_all_parameters_and_the_schedule():
    first, second, norm = (nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (4, 3), (3,)))
    groups = [
        {"params": [first, norm], "lr_factor": 1.0},
        {"params": [second], "lr_factor": 0.5},
    ]
    optim = OptimSettings(lr=0.1, weight_decay=0.4, muon={"lr": 0.02, "weight_decay": 0.2})
    muon, sgd = build_optimizers(optim, groups, {first, second})
    assert [(group["params"], group["lr_factor"]) for group in muon.param_groups] == [
        ([first], pytest.approx(0.2)),
        ([second], pytest.approx(0.1)),
    ]
    assert [(group["params"], group["lr_factor"]) for group in sgd.param_groups] == [([norm], 1.0)]
    muon.param_groups[0]["lr"] = sgd.param_groups[0]["lr"] = 0.5
    for optimizer, weight, decayed in ((muon, first, 0.9), (sgd, norm, 0.8)):
        take_step(optimizer, [weight], [torch.zeros_like(weight)])
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, decayed))
    assert len(build_optimizers(OptimSettings(), groups, {first})) == 1
    with pytest.raises(ConfigError, match=r"optim\.muon"):
        build_optimizers(optim, groups, set())
    assert split_groups(groups, {first, second, norm})[1] == []
