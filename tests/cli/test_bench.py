import json

import pytest
import torch

from facetrain.cli.bench.training import format_training
from tests.support.command import facetrain, refusal


def bench(*arguments):
    """Run `facetrain bench ARGUMENTS --json`; return its report."""
    done = facetrain("bench", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_head_is_measured_beside_plain_pytorch():
    plain, head, disk = bench(
        "head", "--identities", 3000, "--embedding-size", 32, "--batch-size", 16, "--steps", 2, "--device", "cpu",
        "--variant", "plain_fp32", "--variant", "head_fp32", "--variant", "head_sampled_1pct_disk",
    )  # fmt: skip
    assert head["times_faster_than_plain_fp32"] == round(plain["step_s"] / head["step_s"], 2)
    assert disk["classes"] == 3000 and head["peak_bytes"] > 50e6


@pytest.mark.slow
def test_a_backbone_is_measured_with_pytorchs_defaults_and_with_facetrains_settings():
    report = bench(
        "backbone", "--backbone", "mbf", "--batch-size", 4, "--image-size", 48, "--steps", 1, "--rounds", 2,
        "--variant", "plain", "--variant", "facetrain", "--device", "cpu", "--threads", 1,
    )  # fmt: skip
    plain, tuned = report["variants"]["plain"], report["variants"]["facetrain"]
    assert plain["times_plain"] == 1 and len(plain["rounds"]) == 2
    assert tuned["times_plain"] == tuned["images_per_s"] / plain["images_per_s"]
    assert report["threads"] == 1 and tuned["peak_gib"] > 0.1


@pytest.mark.slow
def test_the_loader_is_measured_beside_the_decoder_and_both_dataloaders():
    done = facetrain(
        "bench", "loader", "--workers", 1, "--batch-size", 16, "--seconds", 0.2, "--rounds", 1, "--device", "cpu",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "of the JPEG decoder alone" in done.stdout
    assert "DataLoader with OpenCV" in done.stdout and "DataLoader with PIL" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("head", "--variant", "fast"), "one of plain_fp32"),
        (("head", "--device", "tpu"), "auto, cpu, cuda"),
        (("backbone", "--variant", "fast"), "one of plain"),
        (("backbone", "--backbone", "r19"), "one of r18"),
        (("train", "--input", "disk"), "one of synthetic, records"),
    ],
)
def test_a_name_that_does_not_exist_is_a_usage_error(arguments, message):
    error = refusal("bench", *arguments)
    assert error.exit_code == 2 and message in str(error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("backbone", "--device", "cuda"), "--device cuda: this machine has no GPU; use --device cpu"),
        (("head", "--device", "cuda"), "--device cuda: this machine has no GPU; use --device cpu"),
        (("backbone", "--variant", "facetrain_replayed"), "--variant facetrain_replayed: needs a GPU"),
        (("backbone", "--variant", "facetrain_fused"), "--variant facetrain_fused: needs a GPU"),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = refusal("bench", *arguments)
    assert error.exit_code == 2 and message in str(error)


def test_fused_kernels_are_not_measured_with_a_network_that_has_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    error = refusal("bench", "backbone", "--backbone", "mbf", "--variant", "facetrain_fused")
    assert error.exit_code == 2 and "mbf has no fused kernels; use --backbone r18, " in str(error)


SMALL_HEAD = ("head", "--batch-size", 4, "--embedding-size", 8, "--steps", 1, "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (*SMALL_HEAD, "--identities", 10),
            "cannot hold a batch of 4; use --identities 40 or more, a smaller",
        ),
        (
            (*SMALL_HEAD, "--identities", "1e30"),
            "--identities 1e+30: use a whole number of at most 10,000,000,000",
        ),
        ((*SMALL_HEAD, "--identities", "inf"), "--identities inf: use a whole number of at most"),
        ((*SMALL_HEAD, "--identities", 40.5), "--identities 40.5: use a whole number"),
    ],
)
def test_a_number_that_cannot_be_measured_is_a_usage_error(arguments, message):
    error = refusal("bench", *arguments)
    assert error.exit_code == 2 and message in str(error) and "\n" not in str(error)


@pytest.mark.slow
def test_whole_steps_are_measured_with_and_without_a_dataset_and_beside_arcface_torch():
    small = (
        "model.backbone=iresnet",
        "model.layers=[1,1,1,1]",
        "model.widths=[8,8,16,16]",
        "data.image_size=32",
    )
    sets = [word for value in (*small, "train.batch_size=8", "data.workers=1") for word in ("--set", value)]
    report = bench(
        "train", *sets, "--identities", 1000, "--steps", 2, "--rounds", 1, "--baseline", "--nproc-per-node", 2
    )
    assert report["ranks"] == 2 and report["identities"] == 1000
    assert set(report["inputs"]) == set(report["times_arcface_torch"]) == {"synthetic", "records"}
    for found in report["inputs"].values():
        flops = found["images_per_s"] * sum(report["flops_per_image"].values())
        assert found["mfu"] == flops / report["matrix_flops"] < 1
        assert abs(sum(found["share_of_time"].values()) - 1) < 1e-6 and found["share_of_time"]["forward"] > 0
    speed = report["inputs"]["synthetic"]["images_per_s"]
    assert report["times_arcface_torch"]["synthetic"] == speed / report["arcface_torch"]["images_per_s"]
    assert report["flops_per_image"]["head"] == 6 * 1000 * 512
    text = format_training(report)
    assert "of the speed of synthetic images" in text and "x arcface_torch" in text and "MFU" in text
