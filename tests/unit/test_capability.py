"""Names of the arithmetic of a device."""

import pytest
import torch

from facetrain.device.capability import float32_name
from tests.support.fake_gpu import GPU, fake_gpu

IN_TF32 = "fp32 (convolutions in TF32)"


@pytest.fixture
def conv():
    """torch's setting, which is restored. Not by monkeypatch, which would delete it."""
    setting = torch.backends.cudnn.conv
    before = setting.fp32_precision
    yield setting
    setting.fp32_precision = before


@pytest.mark.parametrize(
    ("capability", "chosen", "name"),
    [((8, 0), None, IN_TF32), ((8, 0), "ieee", "fp32"), ((7, 0), None, "fp32")],
)
def test_float32_on_a_gpu_is_in_tf32_where_it_has_that_and_the_program_wants_it(
    capability, chosen, name, conv
):
    if chosen:
        conv.fp32_precision = chosen
    with fake_gpu(capability=capability):
        assert float32_name(GPU) == name
    assert float32_name(torch.device("cpu")) == "fp32"
