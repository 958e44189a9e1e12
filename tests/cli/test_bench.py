import json

import pytest
import torch

from facetrain.cli.bench.options import print_report
from tests.support.command import output_of, refusal


def bench(*arguments):
    """Run `facetrain bench ARGUMENTS --json`; return its report."""
    return json.loads(output_of("bench", *arguments, "--json"))


@pytest.mark.slow
def test_the_head_is_measured_in_its_variants():
    variants = bench(
        "head", "--identities", 3000, "--embedding-size", 32, "--batch-size", 16, "--steps", 2, "--device", "cpu",
        "--variant", "head_bf16", "--variant", "head_fp32", "--variant", "head_sampled_1pct_disk",
    )  # fmt: skip
    baseline, head = variants["head_fp32"], variants["head_bf16"]
    assert head["times_head_fp32"] == round(baseline["step_s"] / head["step_s"], 2)
    assert len(variants) == 3 and head["peak_bytes"] > 50e6


@pytest.mark.slow
def test_a_backbone_is_measured_with_pytorchs_defaults_and_with_facetrains_settings():
    report = bench(
        "backbone", "--backbone", "mbf", "--batch-size", 4, "--image-size", 48, "--steps", 1, "--rounds", 2,
        "--variant", "plain", "--variant", "facetrain", "--device", "cpu",
    )  # fmt: skip
    plain, tuned = report["variants"]["plain"], report["variants"]["facetrain"]
    assert plain["times_plain"] == 1 and len(plain["rounds"]) == 2
    assert tuned["times_plain"] == tuned["images_per_s"] / plain["images_per_s"]
    assert report["threads"] >= 1 and tuned["peak_gib"] > 0.1


@pytest.mark.slow
def test_the_loader_is_measured_beside_the_decoder():
    small = ["--workers", 1, "--batch-size", 16, "--seconds", 0.2, "--rounds", 1, "--device", "cpu"]
    printed = output_of("bench", "loader", *small)
    assert "augmented per decoder  " in printed


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("head --variant fast", "one of head_fp32"),
        ("head --device tpu", "auto, cpu, cuda"),
        ("backbone --variant fast", "one of plain"),
        ("backbone --backbone r19", "one of r18"),
        ("backbone --device cuda", "--device cuda: this machine has no GPU; use --device cpu"),
        ("head --device cuda", "--device cuda: this machine has no GPU; use --device cpu"),
        ("backbone --variant facetrain_replayed", "--variant facetrain_replayed: needs a GPU"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error_of_one_line(line, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = refusal("bench", *line.split())
    assert error.exit_code == 2 and message in str(error) and "\n" not in str(error)


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
    assert report["limits_images_per_s"].keys() == {"products", "copies"}
    print_report(report, as_json=False)
    text = capsys.readouterr().out
    assert "\nrecords over synthetic  " in text and "share of time" in text and "  forward 0." in text
