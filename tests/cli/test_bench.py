import json

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
