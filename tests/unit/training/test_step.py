"""Operations of a training step."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from facetrain.backbone.zoo import build_backbone
from facetrain.training.step import _Statistics


class Operations(TorchDispatchMode):
    """Counts the operations that launch a kernel."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and "split" not in func.name()
        return func(*args, **(kwargs or {}))


def test_the_statistics_of_a_skipped_step_are_restored_by_a_few_kernels():
    with torch.device("meta"):
        network = build_backbone("r18", embedding_size=8)
        statistics, skipped = _Statistics(network), torch.ones(())
        assert len(statistics._tensors) > 40
        with Operations() as operations:
            statistics.keep()
            statistics.restore_where(skipped)
    assert operations.count <= 6
