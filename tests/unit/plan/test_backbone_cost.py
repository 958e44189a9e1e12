import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.plan.backbone_cost import measure_backbone
from facetrain.torch_private import LiveBytes


def count_real_step(options, batch, precision, **how):
    """Train one step on real tensors; return (bytes kept by the forward pass, peak)."""
    net = build_backbone(**options, **how)
    image = torch.randn(batch, 3, options["image_size"], options["image_size"])
    with LiveBytes() as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            feature = net.trunk(image)
        embedding = net.neck(feature.float())
        kept = live.now
        embedding.backward(torch.ones_like(embedding))
    return kept, live.peak


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_backbones_bytes_are_forecast_without_its_memory(precision, checkpointed):
    options = {
        "name": "iresnet", "layers": (1, 2, 2, 1), "widths": (16, 16, 32, 32),
        "image_size": 32, "embedding_size": 16,
    }  # fmt: skip
    cost = measure_backbone(
        options, precision=precision, batch=8, checkpoint_activations=checkpointed, gradients_held=False
    )
    for batch in (8, 12):  # 12 is between the two that were counted
        kept, peak = count_real_step(options, batch, precision, checkpoint_activations=checkpointed)
        assert cost.kept(batch) == pytest.approx(kept, rel=0.02)
        assert cost.peak(batch) == pytest.approx(peak, rel=0.05)


def test_operations_and_parameters_are_those_of_the_published_network():
    cost = measure_backbone({"name": "r50"}, precision="bf16", batch=2)
    assert cost.parameters == 43_590_848 - 512  # the last batch norm's scale is fixed
    assert cost.flops_per_image == pytest.approx(3 * 2 * 6.31e9, rel=0.02)  # 6.3 G multiply-adds


def test_checkpointing_keeps_fewer_activations():
    plain, checkpointed = (
        measure_backbone({"name": "r50"}, precision="bf16", batch=8, checkpoint_activations=how)
        for how in (False, True)
    )
    assert checkpointed.kept(64) < 0.4 * plain.kept(64)
    assert checkpointed.peak(64) < 0.6 * plain.peak(64)


def test_deleted_tensors_and_views_are_not_counted():
    with LiveBytes() as live:
        kept = torch.ones(100)
        gone = torch.ones(1000)
        view = kept[:50]
        del gone
    assert (live.now, live.peak) == (400, 4400) and len(view) == 50
