import json

from facetrain.cli.bench_train import told
from tests.support.command import facetrain


def test_the_head_is_measured_beside_the_plain_way():
    done = facetrain(
        "bench", "head", "--identities", 3000, "--embedding-size", 32, "--batch-size", 16, "--steps", 2,
        "--way", "plain_fp32", "--way", "head_fp32", "--way", "head_sampled_1pct_disk", "--device", "cpu", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plain, ours, disk = json.loads(done.stdout)
    assert ours["times_faster_than_plain_fp32"] == round(plain["step_s"] / ours["step_s"], 2)
    assert disk["classes"] == 3000 and ours["peak_bytes"] > 50e6


def test_a_backbone_is_measured_from_the_plain_way_to_ours():
    done = facetrain(
        "bench", "backbone", "--backbone", "mbf", "--batch-size", 4, "--image-size", 48, "--steps", 1, "--rounds", 2,
        "--way", "plain", "--way", "ours", "--device", "cpu", "--threads", 1, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    plain, ours = report["ways"]["plain"], report["ways"]["ours"]
    assert plain["times_plain"] == 1 and len(plain["rounds"]) == 2
    assert ours["times_plain"] == ours["images_per_s"] / plain["images_per_s"]
    assert report["threads"] == 1 and ours["peak_gib"] > 0.1


def test_the_loader_is_measured_beside_the_bare_decoder():
    done = facetrain(
        "bench",
        "loader",
        "--workers",
        1,
        "--batch-size",
        16,
        "--seconds",
        0.2,
        "--rounds",
        1,
        "--device",
        "cpu",
    )
    assert done.returncode == 0, done.stderr
    assert "of the bare decoder" in done.stdout and "usual way" in done.stdout


def test_a_way_or_device_that_does_not_exist_is_a_usage_error():
    for arguments, said in (
        (("--way", "fast"), "there are plain_fp32"),
        (("--device", "tpu"), "auto, cpu and cuda"),
    ):
        done = facetrain("bench", "head", *arguments)
        assert done.returncode == 2 and said in done.stderr, done.stderr
    for arguments, said in ((("--way", "fast"), "there are plain"), (("--backbone", "r19"), "there are r18")):
        done = facetrain("bench", "backbone", *arguments)
        assert done.returncode == 2 and said in done.stderr, done.stderr


def test_whole_steps_are_measured_with_and_without_a_dataset():
    small = (
        "model.backbone=iresnet",
        "model.layers=[1,1,1,1]",
        "model.widths=[8,8,16,16]",
        "data.image_size=32",
    )
    sets = [word for value in (*small, "train.batch_size=8", "data.workers=1") for word in ("--set", value)]
    arguments = ("bench", "train", *sets, "--identities", 1000, "--steps", 2, "--rounds", 1)
    done = facetrain(*arguments, "--nproc-per-node", 2, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (
        report["ranks"] == 2
        and report["identities"] == 1000
        and set(report["inputs"]) == {"synthetic", "records"}
    )
    for found in report["inputs"].values():
        flops = found["images_per_s"] * sum(report["flops_per_image"].values())
        assert found["mfu"] == flops / report["matrix_flops"] < 1
        assert abs(sum(found["share_of_time"].values()) - 1) < 1e-6 and found["share_of_time"]["forward"] > 0
    assert report["flops_per_image"]["head"] == 6 * 1000 * 512
    assert "as fast as synthetic" in told(report) and "MFU" in told(report)
