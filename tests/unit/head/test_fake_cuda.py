"""Steps of the head on a fake CUDA device: no mixed devices, and no copy that blocks the host."""

import pytest
import torch

from facetrain.head import sharded_softmax as softmax
from tests.support.fake_cuda import GPU, Context, fake_cuda
from tests.support.heads import make_head, make_margin

OTHER_MARGINS = ("combined", "adaface", "magface", "curricularface", "elastic_cosface")
OPTIONS = {
    "softmax": {},
    "products in bfloat16": {"product_dtype": torch.bfloat16},
    "no momentum": {"momentum": 0.0},
    "adamw": {"optimizer": "adamw"},
    "16 and 8 bits": {"weight_dtype": torch.bfloat16, "momentum_dtype": torch.int8},
    "accumulated": {"update_in_backward": False},
    "sub-centers": {"sub_centers": 3, "drop_from_step": 1},
    "unified": {"loss": "unified", "update_in_backward": False},
}
CASES = [*((name, "arcface") for name in OPTIONS), *(("softmax", margin) for margin in OTHER_MARGINS)]


class Noise:
    """Replacement for the rounding noise, whose generator needs a real GPU."""

    def __init__(self, seed, device):
        self._device = device

    def like(self, x):
        assert x.device == self._device
        return torch.zeros(x.shape, dtype=torch.int32, device=x.device)


def step(head, number, patch):
    """Run one forward and backward pass, and the update."""
    context = Context()
    patch.setattr(
        softmax._CrossEntropy, "apply", lambda *arguments: softmax._CrossEntropy.forward(context, *arguments)
    )
    head.begin_step(number)
    loss = head(torch.empty(16, 32, device=GPU), torch.empty(16, dtype=torch.int64, device=GPU))
    gradient = softmax._CrossEntropy.backward(context, torch.empty((), device=GPU))[0]
    if not head.update_in_backward:
        head.step(torch.full((), 2.0, device=GPU), torch.full((), 0.0, device=GPU))
    return loss, gradient


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")  # only compared, in RowTable.store
@pytest.mark.parametrize(("name", "margin"), CASES)
def test_a_step_mixes_no_devices_and_never_blocks_the_host(name, margin, monkeypatch):
    monkeypatch.setattr("facetrain.head.row_optimizer.Noise", Noise)
    with fake_cuda(monkeypatch) as blocking:
        head = make_head(
            embedding_size=32, num_classes=500, margin=make_margin(margin), weight_decay=1e-4, device=GPU,
            chunk_size=128, **OPTIONS[name],
        )  # fmt: skip
        step(head, 0, monkeypatch)  # the first step moves running averages to the device
        blocking.clear()
        loss, gradient = step(head, 1, monkeypatch)
    assert loss.device == gradient.device == GPU
    assert not blocking
