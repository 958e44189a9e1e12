import errno
import json
import os
from pathlib import Path

import pytest

from facetrain.checkpoint.save import CheckpointWriter
from facetrain.errors import RunError, UsageError
from facetrain.run.folder import claim, environment
from facetrain.run.folder.claim import FolderClaim, require_replaceable
from facetrain.run.folder.lease import Lease
from facetrain.run.folder.run_state import FAILED, FINISHED, RUNNING, RunState
from tests.support.snapshots import snapshot


def claimed(default, launcher):
    return FolderClaim([launcher], Lease()).numbered(default)


def test_several_runs_of_one_name_get_numbers(tmp_path, capsys):
    default = tmp_path / "runs" / "name"
    assert claimed(default, "a") == default and not capsys.readouterr().out
    second = default.with_name("name-2")
    assert claimed(default, "b") == second
    assert capsys.readouterr().out == f"{default} exists: the folder of this run is {second}\n"
    assert claimed(default, "c") == default.with_name("name-3")
    (second / "environment.json").write_text(json.dumps({"launchers": ["b"]}))
    capsys.readouterr()
    assert claimed(default, "b") == second, "its ranks find it again"


def test_a_folder_that_this_user_may_not_read_takes_the_name_of_a_run(tmp_path, monkeypatch):
    default = tmp_path / "name"
    default.mkdir()

    def steps(folder):
        if folder.parent == default:
            raise PermissionError(folder)
        return []

    # Root, as whom tests may run, reads and writes everywhere.
    monkeypatch.setattr(claim, "complete_steps", steps)
    monkeypatch.setattr(claim, "creation_fault", lambda path: "denied" if path == default else "")
    assert claimed(default, "a") == tmp_path / "name-2"


def test_a_link_that_leads_nowhere_takes_the_name_of_a_run(tmp_path, monkeypatch):
    default = tmp_path / "name"
    default.symlink_to(tmp_path / "purged")
    mkdir, tried = Path.mkdir, []

    def mkdir_once(path, *args, **options):
        assert path not in tried, "this does not end"
        tried.append(path)
        mkdir(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir_once)
    assert claimed(default, "a") == tmp_path / "name-2"


def test_restarted_ranks_find_their_folder(tmp_path):
    with Lease() as lease:
        mine = FolderClaim(["b"], lease).numbered(tmp_path / "name")
        lease.lock(mine, ["b"])
        (mine / ".facetrain-x").mkdir()  # of the check whether the disk can rename folders
        assert claimed(mine, "b") == mine, "killed before anything else was written"
        assert claimed(mine, "a") == tmp_path / "name-2", "another job leaves it to them"
        (mine / "environment.json").write_text(json.dumps({"launchers": ["b"]}))
        assert claimed(mine, "b") == mine
        assert claimed(mine, "c") == tmp_path / "name-3"


@pytest.mark.parametrize(
    ("fault", "kind"), [(errno.EIO, RunError), (errno.ESTALE, RunError), (errno.EACCES, None)]
)
def test_a_folder_that_cannot_be_read_now_is_not_taken_for_one_of_another_job(
    tmp_path, monkeypatch, fault, kind
):
    (tmp_path / "name").mkdir()

    def fail(path):
        raise OSError(fault, os.strerror(fault), str(path))

    monkeypatch.setattr(environment, "read_regular_text", fail)
    if kind is None:
        assert claimed(tmp_path / "name", "agent") == tmp_path / "name-2", "the folder of another user"
    else:
        with pytest.raises(kind, match="name/environment.json: "):
            claimed(tmp_path / "name", "agent")


def test_only_folders_that_a_lease_has_created_and_that_are_empty_are_removed(tmp_path):
    (tmp_path / "before").mkdir()
    with Lease() as lease:
        for name in ("before", "new/run", "written/run"):
            lease.create(tmp_path / name, exist_ok=True)
        lease.lock(tmp_path / "new" / "run", [])
        (tmp_path / "written" / "run" / "log.txt").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "written"]


def test_the_error_for_a_folder_that_cannot_be_created_names_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"/file/name: .*--run-dir"):
        claimed(tmp_path / "file" / "name", "a")


@pytest.mark.parametrize(("steps", "kind"), [([], UsageError), ([2], RunError)])
def test_a_folder_in_which_a_run_has_trained_may_be_writable_again(tmp_path, monkeypatch, steps, kind):
    monkeypatch.setattr(claim, "creation_fault", lambda path: "Read-only file system")
    monkeypatch.setattr(claim, "complete_steps", lambda path: steps)
    with pytest.raises(kind, match="Read-only file system; .*give another --run-dir") as ended:
        FolderClaim([], Lease()).named(tmp_path, may_exist=True)
    assert type(ended.value) is kind


def test_a_resume_whose_folder_cannot_be_written_is_not_advised_to_give_another_one(tmp_path, monkeypatch):
    monkeypatch.setattr(claim, "creation_fault", lambda path: "Read-only file system")
    monkeypatch.setattr(claim, "complete_steps", lambda path: [2] if path.parent == tmp_path else [])
    with pytest.raises(RunError, match="cannot be written to: .*make it writable, or continue a copy"):
        FolderClaim([], Lease()).continued(tmp_path)
    with pytest.raises(UsageError, match="cannot be created: .*; start in another folder"):
        FolderClaim([], Lease()).continued(tmp_path / "mirrored")


def test_the_second_run_of_a_script_under_torchrun_is_another_run(tmp_path, monkeypatch):
    default = tmp_path / "name"
    with Lease() as lease:
        folder = FolderClaim(["agent"], lease).numbered(default)
        lease.lock(folder, ["agent"])
        (folder / "environment.json").write_text(json.dumps({"launchers": ["agent"]}))
        (folder / "checkpoints").mkdir()
        monkeypatch.setattr(claim, "complete_steps", lambda path: [2] if path.parent == default else [])
        assert FolderClaim(["agent"], Lease()).is_restart(folder), "a restarted process finds it"
    assert claimed(default, "agent") == tmp_path / "name-2"
    with pytest.raises(UsageError, match="already holds a run"):
        FolderClaim(["agent"], Lease()).named(default)


@pytest.mark.parametrize(("meta", "option"), [({}, ""), ({"code head.margin.type": "9f86"}, " --allow-code")])
def test_the_command_that_continues_a_run_allows_its_code(tmp_path, meta, option):
    CheckpointWriter(tmp_path / "checkpoints", asynchronous=False).save(snapshot(2, meta=meta))
    with pytest.raises(UsageError, match=f"`facetrain resume {tmp_path}{option}`"):
        FolderClaim(["agent"], Lease()).named(tmp_path)


def test_a_job_that_has_restarted_does_not_take_over_the_run_of_another_job(tmp_path, monkeypatch):
    (tmp_path / "environment.json").write_text(json.dumps({"launchers": ["other"]}))
    monkeypatch.setattr(claim, "complete_steps", lambda path: [2])
    with pytest.raises(UsageError, match="already holds a run"):
        FolderClaim(["agent"], Lease()).named(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.yaml": "# mine"}, r"config\.yaml: not written by a run .*rename it.*--run-dir"),
        ({"model.safetensors": ""}, "results of a finished run.*no checkpoint"),
        ({"state.json": RunState(state=FINISHED).model_dump_json()}, "results of a finished run"),
    ],
)
def test_a_new_run_does_not_replace_results_or_a_config_that_is_not_of_a_run(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=message):
        require_replaceable(tmp_path)


@pytest.mark.parametrize("state", [RUNNING, FAILED])
def test_a_new_run_replaces_one_that_has_ended_before_its_first_checkpoint(tmp_path, state):
    require_replaceable(tmp_path / "absent")
    for name in ("run_id.txt", "config.yaml", "environment.json", "metrics.jsonl", "log.txt"):
        (tmp_path / name).touch()
        require_replaceable(tmp_path)  # a kill may end it after each of them
    (tmp_path / "state.json").write_text(RunState(state=state).model_dump_json())
    require_replaceable(tmp_path)
