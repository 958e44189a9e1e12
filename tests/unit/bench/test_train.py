from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from facetrain.bench.machine_peak import MachinePeak
from facetrain.bench.train import _report, build_run, open_inputs, repeated_batch
from tests.support.world import ONE_RANK
from tests.unit.plan.helpers import small_config


class ReadAhead(list):
    """Batches, of which a loader would have read three while something else was measured."""

    steps_ahead = 3


def test_the_batches_that_were_read_ahead_are_in_no_measurement():
    open_records = open_inputs(None, 9, ReadAhead(range(20)))["records"]
    assert [list(islice(open_records(), 2)) for _ in range(3)] == [[3, 4], [8, 9], [13, 14]]


def test_a_repeated_batch_has_its_labels_on_the_host_as_one_of_a_loader_has():
    data, optim = SimpleNamespace(image_size=8), SimpleNamespace(accumulate=2)
    schedule = SimpleNamespace(local_batch_size=4)
    run = SimpleNamespace(config=SimpleNamespace(data=data, optim=optim), schedule=schedule, world=ONE_RANK)
    for batch in [micro for step in islice(repeated_batch(run, 9), 2) for micro in step]:
        assert batch.host_label_B.device.type == "cpu"
        assert torch.equal(batch.host_label_B, batch.label_B.cpu())


@pytest.mark.parametrize(
    ("sections", "classes"),
    [
        ({}, 40),
        ({"head": {"sample_rate": 0.1}}, 4),
        # Of 4 images that are drawn from all classes.
        ({"head": {"sample_rate": 0}}, 40 * (1 - (1 - 1 / 40) ** 4)),
        ({"head": {"expectations": "moving"}}, None),
        ({"distill": {"teacher": "x"}}, None),
    ],
)
def test_the_share_of_the_peak_is_stated_only_where_all_products_of_a_step_are_counted(
    tmp_path, sections, classes
):
    run = build_run(small_config(head=sections.get("head", {})), ONE_RANK, 40, tmp_path, None)
    run = replace(run, config=small_config(**sections))
    profile = SimpleNamespace(device="cpu", shares=dict)
    names = ("synthetic", "records")
    rates, profiles = {name: [2.0] for name in names}, dict.fromkeys(names, profile)
    report = _report(run, 40, MachinePeak(1e9, 1e9), rates, profiles)
    stated = [report.get("limit_images_per_s"), *(found.get("mfu") for found in report["inputs"].values())]
    assert all(each is None for each in stated) if classes is None else all(stated)
    if classes:
        size = run.config.model.embedding_size
        assert report["flops_per_image"]["head"] == round(6 * size * classes)
    assert report["peak_gib"] > 0
    # With another program in the process, the peak is not that of the run.
    both = _report(run, 40, MachinePeak(1e9, 1e9), rates | {"other": [1.0]}, profiles)
    assert both["others"]["other"]["rounds"] == [1.0] and "peak_gib" not in both
