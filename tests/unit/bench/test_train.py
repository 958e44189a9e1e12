from itertools import islice
from types import SimpleNamespace

import torch

from facetrain.bench.train import open_inputs, repeated_batch
from tests.support.world import ONE_RANK


class ReadAhead(list):
    """Batches, of which a loader would have read three while something else was measured."""

    steps_ahead = 3


def test_the_batches_that_were_read_ahead_are_in_no_measurement():
    open_records = open_inputs(None, 9, ReadAhead(range(20)))["records"]
    assert [list(islice(open_records(), 2)) for _ in range(3)] == [[3, 4], [8, 9], [13, 14]]


def test_a_repeated_batch_has_its_labels_on_the_host_as_one_of_a_loader_has():
    data, optim = SimpleNamespace(image_size=8), SimpleNamespace(accumulate=2)
    run = SimpleNamespace(config=SimpleNamespace(data=data, optim=optim), local_batch_size=4, world=ONE_RANK)
    for batch in [micro for step in islice(repeated_batch(run, 9), 2) for micro in step]:
        assert batch.host_label_B.device.type == "cpu"
        assert torch.equal(batch.host_label_B, batch.label_B.cpu())
