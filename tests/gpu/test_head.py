"""Head on a GPU against the same head on the CPU in float64."""

import pytest
import torch

from facetrain.head.class_chunk import FusedChunk
from facetrain.head.margins import CombinedMargin
from tests.support import interpret_kernels
from tests.support.dense_head import MARGINS
from tests.support.heads import make_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CLASSES, SIZE, BATCH = 5003, 64, 96


def train(margin, device, dtype, **options):
    """Return losses, gradients of the embeddings and centers of three steps."""
    head = make_head(
        embedding_size=SIZE, num_classes=CLASSES, margin=CombinedMargin(**MARGINS[margin]), weight_decay=5e-4, seed=1,
        weight_dtype=dtype, momentum_dtype=dtype, chunk_size=1500, device=torch.device(device), **options,
    )  # fmt: skip
    head.lr = 0.1
    generator = torch.Generator().manual_seed(0)
    losses, gradients = [], []
    for step in range(3):
        embedding = torch.randn(BATCH, SIZE, dtype=torch.float64, generator=generator)
        embedding = embedding.to(device, dtype).requires_grad_()
        head.begin_step(step)
        loss = head(embedding, torch.randint(0, CLASSES, (BATCH,), generator=generator).to(device))
        loss.backward()
        losses.append(loss.item())
        gradients.append(embedding.grad.cpu().double())
    return head, losses, torch.stack(gradients), head.row_state()["weight"].cpu().double()


@pytest.mark.parametrize("placement", ["device", "host", "disk"])
@pytest.mark.parametrize("rate", [1.0, 0.2])
@pytest.mark.parametrize("margin", ["arcface", "combined", "filtered"])
def test_training_in_float32_equals_float64_on_the_cpu(margin, rate, placement, tmp_path):
    options = {"sample_rate": rate}
    _, losses, gradients, centers = train(margin, "cpu", torch.float64, **options)
    _, *found = train(margin, "cuda", torch.float32, **options, placement=placement, folder=tmp_path)
    assert found[0] == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(found[1], gradients, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found[2], centers, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("margin", ["arcface", "filtered"])
def test_bfloat16_products_use_the_kernels_and_stay_close_to_float64(margin):
    _, losses, gradients, _ = train(margin, "cpu", torch.float64)
    head, found, near, _ = train(margin, "cuda", torch.float32, product_dtype=torch.bfloat16)
    assert head.chunk_type is FusedChunk
    assert found == pytest.approx(losses, rel=2e-2)
    assert torch.nn.functional.cosine_similarity(near.flatten(1), gradients.flatten(1)).min() > 0.99


def test_the_kernels_equal_the_float64_reference():
    for rows, classes, size in ((37, 300, 24), (130, 1029, 512)):
        for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
            errors = interpret_kernels.kernel_errors(rows, classes, size, dtype, 16.0, 0.2)
            assert max(errors.values()) < limit, (rows, classes, size, dtype)
