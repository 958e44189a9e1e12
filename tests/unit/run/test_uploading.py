"""Uploads of a run: its files, and what its config says of the checkpoints."""

from types import SimpleNamespace

from facetrain.checkpoint.mirror import Mirror
from facetrain.config.loading import build_config
from facetrain.run.folder.lock_file import LOCK_FILE
from facetrain.run.uploading import _files_to_upload, open_uploads, uploads_rest
from tests.support.mirrored import RUN_ID, URL, save


def test_the_mirror_gets_the_files_of_a_run_and_its_model_only_when_it_has_ended(tmp_path):
    for name in ("config.yaml", "model.safetensors", ".config.yaml.1", LOCK_FILE):
        (tmp_path / name).touch()
    (tmp_path / "checkpoints").mkdir()
    during, after = _files_to_upload(tmp_path, lambda: False), _files_to_upload(tmp_path, lambda: True)
    assert [path.name for path in during] == ["config.yaml"]
    assert [path.name for path in after] == ["config.yaml", "model.safetensors"]


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
