"""Comparison of a run with the published training of its preset."""

import json
import math

import numpy as np
import pytest

from facetrain.config.loading import build_config, dump_config, load_config
from facetrain.run.folder.run_state import Start, train_recorded
from facetrain.run.report.page import write_run_report
from facetrain.run.report.published_curve import published_curve_of
from facetrain.run.request import dataset_overrides
from facetrain.run.summary import Ending, summarize
from facetrain.telemetry.jsonl import JsonLines
from tests.support.command import ROOT

TOTAL = 101_160
PAIRS = {"lfw": 6000.0, "cfp_fp": 7000.0, "agedb_30": 6000.0}


def run_folder(folder, preset="ms1mv3_r50", changes=(), records=(), with_data=False):
    config = load_config(preset, list(changes))
    opened = {"identities": config.data.num_classes, "images": config.data.num_images}
    if with_data:
        config = load_config(preset, [*changes, *dataset_overrides("data/mine")])
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "environment.json").write_text(json.dumps(opened))
    lines = JsonLines(folder / "metrics.jsonl")
    for record in records:
        lines.write(record["step"], {name: value for name, value in record.items() if name != "step"})
    lines.close()
    train_recorded(folder, Start(step=0, ranks=8, device="cpu"), TOTAL, lambda: 0)
    return folder


def records_of(curve, step, lower_by=0.0):
    for name, pairs in PAIRS.items():
        accuracy = float(np.interp(step, curve.steps, curve.accuracies[name]))
        yield {"step": step, f"{name}/accuracy": accuracy - lower_by, f"{name}/pairs": pairs}


@pytest.mark.parametrize("with_data", [False, True])
def test_the_curve_of_a_preset_has_the_published_accuracies(tmp_path, with_data):
    curve = published_curve_of(run_folder(tmp_path, with_data=with_data), TOTAL)
    assert curve.preset == "ms1mv3_r50"
    # arcface_torch's log of this training at steps 2,000, 10,000 and 100,000 of 101,160.
    for step, expected in (
        (2000, (98.23, 78.84, 88.08)),
        (10_000, (99.48, 92.46, 96.05)),
        (100_000, (99.83, 98.54, 98.17)),
    ):
        at = int(np.abs(curve.steps - step).argmin())
        assert curve.steps[at] == pytest.approx(step, abs=1)
        found = [100 * curve.accuracies[name][at] for name in PAIRS]
        assert found == pytest.approx(expected, abs=0.006)


def test_without_an_environment_the_numbers_of_the_config_are_compared(tmp_path):
    folder = run_folder(tmp_path)
    (folder / "environment.json").unlink()
    assert published_curve_of(folder, TOTAL).preset == "ms1mv3_r50"


def test_every_curve_belongs_to_a_preset_and_ends_with_its_published_result(tmp_path):
    table = (ROOT / "configs" / "published_curves.csv").read_text().splitlines()
    names = {line.split(",")[0] for line in table if not line.startswith(("#", "preset,"))}
    assert len(names) > 10
    for name in names:
        curve = published_curve_of(run_folder(tmp_path, name), TOTAL)
        assert curve.preset == name
        assert np.all(np.diff(curve.steps) > 0) and curve.steps[-1] <= TOTAL
        last = " / ".join(f"{100 * accuracies[-1]:.2f}" for accuracies in curve.accuracies.values())
        assert last in (ROOT / "configs" / f"{name}.yaml").read_text()


@pytest.mark.parametrize(
    "changes",
    [
        ["train.epochs=10"],
        ["train.max_steps=100"],
        ["train.stages=[{until_epoch: 5, sample_rate: 0.5}]"],
        ["data.num_classes=7"],
        ["data.num_images=70000"],
        ["model.backbone=r18"],
        ["head.margin.m2=0.4"],
        ["head.margin.m3=0.1"],
        ["head.margin.type=curricularface"],
        ["head.sample_rate=0.5"],
        ["optim.name=adamw"],
        ["optim.warmup_epochs=1"],
    ],
)
def test_a_run_with_another_recipe_is_not_compared(tmp_path, changes):
    assert published_curve_of(run_folder(tmp_path, changes=changes), TOTAL) is None
    assert published_curve_of(run_folder(tmp_path), None) is None, "before the number of steps is known"


def test_only_a_run_that_stays_clearly_below_is_called_so(tmp_path):
    curve = published_curve_of(run_folder(tmp_path), TOTAL)
    steps = (1000, 4000, 30_000, 60_000, 90_000)
    as_published = [record for step in steps for record in records_of(curve, step)]
    assert curve.below_since(as_published) == {}
    # 0.05 points are less than the deviation of a rate of 6,000 pairs.
    assert curve.below_since(record for step in steps for record in records_of(curve, step, 0.0005)) == {}
    below = [record for step in steps for record in records_of(curve, step, 0.03)]
    # At step 1,000 the published training was not verified yet, so the first verification is not compared.
    assert curve.below_since(below) == dict.fromkeys(PAIRS, 4000)
    assert curve.below_since([*below, *records_of(curve, 95_000)]) == {}, "it has caught up"
    assert curve.below_since([*as_published, *records_of(curve, 95_000, 0.03)]) == {}, "a single verification"


@pytest.mark.parametrize(("deviations", "since"), [(2.9, {}), (3.1, dict.fromkeys(PAIRS, 30_000))])
def test_below_is_by_three_deviations_of_the_difference_of_two_rates(tmp_path, deviations, since):
    curve = published_curve_of(run_folder(tmp_path), TOTAL)
    records = [record for step in (30_000, 60_000) for record in records_of(curve, step)]
    for record in records:
        (name,) = (name for name in PAIRS if f"{name}/pairs" in record)
        rate = record[f"{name}/accuracy"]
        record[f"{name}/accuracy"] -= deviations * math.sqrt(2 * rate * (1 - rate) / PAIRS[name])
    assert curve.below_since(records) == since
    unknown = [
        {"step": 40_000, "lfw/accuracy": "nan", "lfw/pairs": 6000.0},
        {"step": 40_000, "lfw/accuracy": 0.5},
    ]
    assert curve.below_since([*unknown, *records]) == since, (
        "neither a text nor a rate of no known pairs counts"
    )


def test_summary_and_report_name_the_step_since_which_a_run_is_below(tmp_path):
    curve = published_curve_of(run_folder(tmp_path), TOTAL)
    # Far below the end of the published training, and not below it at this step.
    records = [*records_of(curve, 4000)]
    records += [record for step in (30_000, 60_000) for record in records_of(curve, step, 0.03)]
    folder = run_folder(tmp_path, records=records)
    line = "lfw: below the published training of ms1mv3_r50 since step 30,000"
    text = summarize(folder, build_config({"data": {"train": "x"}}, "test"), Ending())
    assert f"  {line}\n" in text
    write_run_report(folder, folder / "report.html")
    page = (folder / "report.html").read_text()
    assert line in page and "Dashed: the published training of ms1mv3_r50" in page
