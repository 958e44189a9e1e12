from itertools import count

import torch

from facetrain.bench.loader import images_per_second


def test_a_measurement_has_at_least_as_many_batches_as_are_read_ahead_and_none_of_these():
    batches, used = count(), []
    assert images_per_second(batches, used.append, 4, 8, 0.0, torch.device("cpu")) > 0
    assert used == list(range(8))
