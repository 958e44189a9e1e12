import json
import re

import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.bench import train as bench_train
from facetrain.bench.train import measure_steps
from facetrain.bench.workloads import RunWorkload
from facetrain.cli.bench import print_report
from facetrain.config.loading import build_config
from facetrain.embeddings.inference import Inference
from facetrain.models.model_file import describe_backbone, save_model
from facetrain.run.parts.teacher_embeddings import write_teacher_embeddings
from tests.support.command import facetrain, output_of
from tests.support.datasets import write_records

SMALLEST = {"layers": [1] * 4, "widths": [8, 8, 16, 16], "embedding_size": 32}


def small_config(data="x", **sections):
    values = {
        "data": {"train": str(data), "image_size": 32, "workers": 0},
        "model": {"backbone": "iresnet", **SMALLEST},
        "train": {"device": "cpu", "precision": "fp32", "batch_size": 4} | sections.pop("train", {}),
        "eval": {"targets": []},
    }
    return build_config(values | sections, "test")


def bench(*arguments):
    """Run `facetrain bench ARGUMENTS --json`; return its report."""
    return json.loads(output_of("bench", *arguments, "--json"))


@pytest.mark.slow
def test_the_loader_is_measured_beside_the_decoder():
    small = ["--workers", 1, "--batch-size", 16, "--seconds", 0.2, "--rounds", 1, "--device", "cpu"]
    printed = output_of("bench", "loader", *small)
    assert re.search("^images per s  +decoder [0-9,.]+  loader [0-9,.]+  loader augmented ", printed, re.M)
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
    sizes = ("--identities", 1000, "--steps", 2, "--rounds", 1, "--nproc-per-node", 2)
    done = facetrain("bench", "train", *sets, *sizes, "--json")
    report = json.loads(done.stdout)
    for name, found in report["inputs"].items():
        assert f"{name}: {found['images_per_s']:.1f} images/s\n" in done.stderr, "at once"
    assert report["ranks"] == 2 and report["identities"] == 1000
    assert set(report["inputs"]) == {"synthetic", "records"}
    for found in report["inputs"].values():
        flops = found["images_per_s"] * sum(report["flops_per_image"].values())
        assert found["mfu"] == flops / report["matrix_flops_per_s"] < 1
        assert abs(sum(found["share_of_time"].values()) - 1) < 1e-6 and found["share_of_time"]["forward"] > 0
    assert report["flops_per_image"]["head"] == 6 * 1000 * 512
    assert report["limit_images_per_s"] > 0
    print_report(report, as_json=False)
    text = capsys.readouterr().out
    assert "\nrecords over synthetic  " in text and "share of time" in text and "  forward 0." in text


@pytest.mark.parametrize(
    ("asked", "in_config", "in_dataset", "measured"),
    [
        (None, None, 512, 10_000),
        (None, 50_000, 512, 50_000),
        (300, 50_000, 200, 300),
        (300, None, 512, 512),
        (None, 300, 512, 512),
    ],
)
def test_the_head_has_the_classes_that_are_asked_for_or_those_of_the_config(
    asked, in_config, in_dataset, measured
):
    config = build_config({"data": {"train": "x", "num_classes": in_config}}, "test")
    assert RunWorkload(identities=asked).num_classes(config, in_dataset) == measured


def test_the_steps_of_a_deterministic_run_are_measured_as_such(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    seen = []

    def measured(*_):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return 1.0

    monkeypatch.setattr(bench_train, "_images_per_second", measured)
    measure_steps(small_config(train={"deterministic": True}), 10, None)
    measure_steps(small_config(), 10, None)
    assert seen == [True, False]


def test_a_teacher_with_a_cache_is_measured_with_the_images_of_the_config(tmp_path):
    data, teacher, cache = tmp_path / "data", tmp_path / "teacher.safetensors", tmp_path / "cache.safetensors"
    write_records(data, [n // 4 for n in range(16)], size=32)
    options = {"name": "iresnet", "image_size": 32, **SMALLEST}
    save_model(teacher, build_backbone(**options).state_dict(), describe_backbone(**options))
    write_teacher_embeddings(teacher, data, cache, Inference("cpu"))
    distill = {"teacher": str(teacher), "cache": str(cache)}
    steps = []
    speed, *_ = measure_steps(
        small_config(data, distill=distill), 4, None, lambda *progress: steps.append(progress)
    )
    assert speed > 0 and steps == [(n, 8) for n in range(8)]


@pytest.mark.parametrize(
    ("max_steps", "seconds"), [(None, 80 / 10 + 80 / 20 + 80 / 10 + 80 / 40), (15, 80 / 10 + 20 / 20)]
)
def test_the_speed_of_a_run_in_stages_is_the_mean_over_its_images(monkeypatch, max_steps, seconds):
    speeds, seen, steps = iter((10.0, 20.0, 40.0)), [], []

    def measured(device, number, images_per_step, take_steps):
        take_steps(number)
        seen.append(images_per_step)
        return next(speeds)

    monkeypatch.setattr(bench_train, "_images_per_second", measured)
    large = {"batch_size": 8, "sample_rate": 0.5}
    stages = [
        {"until_epoch": 1, **large},
        {"until_epoch": 2, "sample_rate": 0.1},
        {"until_epoch": 3, **large},
    ]
    config = small_config(train={"epochs": 4, "stages": stages, "max_steps": max_steps})
    speed, *_ = measure_steps(config, 50, 80, lambda *progress: steps.append(progress))
    images = 320 if max_steps is None else 100
    assert speed == pytest.approx(images / seconds)
    assert seen == ([8, 4, 4] if max_steps is None else [8, 4]), "equal stages are measured once"
    assert [done for done, _ in steps] == list(range(5 * len(seen))) and steps[-1][1] == 8 * len(seen)
