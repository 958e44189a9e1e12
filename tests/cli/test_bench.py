import json

import pytest

from facetrain.bench.train import _with_small_rate
from facetrain.cli.bench import print_report
from facetrain.config.loading import build_config
from tests.support.command import output_of


def bench(*arguments):
    """Run `facetrain bench ARGUMENTS --json`; return its report."""
    return json.loads(output_of("bench", *arguments, "--json"))


@pytest.mark.slow
def test_the_loader_is_measured_beside_the_decoder():
    small = ["--workers", 1, "--batch-size", 16, "--seconds", 0.2, "--rounds", 1, "--device", "cpu"]
    printed = output_of("bench", "loader", *small)
    assert "augmented per decoder  " in printed


@pytest.mark.slow
def test_whole_steps_are_measured_with_and_without_a_dataset(capsys):
    small = (
        "model.backbone=iresnet",
        "model.layers=[1,1,1,1]",
        "model.widths=[8,8,16,16]",
        "data.image_size=32",
    )
    sets = [word for value in (*small, "train.batch_size=8", "data.workers=1") for word in ("--set", value)]
    report = bench("train", *sets, "--identities", 1000, "--steps", 2, "--rounds", 1, "--nproc-per-node", 2)
    assert report["ranks"] == 2 and report["identities"] == 1000
    assert set(report["inputs"]) == {"synthetic", "records"}
    for found in report["inputs"].values():
        flops = found["images_per_s"] * sum(report["flops_per_image"].values())
        assert found["mfu"] == flops / report["matrix_flops"] < 1
        assert abs(sum(found["share_of_time"].values()) - 1) < 1e-6 and found["share_of_time"]["forward"] > 0
    assert report["flops_per_image"]["head"] == 6 * 1000 * 512
    assert report["limit_images_per_s"] > 0
    print_report(report, as_json=False)
    text = capsys.readouterr().out
    assert "\nrecords over synthetic  " in text and "share of time" in text and "  forward 0." in text


def test_a_benchmark_of_a_run_in_stages_measures_the_config_without_them():
    stages = [{"until_epoch": 1, "global_batch_size": 32, "sample_rate": 0.01}]
    values = {"data": {"train": "x"}, "train": {"global_batch_size": 16, "stages": stages}}
    measured = _with_small_rate(build_config(values, "test"))
    assert measured.train.stages == () and measured.head.sample_rate == 1
    assert measured.train.global_batch_size == 16
