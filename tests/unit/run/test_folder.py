import json
from dataclasses import replace

import pytest

from facetrain.errors import UsageError
from facetrain.run.folder.create import create_run_folder, remove_if_empty
from tests.support.world import ONE_RANK


def world(launcher_id, restarts=0):
    return replace(ONE_RANK, launcher_id=launcher_id, restarts=restarts)


def claimed(default, launcher_id, restarts=0):
    return create_run_folder(world(launcher_id, restarts), given=None, default=default)


def test_several_runs_of_one_name_get_numbers(tmp_path, capsys):
    default = tmp_path / "runs" / "name"
    assert claimed(default, "a")[0] == default and not capsys.readouterr().out
    second = default.with_name("name-2")
    assert claimed(default, "b")[0] == second
    assert capsys.readouterr().out == f"{default} exists: the folder of this run is {second}\n"
    assert claimed(default, "c")[0] == default.with_name("name-3")
    (second / "environment.json").write_text(json.dumps({"launchers": ["b"]}))
    capsys.readouterr()
    assert claimed(default, "b", restarts=1) == (second, False), "its workers find it again"


def test_restarted_workers_find_their_folder(tmp_path):
    mine, _ = claimed(tmp_path / "name", "b")
    assert claimed(mine, "b", restarts=1)[0] == mine, "killed before anything was written"
    (mine / "environment.json").write_text(json.dumps({"launchers": ["b"]}))
    assert claimed(mine, "b")[0] == mine
    assert claimed(mine, "c")[0] == tmp_path / "name-2"


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
