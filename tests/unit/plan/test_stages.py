"""Forecast of the memory of runs in stages."""

import pytest
import torch

from facetrain.distributed.world import World
from facetrain.head.build import build_head
from facetrain.plan.forecast import forecast
from facetrain.run.parts.head import head_run
from facetrain.run.parts.step_schedule import schedule_steps
from facetrain.training.teacher_cache import new_cache
from tests.unit.plan.helpers import small_config

CLASSES = 1001


@pytest.mark.parametrize(("of_section", "of_stage"), [("off", "moving"), ("fixed", "off"), ("off", "off")])
def test_every_stage_has_the_table_of_expectations_that_the_head_allocates(of_section, of_stage):
    stages = [{"until_epoch": 1, "batch_size": 16, "expectations": of_stage}]
    described = small_config(
        head={"expectations": of_section}, train={"batch_size": 4, "epochs": 4, "stages": stages}
    )
    world = World(0, 0, 1, 1, torch.device("cpu"))
    head = build_head(
        described.head,
        described.optim,
        head_run(described, world, schedule_steps(described, 1000, 1)),
        world,
        embedding_size=8,
        num_classes=CLASSES,
    )
    tables = head.row_state()
    allocated = sum(tables[name].nbytes for name in tables.keys() & {"weight", "expectation"})
    needed = forecast(described, CLASSES, 1)
    assert (needed.parts["centers"], needed.batch) == (allocated, 16)


def test_the_centers_of_a_teacher_have_no_expectations(tmp_path):
    with new_cache(tmp_path / "c.safetensors", (3, 1, 8), dataset="", teacher=""):
        pass
    distill = {"teacher": "t", "cache": str(tmp_path / "c.safetensors"), "loss": "fixed_centers"}
    found = [
        forecast(small_config(head={"expectations": "moving"}, distill=teacher), CLASSES, 1).parts["centers"]
        for teacher in (None, distill)
    ]
    assert found == [2 * CLASSES * 8 * 4, 3 * CLASSES * 8 * 4]
