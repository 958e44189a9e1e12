"""Files of a run folder that its mirror gets."""

from facetrain.run.folder.lock_file import LOCK_FILE
from facetrain.run.uploading import _files_to_upload


def test_the_mirror_gets_the_files_of_a_run_and_its_model_only_when_it_has_ended(tmp_path):
    for name in ("config.yaml", "model.safetensors", ".config.yaml.1", LOCK_FILE):
        (tmp_path / name).touch()
    (tmp_path / "checkpoints").mkdir()
    during, after = _files_to_upload(tmp_path, lambda: False), _files_to_upload(tmp_path, lambda: True)
    assert [path.name for path in during] == ["config.yaml"]
    assert [path.name for path in after] == ["config.yaml", "model.safetensors"]
