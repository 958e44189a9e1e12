import json

import pytest
import torch

from facetrain.distributed.world import World
from facetrain.errors import UsageError
from facetrain.run.folder.create import create_run_folder, remove_if_empty


def world(launcher_id, restarts=0):
    return World(
        rank=0,
        local_rank=0,
        size=1,
        local_size=1,
        device=torch.device("cpu"),
        launcher_id=launcher_id,
        restarts=restarts,
    )


def claimed(default, launcher_id, restarts=0):
    return create_run_folder(world(launcher_id, restarts), given=None, default=default)


def test_of_several_runs_of_one_name_only_the_first_gets_the_folder(tmp_path):
    default = tmp_path / "runs" / "name"
    assert claimed(default, "a")[0] == default
    with pytest.raises(UsageError, match=r"runs/name: already exists.*run\.name=NAME or --run-dir"):
        claimed(default, "b")
    assert [path.name for path in default.parent.iterdir()] == ["name"]


def test_restarted_workers_find_their_folder(tmp_path):
    mine, _ = claimed(tmp_path / "name", "b")
    assert claimed(mine, "b", restarts=1)[0] == mine, "killed before anything was written"
    (mine / "environment.json").write_text(json.dumps({"launchers": ["b"]}))
    assert claimed(mine, "b")[0] == mine
    with pytest.raises(UsageError, match="already exists"):
        claimed(mine, "c", restarts=1)


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
    with pytest.raises(UsageError, match="is a file or not writable; give another"):
        claimed(tmp_path / "file" / "name", "a")
