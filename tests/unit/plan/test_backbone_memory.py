import pytest
import torch
from torch import nn

from facetrain.backbone.settings import ModelSettings
from facetrain.backbone.zoo import build_backbone
from facetrain.own_parts import allow
from facetrain.plan import backbone_memory as counting
from facetrain.plan.backbone_memory import backbone_memory
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
    options = {"layers": (1, 2, 2, 1), "widths": (16, 16, 32, 32), "embedding_size": 16}
    model = ModelSettings(backbone="iresnet", checkpoint_activations=checkpointed, **options)
    memory = backbone_memory(model, 32, precision=precision, batch=8, gradients_held=False)
    options |= {"name": "iresnet", "image_size": 32}
    kept, peak = count_real_step(options, 8, precision, checkpoint_activations=checkpointed)
    assert memory.kept == pytest.approx(kept, rel=0.02)
    assert memory.peak == pytest.approx(peak, rel=0.05)


class ImageByImage(nn.Module):
    """Network whose steps depend on the batch."""

    def __init__(self, embedding_size, image_size):
        super().__init__()
        self.fc = nn.Linear(3 * image_size**2, embedding_size)

    def forward(self, image_BCHW):
        return torch.stack([self.fc(image.flatten()) for image in image_BCHW])


@pytest.mark.parametrize(
    "model",
    [
        # With two small images the peak is at the end, when all gradients exist; with many it is not.
        {"backbone": "iresnet", "layers": (1, 1, 1, 1), "widths": (256, 256, 256, 256), "embedding_size": 16},
        {"backbone": f"{__name__}:ImageByImage", "embedding_size": 4},
    ],
)
def test_the_counts_of_two_batches_give_the_bytes_of_any_other(monkeypatch, model):
    allow([model["backbone"]])

    def forecast(batch):
        return backbone_memory(
            ModelSettings(**model), 16, precision="bf16", batch=batch, gradients_held=False
        )

    for batch in (2, 5, 64):
        found = forecast(batch)
        with monkeypatch.context() as direct:
            direct.setattr(counting, "_COUNTED", (batch, batch))
            assert forecast(batch) == found


def test_deleted_tensors_and_views_are_not_counted():
    with LiveBytes() as live:
        kept = torch.ones(100)
        gone = torch.ones(1000)
        view = kept[:50]
        del gone
    assert (live.now, live.peak) == (400, 4400) and len(view) == 50
