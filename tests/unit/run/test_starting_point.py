"""Choice of the checkpoint to continue from, among those of the run folder and those of the mirror."""

import os
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.mirror import Mirror
from facetrain.config.loading import build_config
from facetrain.errors import DamagedCheckpointError, NoCheckpointError, UsageError
from facetrain.run.asked_config import open_mirror, recorded_config
from facetrain.run.folder.accepted import Accepted
from facetrain.run.folder.environment import recorded_environment, stored_environment
from facetrain.run.folder.hosts import Hosts
from facetrain.run.folder.starting_point import find_starting_point, is_behind
from facetrain.run.outputs import open_sinks
from facetrain.run.request import TrainRequest
from tests.support.mirrored import URL, save, upload

pytestmark = pytest.mark.usefixtures("store")


OTHER = {"replicated": {"backbone.w": torch.ones(5)}}
"""Options of a checkpoint of another course of the run."""


def chosen(folder, step=None, *, separate=False, may_be_new=False):
    start = find_starting_point(folder, Mirror(URL), Hosts(True, separate), step=step, may_be_new=may_be_new)
    return start and (start.checkpoint.step, start.is_fetched)


def lose_a_file(folder, step):
    (folder / "checkpoints" / f"step_{step:08d}" / "rank_00000.safetensors").unlink()


def test_the_newest_checkpoint_of_folder_and_mirror_is_taken(tmp_path):
    upload(tmp_path, save(tmp_path, 2))
    save(tmp_path, 4)
    assert chosen(tmp_path) == (4, False)
    (tmp_path / "empty").mkdir()
    assert chosen(tmp_path / "empty") == (2, True)
    assert not list((tmp_path / "empty").iterdir()), "nothing is written"
    with pytest.raises(NoCheckpointError, match=rf"{URL}: .*step 3\b"):
        chosen(tmp_path, 3)


def test_of_hosts_with_separate_disks_only_the_checkpoints_of_the_mirror_count(tmp_path):
    upload(tmp_path, save(tmp_path, 2))
    save(tmp_path, 4)
    assert chosen(tmp_path, separate=True) == (2, True)


def test_the_last_of_several_hosts_completes_its_checkpoint_or_takes_the_newest_of_the_mirror(tmp_path):
    upload(tmp_path, *[save(tmp_path, step) for step in (2, 4)])
    lose_a_file(tmp_path, 4)
    assert chosen(tmp_path) == (4, True)
    Mirror(URL).fetch(4, tmp_path / "checkpoints")
    Checkpoint.open(tmp_path).verify()
    save(tmp_path, 6)
    lose_a_file(tmp_path, 6)
    assert chosen(tmp_path) == (4, False)
    (tmp_path / "checkpoints" / "step_00000006" / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpointError):
        chosen(tmp_path)


@pytest.mark.parametrize("damaged", ["manifest.json", "replicated.safetensors"])
def test_a_checkpoint_that_is_damaged_in_the_folder_comes_from_the_mirror(tmp_path, capsys, damaged):
    upload(tmp_path, *[save(tmp_path, step) for step in (2, 4)])
    os.truncate(tmp_path / "checkpoints" / "step_00000004" / damaged, 50)
    assert chosen(tmp_path) == (4, True)
    assert f"{damaged}: " in capsys.readouterr().err
    Mirror(URL).fetch(4, tmp_path / "checkpoints")
    Checkpoint.open(tmp_path).verify()
    assert chosen(tmp_path) == (4, False)


@pytest.mark.parametrize("newest", [6, 7])
def test_what_the_run_has_left_on_another_disk_does_not_count(tmp_path, newest):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    upload(here, *[save(here, step) for step in (2, 4, 6)])
    save(here, 7)  # was not uploaded before the host was lost
    Mirror(URL).leave_after(2)
    upload(there, *[save(there, step, note="other course", **OTHER) for step in (4, newest)], keep=9)
    start = find_starting_point(here, Mirror(URL), Hosts(), step=None, may_be_new=False)
    assert start.left_steps == (7, 6, 4) and start.is_fetched
    assert start.checkpoint.step == newest and start.checkpoint.meta["note"] == "other course"
    assert chosen(here, 4) == (4, True) and chosen(here, 2) == (2, False)
    with pytest.raises(NoCheckpointError, match="has left the one in"):
        chosen(here, 13 - newest)


def test_a_step_that_was_saved_again_with_its_metrics_is_of_the_same_course(tmp_path):
    upload(tmp_path, *[save(tmp_path, step) for step in (2, 4)])
    for step in (4, 6, 8):  # while the store does not answer
        save(tmp_path, step, note="verified")
    start = find_starting_point(tmp_path, Mirror(URL), Hosts(), step=None, may_be_new=False)
    assert (start.checkpoint.step, start.left_steps) == (8, ())
    there = tmp_path / "there"
    there.mkdir()
    Mirror(URL).leave_after(2)
    upload(there, save(there, 3, **OTHER))
    start = find_starting_point(tmp_path, Mirror(URL), Hosts(), step=None, may_be_new=False)
    assert (start.checkpoint.step, start.left_steps) == (3, (8, 6, 4))


def test_checkpoints_that_the_mirror_has_never_had_or_no_longer_has_count(tmp_path):
    outcomes = [save(tmp_path, step) for step in (2, 4, 6)]
    upload(tmp_path, *outcomes[:2], keep=1)
    start = find_starting_point(tmp_path, Mirror(URL), Hosts(), step=None, may_be_new=False)
    assert (start.checkpoint.step, start.left_steps) == (6, ())
    assert chosen(tmp_path, 2) == (2, False)


@pytest.mark.parametrize("run", [URL, "runs/one"])
def test_the_config_is_that_of_the_disk_with_the_newest_checkpoint(tmp_path, monkeypatch, run):
    here, there = tmp_path / "runs" / "one", tmp_path / "there"
    for folder, rate in ((here, 0.1), (there, 0.2)):
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(
            f"data: {{train: faces}}\noptim: {{lr: {rate}}}\ncheckpoint: {{mirror: {URL.removesuffix('/one')}}}\n"
        )
    monkeypatch.chdir(tmp_path)

    def rate():
        return recorded_config(TrainRequest(command="resume", run_dir=run))[1].config.optim.lr

    upload(here, save(here, 2))
    Mirror(URL).upload_files([there / "config.yaml"])
    assert rate() == 0.1
    upload(there, save(there, 4))
    assert rate() == 0.2
    Mirror(URL).fetch(4, here / "checkpoints")
    assert rate() == 0.1
    Mirror(URL).leave_after(2)
    assert rate() == 0.1, "the mirror has nothing that is new here"
    upload(there, save(there, 4, **OTHER))
    assert rate() == 0.2


def test_what_a_run_has_accepted_is_in_the_mirror_too(tmp_path):
    (tmp_path / "environment.json").write_text(
        '{"accepted": {"manifest": "5f3a", "inputs": {"samples": "90c2"}}}'
    )
    here, there = recorded_environment(tmp_path / "empty"), partial(stored_environment, Mirror(URL))
    assert there() == {}
    Mirror(URL).upload_files([tmp_path / "environment.json"])
    assert Accepted.since("5f3a", here, there()).new_inputs({"samples": "90c2", "sets": "1d7e"}) == {
        "sets": "1d7e"
    }
    assert Accepted.since("another", here, there()) == Accepted()


def test_a_job_whose_hosts_have_no_whole_checkpoint_begins_again(tmp_path):
    save(tmp_path, 2)
    assert chosen(tmp_path, may_be_new=True) == (2, False)
    lose_a_file(tmp_path, 2)
    assert chosen(tmp_path, may_be_new=True) is None


def test_the_mirror_of_another_run_is_refused_before_anything_is_read_from_it(tmp_path):
    upload(tmp_path, save(tmp_path, 2))
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "run_id.txt").write_text("fedcba9876543210\n")
    with pytest.raises(UsageError, match="another run"):
        chosen(tmp_path)
    with pytest.raises(UsageError, match="another run"):
        is_behind(tmp_path, Mirror(URL))
    assert [path.name for path in tmp_path.iterdir()] == ["run_id.txt"]


def test_the_name_of_a_run_does_not_depend_on_the_words_for_its_folder(tmp_path, monkeypatch):
    (tmp_path / "one" / "checkpoints").mkdir(parents=True)
    (tmp_path / "newest").symlink_to("one")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "one").symlink_to(tmp_path / "one" / "checkpoints")  # the run is on a larger disk
    (tmp_path / "runs" / "newest").symlink_to("one")
    (tmp_path / "runs" / "latest").symlink_to(tmp_path / "runs" / "one")
    (tmp_path / "home").symlink_to("runs")
    config = build_config({"checkpoint": {"mirror": URL.rpartition("/")[0]}, "data": {"train": "x"}}, "x")
    for place, folder in (
        (".", "one"),
        (".", "newest"),
        ("one", "."),
        ("one/checkpoints", ".."),
        ("runs", "one"),
        ("runs", "newest"),
        (".", tmp_path / "home" / "latest"),
    ):
        monkeypatch.chdir(tmp_path / place)
        mirror = open_mirror(config, Path(folder))
        assert mirror is not None and mirror.url == URL
        with patch("facetrain.run.outputs.Sinks") as sinks:
            open_sinks(config, Path(folder), "a1b2c3", None)
        assert sinks.call_args.args[1].name == "one"
