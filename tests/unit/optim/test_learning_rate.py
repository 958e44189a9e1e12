import json

import pytest
import torch

from facetrain.backbone.zoo import build_backbone, names
from facetrain.optim.optimizer import parameter_groups, polynomial_lr
from tests.support.shared import shared_path


def test_the_rate_warms_up_from_the_first_step_and_ends_at_zero():
    rates = [polynomial_lr(t, base=0.4, warmup_steps=4, total_steps=12, power=2) for t in range(13)]
    assert rates[:5] == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4])
    assert rates[8] == pytest.approx(0.4 * 0.5**2)
    assert rates[12] == 0
    assert all(a > b for a, b in zip(rates[4:], rates[5:], strict=False))


def test_a_schedule_of_nothing_but_warm_up_does_not_divide_by_zero():
    assert polynomial_lr(5, base=1.0, warmup_steps=5, total_steps=5, power=1) == 0


def test_the_rate_equals_the_peers_from_its_second_step_on():
    for case in json.loads(shared_path("golden/lr_schedule.json").read_text()):
        first = 1 if case["warmup_steps"] else 0
        for step, expected in list(enumerate(case["lr_used_at_step"]))[first:]:
            ours = polynomial_lr(
                step,
                base=case["base_lr"],
                warmup_steps=case["warmup_steps"],
                total_steps=case["total_steps"],
                power=1,
            )
            assert ours == pytest.approx(expected, rel=1e-9), f"step {step} of {case['total_steps']}"


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("r18", [["conv1.weight", "bn1.bias", "prelu.weight"], *[[f"layer{s}.{n}.conv1.weight"] for s in range(1, 5)
         for n in range(2)], ["bn2.weight", "fc.weight", "features.bias"]]),
        ("vit_t", [["pos_embed", "patch_embed.proj.weight"], *[[f"blocks.{n}.attn.qkv.weight", f"blocks.{n}.norm1.bias"]
         for n in range(12)], ["norm.weight", "feature.0.weight", "feature.3.bias"]]),
        ("mbf_small", [*[[f"layers.{n}."] for n in range(8)], ["conv_sep.", "features.layers.3.bias"]]),
        ("resnet18", [["stem.0.weight", "stem.1.bias"], *[[f"stages.{s}.{n}."] for s in range(4) for n in range(2)],
         ["fc.weight", "features.bias"]]),
    ],
)  # fmt: skip
def test_layer_decay_gives_each_layer_the_power_of_the_layers_behind_it(name, layers):
    with torch.device("meta"):
        network = build_backbone(name)
    groups = parameter_groups(network, {}, layer_decay=0.75, layer_prefixes=network.layer_prefixes())
    factors = {id(parameter): group["lr_factor"] for group in groups for parameter in group["params"]}
    found = {key: factors[id(p)] for key, p in network.named_parameters() if p.requires_grad}
    assert len(groups) == len(layers)
    for behind, starts in enumerate(reversed(layers)):
        for start in starts:
            matching = [factor for key, factor in found.items() if key.startswith(start)]
            assert matching and set(matching) == {0.75**behind}, start


@pytest.mark.parametrize("name", [name for name in names() if name not in ("iresnet", "r2060")])
def test_the_layers_of_every_backbone_have_trained_parameters_and_leave_some_for_the_last(name):
    with torch.device("meta"):
        network = build_backbone(name)
    layers = network.layer_prefixes()
    trained = [key for key, value in network.named_parameters() if value.requires_grad]
    assert all(any(key.startswith(layer) for key in trained) for layer in layers)
    assert not all(key.startswith(tuple(prefix for layer in layers for prefix in layer)) for key in trained)
    assert len({prefix for layer in layers for prefix in layer}) == sum(map(len, layers))


def test_layer_decay_multiplies_the_factors_of_prefixes_and_1_keeps_one_group():
    with torch.device("meta"):
        network = build_backbone("r18")
    options = {"layer_prefixes": network.layer_prefixes()}
    groups = parameter_groups(network, {"layer4.1.": 0.1}, layer_decay=0.5, **options)
    assert {group["lr_factor"] for group in groups} == {0.1 * 0.5, 1.0, *(0.5**n for n in range(2, 10))}
    (group,) = parameter_groups(network, {}, **options)
    assert group["lr_factor"] == 1.0
