import os

from facetrain.run.folder.earlier import remove_leftovers

LEFTOVERS = [
    ".model.safetensors.0123456789abcdef.tmp",
    ".model.onnx.0123456789abcdef.tmp.onnx",
    ".state.json.0123456789abcdef.tmp",
    ".tmpaB3dEf",
    ".run.lock.0123456789abcdef.claim",
]
KEPT = [
    "run.lock",
    "model.safetensors",
    ".notes",
    ".tmp",
    "x.0123456789abcdef.tmp",
    ".run.lock.fedcba9876543210.claim",
]


def test_the_temporary_files_of_killed_processes_are_removed_and_no_others(tmp_path):
    for name in LEFTOVERS + KEPT:
        (tmp_path / name).touch()
        if name in LEFTOVERS:
            os.utime(tmp_path / name, (0, 0))
    folders = [".folder.0123456789abcdef.tmp", "checkpoints", "profile"]
    for name in [*folders, "centers/rank_00000", "teacher_centers"]:
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "centers" / "rank_00000" / "rows.bin").touch()
    for name in ("latest", ".latest.0123456789abcdef.tmp"):
        (tmp_path / "checkpoints" / name).touch()
    (tmp_path / "profile" / ".summary.txt.0123456789abcdef.tmp").touch()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*KEPT, *folders])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["latest"]
    assert list((tmp_path / "profile").iterdir()) == []


def test_a_folder_of_the_user_that_has_the_name_of_the_row_files_stays(tmp_path):
    for path in (tmp_path / "run" / "centers" / "mine.npy", tmp_path / "mine" / "rank_00000" / "rows.bin"):
        path.parent.mkdir(parents=True)
        path.touch()
    (tmp_path / "run" / "teacher_centers").symlink_to(tmp_path / "mine")
    before = sorted(tmp_path.rglob("*"))
    remove_leftovers(tmp_path / "run")
    assert sorted(tmp_path.rglob("*")) == before
