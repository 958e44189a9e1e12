import pytest
import torch

from facetrain.backbone.settings import ModelSettings
from facetrain.backbone.zoo import build_backbone
from facetrain.plan.backbone_cost import measure_backbone
from facetrain.plan.memory_traffic import MemoryTraffic
from facetrain.torch_private import FakeTensorMode, LiveBytes


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
    options = {"layers": (1, 2, 2, 1), "widths": (16, 16, 32, 32), "embedding_size": 16}
    model = ModelSettings(backbone="iresnet", checkpoint_activations=checkpointed, **options)
    cost = measure_backbone(model, 32, precision=precision, batch=8, gradients_held=False).step
    options |= {"name": "iresnet", "image_size": 32}
    for batch in (8, 12):  # 12 is between the two that were counted
        kept, peak = count_real_step(options, batch, precision, checkpoint_activations=checkpointed)
        assert cost.kept(batch) == pytest.approx(kept, rel=0.02)
        assert cost.peak(batch) == pytest.approx(peak, rel=0.05)


def test_operations_and_parameters_are_those_of_the_published_network():
    cost = measure_backbone(ModelSettings(), 112, precision="bf16", batch=2)
    assert cost.parameters == 43_590_848 - 512  # the last batch norm's scale is fixed
    assert cost.step.flops_per_image == pytest.approx(3 * 2 * 6.31e9, rel=0.02)  # 6.3 G multiply-adds


def test_deleted_tensors_and_views_are_not_counted():
    with LiveBytes() as live:
        kept = torch.ones(100)
        gone = torch.ones(1000)
        view = kept[:50]
        del gone
    assert (live.now, live.peak) == (400, 4400) and len(view) == 50


def test_only_kernels_move_bytes():
    with FakeTensorMode():
        x = torch.zeros(8, 3, 4, 4)
        weight = torch.zeros(3)
        with MemoryTraffic() as traffic:
            # Fake tensors dispatch `prim.device` for each of these, which is no operation on real tensors.
            assert x.device == weight.device
            x.new_empty(1000).expand(5, 1000)[:2].detach()
            assert traffic.bytes == traffic.operand_bytes == traffic.launches == 0
            x + x.new_empty(1).expand(x.shape)
    assert traffic.operand_bytes == traffic.bytes == 4 * (2 * x.numel() + 1) and traffic.launches == 1


def test_arguments_that_two_kernels_read_are_counted_twice():
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    with MemoryTraffic() as traffic:
        torch.nn.functional.batch_norm(x, None, None, training=True)
    assert traffic.bytes - traffic.operand_bytes == 4 * x.numel()
    fixed, weight = torch.randn(2, 3, 4, 4), torch.randn(5, 3, 1, 1, requires_grad=True)
    for image, times in (
        (x, 2),
        (fixed, 1),
    ):  # without a gradient of the image, one kernel reads y's gradient
        y = torch.nn.functional.conv2d(image, weight)
        with MemoryTraffic() as traffic:
            y.backward(torch.ones_like(y))
        assert traffic.bytes - traffic.operand_bytes == (times - 1) * 4 * y.numel()


# Counted by hand from the shapes of the layers; docs/log/log.md has the table by operation.
@pytest.mark.parametrize(("name", "moved"), [("r50", 288e6), ("r100", 455e6)])
def test_an_image_moves_the_bytes_that_were_counted_by_hand(name, moved):
    cost = measure_backbone(ModelSettings(backbone=name), 112, precision="bf16", batch=4)
    assert cost.step.moved.per_image == pytest.approx(moved, rel=0.01)
