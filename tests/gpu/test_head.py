"""Head on a GPU against the same head on the CPU in float64."""

import pytest
import torch

from facetrain.head.class_chunk import FusedChunk
from tests.support import interpret_kernels
from tests.support.dense_head import MARGINS
from tests.support.heads import combined, make_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch warns once of set_sync_debug_mode
]
CLASSES, SIZE, BATCH = 5003, 64, 96


def train(margin, device, dtype, scale=None, **options):
    """Return the head, and losses, gradients of the embeddings and centers of three steps."""
    head = make_head(
        embedding_size=SIZE, num_classes=CLASSES, margin=combined(**MARGINS[margin]), weight_decay=5e-4, seed=1,
        weight_dtype=dtype, momentum_dtype=dtype, chunk_size=1500,
        device=torch.device(device), **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    losses, gradients = [], []
    for step in range(3):
        embedding = torch.randn(BATCH, SIZE, dtype=torch.float64, generator=generator)
        embedding = embedding.to(device, torch.promote_types(dtype, torch.float32)).requires_grad_()
        head.begin_step(step, lr=0.1, loss_scale=scale)
        loss = head(embedding, torch.randint(0, CLASSES, (BATCH,), generator=generator).to(device))
        (loss if scale is None else loss * scale).backward()
        losses.append(loss.item())
        gradients.append((embedding.grad if scale is None else embedding.grad / scale).cpu().double())
    return head, losses, torch.stack(gradients), head.row_state()["weight"].cpu().double()


@pytest.mark.parametrize("placement", ["device", "host", "disk"])
@pytest.mark.parametrize("rate", [1.0, 0.2])
@pytest.mark.parametrize("margin", ["arcface", "combined", "filtered"])
def test_training_in_float32_equals_float64_on_the_cpu(margin, rate, placement, tmp_path, monkeypatch):
    monkeypatch.setattr("facetrain.head.settings.CLASSES_PER_READ", 1)
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
        for dtype, limit in ((torch.float32, 5e-5), (torch.bfloat16, 2e-2)):
            errors = interpret_kernels.kernel_errors(rows, classes, size, dtype, 16.0, 0.2)
            assert all(error < limit for error in errors.values()), (rows, classes, size, dtype, errors)


def test_the_update_of_the_centers_equals_sgd_in_float64_and_rounds_like_the_torch_operations():
    for case, options in interpret_kernels.UPDATES.items():
        found = interpret_kernels.update_errors(**options)
        assert not found.pop("is_changed_if_skipped") and not found.pop("changes_others"), case
        for name, error in found.items():
            # Sums in another order cross a bound of the rounding now and then.
            assert error["error"] < (0.3 if "int8" in case else 0.05 if "bfloat16" in case else 1e-6), (
                case,
                name,
            )
            assert "float32" in case or error["different"] < 0.02, (case, name, error)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_storage_in_16_bits_is_updated_in_one_pass_and_stays_close_to_float64(precision):
    _, losses, gradients, _ = train("arcface", "cpu", torch.float64)
    scale = torch.tensor(65536.0, device="cuda") if precision == "fp16" else None
    head, found, near, _ = train("arcface", "cuda", torch.bfloat16, product_dtype=torch.bfloat16, scale=scale)
    assert head._optimizer.one_pass
    assert found == pytest.approx(losses, rel=3e-2)
    assert torch.nn.functional.cosine_similarity(near.flatten(1), gradients.flatten(1)).min() > 0.98


@pytest.mark.parametrize("rate", [1.0, 0.2])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_the_host_waits_for_the_gpu_in_no_step(rate, weight_dtype):
    head = make_head(
        embedding_size=SIZE, num_classes=CLASSES, margin=combined(scale=64.0, m2=0.5), weight_dtype=weight_dtype,
        product_dtype=torch.bfloat16, sample_rate=rate, chunk_size=1500, device=torch.device("cuda"),
    )  # fmt: skip
    for step in range(3):
        label = torch.randint(0, CLASSES, (BATCH,))
        embedding, on_device = torch.randn(BATCH, SIZE, device="cuda", requires_grad=True), label.cuda()
        if step == 2:  # the first steps compile kernels and move running averages
            torch.cuda.set_sync_debug_mode("error")
        try:
            head.begin_step(step, lr=0.1)
            head.expect_labels(label)
            head(embedding, on_device).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
