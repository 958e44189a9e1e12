"""The baseline of `benchmarks.arcface_torch` computes what arcface_torch computes, in the same dtypes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.arcface_torch import ArcfaceTorchStep
from facetrain.backbone.zoo import build_backbone
from tests.support.heads import make_head, margin_settings

CPU = torch.device("cpu")
CLASSES, BATCH = 50, 6


def small_backbone():
    torch.manual_seed(0)
    return build_backbone(
        "iresnet", layers=(1, 1, 1, 1), widths=(8, 8, 16, 16), embedding_size=16, image_size=32
    )


class MatrixProducts(TorchDispatchMode):
    """Records shape and dtype of the result of every matrix product."""

    def __init__(self):
        super().__init__()
        self.results = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.results.append((tuple(result.shape), result.dtype))
        return result


def test_the_step_has_the_loss_of_the_head_and_learns():
    step = ArcfaceTorchStep(small_backbone(), CLASSES, "fp32", CPU)
    head = make_head(
        embedding_size=16,
        num_classes=CLASSES,
        margin=margin_settings("arcface", scale=64, m2=0.5, gradient="straight_through"),
    )
    image, label = torch.randn(BATCH, 3, 32, 32), torch.arange(BATCH)
    # Centers close to the embeddings: the loss of an image cannot exceed 69, as the log of 1e-30 is taken at most.
    step.centers.data[label] = 0.03 * torch.randn(BATCH, 16) + 0.01 * small_backbone()(image).detach()
    head.weight.data.copy_(step.centers.data)
    for group in step.optimizer.param_groups:
        group["lr"] = 0.01
    head.begin_step(0, lr=0.0)
    expected = head(small_backbone()(image), label).item()
    losses = [step(image, label) for _ in range(4)]
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_products_with_the_class_centers_are_in_float32(precision):
    step = ArcfaceTorchStep(small_backbone(), CLASSES, precision, CPU)
    with MatrixProducts() as products:
        step(torch.randn(BATCH, 3, 32, 32), torch.arange(BATCH))
    # Logits; gradient of the embeddings; gradient of the centers.
    for shape in ((BATCH, CLASSES), (BATCH, 16), (CLASSES, 16)):
        found = {result[1] for result in products.results if result[0] in (shape, shape[::-1])}
        assert found == {torch.float32}, shape
