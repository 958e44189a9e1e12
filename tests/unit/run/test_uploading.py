"""Uploads of a run: its files, and what its config says of the checkpoints."""

import signal
from types import SimpleNamespace

import pytest

from facetrain.checkpoint.commit import complete_steps, step_folder
from facetrain.checkpoint.mirror import Mirror
from facetrain.checkpoint.save import SaveOutcome
from facetrain.config.loading import build_config
from facetrain.distributed.grace_period import grace_s
from facetrain.distributed.stop_request import StopRequest
from facetrain.errors import RunError
from facetrain.run.folder.lock_file import LOCK_FILE
from facetrain.run.uploading import (
    _files_to_upload,
    leave_uploads,
    open_uploads,
    saved_checkpoint,
    upload_rest,
    uploads_rest,
)
from tests.support.mirrored import RUN_ID, URL, save


def test_the_mirror_gets_the_files_of_a_run_and_models_only_when_it_has_ended(tmp_path):
    models = ["model.int8.onnx", "model.onnx", "model.pt2", "model.safetensors"]
    for name in ("config.yaml", *models, ".config.yaml.1", LOCK_FILE):
        (tmp_path / name).touch()
    (tmp_path / "checkpoints").mkdir()
    during, after = _files_to_upload(tmp_path, lambda: False), _files_to_upload(tmp_path, lambda: True)
    assert [path.name for path in during] == ["config.yaml"]
    assert [path.name for path in after] == ["config.yaml", *models]


def test_the_command_that_uploads_the_rest_of_a_run_with_code_of_its_own_allows_the_code(tmp_path):
    sections = {"data": {"train": "x"}, "head": {"margin": {"type": "mine:margin"}}}
    run = SimpleNamespace(folder=tmp_path, config=build_config(sections, "test"))
    assert uploads_rest(run) == f"`facetrain resume {tmp_path} --allow-code` uploads the rest"


def test_the_mirror_keeps_as_many_checkpoints_as_the_config_says_and_the_best(tmp_path, store):
    checkpoint = {"keep": 1, "best_metric": "lfw/accuracy"}
    config = build_config({"data": {"train": "x"}, "checkpoint": checkpoint}, "test")
    uploads = open_uploads(SimpleNamespace(folder=tmp_path, config=config), Mirror(URL), lambda: True)
    for step, accuracy in ((2, 0.9), (4, 0.6), (6, 0.7)):
        uploads.add(save(tmp_path, step, metrics={"lfw/accuracy": accuracy}))
        assert uploads.finish() == ""
    assert Mirror(URL).steps() == [2, 6]


def test_a_run_that_has_claimed_its_mirror_leaves_it_to_a_later_process(tmp_path, store):
    run = SimpleNamespace(folder=tmp_path, config=build_config({"data": {"train": "x"}}, "test"))
    uploads = open_uploads(run, Mirror(URL), lambda: True, has_claimed=True)
    Mirror(URL, process="later").claim(RUN_ID)
    uploads.add(save(tmp_path, 2))
    assert "another process has continued this run" in uploads.finish()


class FakeUploads:
    """Uploads that end with a failure, or without one."""

    def __init__(self, failure=""):
        self.failure, self.added, self.limit_s = failure, [], None

    def add(self, saved):
        self.added.append(saved)

    def finish(self, limit_s=None, *, check_stop=lambda: None):
        self.limit_s = limit_s
        check_stop()
        return self.failure


def ended_run(folder, *, is_owner=True):
    """Return a run of which one checkpoint is kept, and two are there."""
    for step in (2, 4):
        save(folder, step)
    config = build_config({"data": {"train": "x"}, "checkpoint": {"keep": 1}}, "test")
    return SimpleNamespace(folder=folder, config=config, hosts=SimpleNamespace(is_owner=is_owner))


def test_a_checkpoint_is_uploaded_from_the_files_that_its_owner_has(tmp_path):
    run = ended_run(tmp_path)
    whole = saved_checkpoint(run, 4, is_leader=True)
    assert whole.files == tuple(whole.manifest.files) and whole.manifest.step == 4
    (step_folder(tmp_path / "checkpoints", 4) / whole.files[0].name).unlink()
    assert saved_checkpoint(run, 4, is_leader=False) == SaveOutcome(4, files=whole.files[1:])
    run.hosts.is_owner = False
    assert saved_checkpoint(run, 4, is_leader=True) == SaveOutcome(4)


@pytest.mark.parametrize(("is_owner", "left"), [(True, [4]), (False, [2, 4])])
def test_what_was_kept_for_its_upload_is_removed_by_its_owner_after_it(tmp_path, is_owner, left):
    run, uploads = ended_run(tmp_path, is_owner=is_owner), FakeUploads()
    assert upload_rest(run, 4, uploads, StopRequest(), SimpleNamespace(is_leader=True)) == 0
    assert complete_steps(tmp_path / "checkpoints") == left and [saved.step for saved in uploads.added] == [4]


def test_a_run_whose_last_checkpoint_is_not_uploaded_has_failed_and_keeps_all(tmp_path):
    run = ended_run(tmp_path)
    with pytest.raises(RunError, match=r"not in checkpoint\.mirror: no space; `facetrain resume .*` uploads"):
        upload_rest(run, 4, FakeUploads("no space"), StopRequest(), SimpleNamespace(is_leader=True))
    assert complete_steps(tmp_path / "checkpoints") == [2, 4]


@pytest.mark.parametrize("is_leader", [True, False])
def test_a_signal_ends_the_wait_for_the_uploads_and_one_rank_says_what_is_missing(
    tmp_path, capsys, is_leader
):
    run, request, world = ended_run(tmp_path), StopRequest(), SimpleNamespace(is_leader=is_leader)
    request.signal = signal.SIGTERM
    assert upload_rest(run, 4, FakeUploads(), request, world) == signal.SIGTERM
    uploads = FakeUploads("no answer")
    leave_uploads(run, uploads, world)
    assert uploads.limit_s == grace_s() / 2
    warned = capsys.readouterr().err
    assert [text in warned for text in ("SIGTERM received", "no answer")] == [is_leader] * 2
    assert complete_steps(tmp_path / "checkpoints") == [2, 4]
