import os

import pytest

from facetrain.run.folder.earlier import remove_leftovers
from facetrain.run.outputs import open_outputs
from facetrain.verify.output.hardest_pairs import VerifiedPairs

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


@pytest.mark.parametrize(
    ("resume_at", "left"),
    [
        (None, set()),
        (4, {"augmented.png", "skipped_images.txt"}),
        (6, {"augmented.png", "skipped_images.txt", "hardest_pairs.json"}),
    ],
)
def test_a_start_removes_what_another_course_of_training_has_written(tmp_path, resume_at, left):
    for name in ("augmented.png", "skipped_images.txt", "diverged.json"):
        (tmp_path / name).touch()
    (tmp_path / "hardest_pairs.json").write_text(VerifiedPairs(step=6, sets={}).model_dump_json())
    open_outputs(tmp_path, None, total_steps=8, resume_at=resume_at).close()
    assert {path.name for path in tmp_path.iterdir()} == left | {"metrics.jsonl"}
