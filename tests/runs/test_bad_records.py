"""Images that cannot be decoded, in a run of two ranks: only one of them meets each."""

import shutil

import pytest

from facetrain.config.loading import load_config
from facetrain.errors import ImageError
from facetrain.telemetry.jsonl import read_jsonl
from tests.support import training
from tests.support.command import facetrain
from tests.support.datasets import damage_records

BAD = (5, 6, 70)
TWO_RANKS = ("--nproc-per-node", 2)


@pytest.fixture
def damaged(dataset, describe, tmp_path):
    """A config of a dataset three of whose images are no images."""
    shutil.copytree(dataset / "data", tmp_path / "data")
    damage_records(tmp_path / "data" / "train.rec", BAD)
    config = describe(workers=1)
    config.write_text(config.read_text().replace(f"{dataset}/data", f"{tmp_path}/data"))
    return config


@pytest.mark.slow
def test_bad_images_are_skipped_counted_and_listed_and_no_rank_waits(damaged, tmp_path):
    process = facetrain("train", "--config", damaged, *TWO_RANKS, "--set", "data.bad_records=skip")
    assert process.returncode == 0, process.stderr
    listed = (tmp_path / "runs" / "tiny" / "skipped_images.txt").read_text().splitlines()
    assert len(listed) == 3
    for number in BAD:
        assert sum(f"key {number + 1} at byte" in line for line in listed) == 1
    last = [one for one in read_jsonl(tmp_path / "runs" / "tiny" / "metrics.jsonl") if "loss" in one][-1]
    assert last["step"] == 12 and last["skipped_images"] == 3
    assert "3 images could not be read and were replaced by others" in process.stdout


@pytest.mark.slow
def test_a_run_stops_on_all_ranks_where_more_are_skipped_than_allowed(damaged, tmp_path):
    allowed = ("--set", "data.bad_records=skip", "--set", "data.max_skipped=2", "--set", "data.workers=0")
    process = facetrain("train", "--config", damaged, *TWO_RANKS, *allowed)
    assert process.returncode == 1
    assert "images could not be read, more than data.max_skipped (2) allows" in process.stderr
    assert (tmp_path / "runs" / "tiny" / "skipped_images.txt").read_text().count("\n") == 3


@pytest.mark.parametrize(("image", "steps", "exit_code"), [(6, 0, 2), (7, 1, 1)])
def test_an_image_that_cannot_be_read_is_a_failure_once_the_run_has_trained(
    dataset, describe, tmp_path, image, steps, exit_code
):
    shutil.copytree(dataset / "data", tmp_path / "data")
    damage_records(tmp_path / "data" / "train.rec", (image,))
    config = load_config(describe(), [f"data.train={tmp_path}/data", "data.workers=0", "eval.targets=[]"])
    with pytest.raises(ImageError, match=f"key {image + 1} at byte") as ended:
        training.train(config, tmp_path / "run")
    assert ended.value.exit_code == exit_code
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == steps
