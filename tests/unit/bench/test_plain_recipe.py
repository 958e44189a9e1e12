"""What we compare ourselves with must compute what it is said to."""

import pytest
import torch

from benchmarks import train
from benchmarks.plain_recipe import PlainRecipe
from facetrain.backbone.zoo import build_backbone
from tests.support.heads import make_head, make_margin

CPU = torch.device("cpu")


def small():
    torch.manual_seed(0)
    return build_backbone(
        "iresnet", layers=(1, 1, 1, 1), widths=(8, 8, 16, 16), embedding_size=16, image_size=32
    )


def test_the_plain_recipe_has_the_loss_of_our_head_and_learns():
    recipe = PlainRecipe(small(), 50, "fp32", CPU)
    head = make_head(
        embedding_size=16,
        num_classes=50,
        margin=make_margin("arcface", scale=64, m2=0.5, gradient="straight_through", beyond_pi="none"),
    )
    image, label = torch.randn(6, 3, 32, 32), torch.arange(6)
    # Near their own: the recipe's loss of an image ends at 69, where it takes the logarithm of 1e-30.
    recipe.centers.data[label] = 0.03 * torch.randn(6, 16) + 0.01 * small()(image).detach()
    head.weight.data.copy_(recipe.centers.data)
    for group in recipe.optimizer.param_groups:
        group["lr"] = 0.01
    expected = head(small()(image), label).item()
    losses = [recipe.step(image, label) for _ in range(4)]
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]


def test_both_are_measured_in_one_run(capsys):
    small = (
        "--backbones mbf --batch-sizes 4 --identities 600 --image-size 32 --steps 1 --rounds 1 --device cpu"
    )
    train.main(small.split())
    told = capsys.readouterr().out
    assert '"ours_times_plain"' in told and '"records_of_synthetic"' in told
