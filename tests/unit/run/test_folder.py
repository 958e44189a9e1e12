import json

import pytest
import torch

from facetrain.distributed.world import World
from facetrain.errors import UsageError
from facetrain.run.folder import create_run_folder, remove_if_empty


def world(launcher_id):
    return World(
        rank=0, local_rank=0, size=1, local_size=1, device=torch.device("cpu"), launcher_id=launcher_id
    )


def claimed(default, launcher_id):
    return create_run_folder(world(launcher_id), given=None, default=default)


def test_runs_that_start_together_get_different_folders(tmp_path):
    default = tmp_path / "runs" / "name"
    found = [claimed(default, launcher_id)[0].name for launcher_id in ("a", "b", "c")]
    assert found == ["name", "name_2", "name_3"]


def test_restarted_workers_find_their_folder(tmp_path):
    claimed(tmp_path / "name", "a")
    mine, _ = claimed(tmp_path / "name", "b")
    (mine / "environment.json").write_text(json.dumps({"launchers": ["b"]}))
    assert claimed(tmp_path / "name", "b")[0] == mine


def test_only_an_empty_folder_is_removed(tmp_path):
    first, _ = claimed(tmp_path / "name", "a")
    remove_if_empty(first, world("a"))
    assert not first.exists()
    second, _ = claimed(tmp_path / "name", "b")
    (second / "log.txt").touch()
    remove_if_empty(second, world("b"))
    assert second.exists()


def test_the_error_for_a_folder_that_cannot_be_created_names_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file; give another"):
        claimed(tmp_path / "file" / "name", "a")
