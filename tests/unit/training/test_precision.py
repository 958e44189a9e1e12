"""Rounding of float32 convolutions on a GPU."""

import pytest
import torch

from facetrain.training.precision import tf32_convolutions


@pytest.mark.parametrize("allowed", [True, False])
def test_convolutions_use_tf32_only_if_the_config_allows_it(allowed):
    before = torch.backends.cudnn.allow_tf32
    with pytest.raises(KeyError), tf32_convolutions(allowed):
        assert torch.backends.cudnn.allow_tf32 == allowed
        raise KeyError
    assert torch.backends.cudnn.allow_tf32 == before
    assert not torch.backends.cuda.matmul.allow_tf32, "PyTorch's default: products of matrices are exact"
