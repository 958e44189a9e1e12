"""Choice of the checkpoint to continue from, among those of the run folder and those of the mirror."""

import pytest

from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.mirror import Mirror
from facetrain.errors import DamagedCheckpointError, NoCheckpointError
from facetrain.run.folder.hosts import Hosts, continues_from_mirror, fetch_checkpoint
from tests.support.world import ONE_RANK
from tests.unit.checkpoint.test_mirror import URL, save, store, upload  # noqa: F401


def choose(folder, choice=None, *, separate=False):
    return fetch_checkpoint(ONE_RANK, Hosts(True, separate, Mirror(URL)), folder, choice)


def lose_a_file(folder, step):
    (folder / "checkpoints" / f"step_{step:08d}" / "rank_00000.safetensors").unlink()


def test_the_newest_checkpoint_of_folder_and_mirror_is_taken(tmp_path):
    upload(tmp_path, save(tmp_path, 2))
    save(tmp_path, 4)
    assert choose(tmp_path) == 4
    (tmp_path / "empty").mkdir()
    assert choose(tmp_path / "empty") == 2
    Checkpoint.open(tmp_path / "empty").verify()
    with pytest.raises(NoCheckpointError, match=f"{URL}: no checkpoint of step 3"):
        choose(tmp_path, 3)


def test_of_hosts_with_separate_disks_only_the_checkpoints_of_the_mirror_count(tmp_path):
    upload(tmp_path, save(tmp_path, 2))
    save(tmp_path, 4)
    assert choose(tmp_path, separate=True) == 2


def test_the_last_of_several_hosts_completes_its_checkpoint_or_takes_the_newest_of_the_mirror(tmp_path):
    upload(tmp_path, *[save(tmp_path, step) for step in (2, 4)])
    lose_a_file(tmp_path, 4)
    assert choose(tmp_path) == 4
    Checkpoint.open(tmp_path).verify()
    save(tmp_path, 6)
    lose_a_file(tmp_path, 6)
    assert choose(tmp_path) == 4
    (tmp_path / "checkpoints" / "step_00000006" / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpointError):
        Checkpoint.open(tmp_path, choose(tmp_path))


def test_a_job_whose_hosts_have_no_whole_checkpoint_begins_again(tmp_path):
    save(tmp_path, 2)
    hosts = Hosts(True, False, Mirror(URL))
    assert continues_from_mirror(ONE_RANK, hosts, tmp_path, was_restarted=True, resume=False)
    lose_a_file(tmp_path, 2)
    assert not continues_from_mirror(ONE_RANK, hosts, tmp_path, was_restarted=True, resume=False)
    assert [path.name for path in (tmp_path / "checkpoints").glob("*step*")] == ["left_step_00000002"]
