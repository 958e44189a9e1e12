"""Forecast of runs with code of one's own that needs the values of its tensors, which a forecast does not have."""

import pytest
import torch
from torch import nn

from facetrain.errors import ConfigError
from facetrain.own_parts import allow
from facetrain.plan.forecast import forecast
from tests.unit.plan.helpers import small_config


class Network(nn.Module):
    """Network that reads values in its forward pass, or in that of verification."""

    def __init__(self, embedding_size, image_size, where):
        super().__init__()
        self.conv = nn.Conv2d(3, embedding_size, 3)
        self.where = where

    def forward(self, image_BCHW):
        if self.where == "numpy":
            image_BCHW = torch.from_numpy(image_BCHW.numpy())
        if self.where == "item" or (self.where == "verification" and not self.training):
            image_BCHW = image_BCHW / max(float(image_BCHW.max()), 1)
        return self.conv(image_BCHW).mean((2, 3))


def margin(cos_G):
    return cos_G - (0.3 if float(cos_G.detach().max()) < 2 else 0.4)


def network(where):
    place = f"{__name__}:Network"
    return {"model": {"backbone": place, "embedding_size": 4, "options": {"where": where}}}


@pytest.mark.parametrize(
    "sections",
    [
        network("item"),
        network("numpy"),
        network("verification") | {"eval": {"targets": ["lfw"]}},
        {"head": {"margin": {"type": f"{__name__}:margin"}}},
    ],
)
def test_own_code_that_reads_values_is_refused_with_its_line_and_what_to_do(sections):
    allow([f"{__name__}:Network", f"{__name__}:margin"])
    with pytest.raises(ConfigError) as refused:
        forecast(small_config(**sections), 100, 1)
    message = str(refused.value)
    assert message.startswith(f"{__file__}:") and "without --memory" in message and "\n" not in message
