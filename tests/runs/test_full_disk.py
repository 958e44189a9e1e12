"""A run on a disk that is too small for its second checkpoint."""

import pytest

from facetrain.checkpoint.load import Checkpoint
from tests.support.command import facetrain
from tests.support.faults import small_disk
from tests.support.runs import losses, metrics


@pytest.mark.slow
def test_training_goes_on_when_the_disk_is_full_and_fails_at_the_end_without_its_last_checkpoint(
    describe, tmp_path
):
    folder = tmp_path / "disk" / "run"
    with small_disk(tmp_path / "disk", size_kib=360):  # one checkpoint needs 180, the first batch 40
        done = facetrain("train", "--config", describe(), "--run-dir", folder, "--nproc-per-node", 2)
        assert done.returncode == 1 and done.stderr.count("error:") == 1 and "Traceback" not in done.stderr
        assert "was not saved (rank " in done.stderr
        assert "checkpoint of step 8 was not saved" in done.stderr and "No space left" in done.stderr
        assert len(losses(folder)) == 12
        assert [r["step"] for r in metrics(folder) if "save_failed" in r] == [8, 12]
        assert Checkpoint.open(folder).step == 4
        Checkpoint.open(folder / "checkpoints" / "latest").verify()


@pytest.mark.slow
def test_a_disk_that_cannot_hold_a_checkpoint_is_refused_before_the_first_step(describe, tmp_path):
    folder = tmp_path / "disk" / "run"
    with small_disk(tmp_path / "disk", size_kib=96):
        done = facetrain("train", "--config", describe(), "--run-dir", folder, "--nproc-per-node", 2)
        assert done.returncode == 1 and done.stderr.count("error:") == 1
        assert "a checkpoint takes 0.1 MB" in done.stderr and "set run.dir to a larger disk" in done.stderr
        assert not (folder / "metrics.jsonl").exists()
