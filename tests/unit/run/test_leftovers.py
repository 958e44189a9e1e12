import os

import pytest

from facetrain.checkpoint.commit import step_folder
from facetrain.run.folder.earlier import leave_after, remove_leftovers
from facetrain.run.outputs import open_outputs
from facetrain.verify.output.hardest_pairs import VerifiedPairs
from tests.support.mirrored import save

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
    (tmp_path / ".facetrain-x1" / "before").mkdir(parents=True)
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


def test_parts_of_checkpoints_that_every_restart_trains_again_do_not_pile_up(tmp_path):
    checkpoints = tmp_path / "checkpoints"

    def restart_from(step, *parts):
        """Go on from the step of the mirror; return what is kept of the newer checkpoints, and of earlier ones."""
        for part in (step, *parts):
            save(tmp_path, part)
            (step_folder(checkpoints, part) / "rank_00000.safetensors").unlink()  # on the disk of a lost host
        names = leave_after(tmp_path, step, keep_parts=2)
        assert (checkpoints / "latest").read_text() == f"step_{step:08d}\n"
        return names, sorted(int(path.name[-8:]) for path in checkpoints.glob("lost_*"))

    name = "lost_step_000000{}".format
    for _ in range(2):
        assert restart_from(10, 20) == ([name(20)], [20])
    assert restart_from(10, 30, 40) == ([name(30), name(40)], [30, 40])
    assert restart_from(10, 20) == ([name(30), name(40)], [30, 40]), "the newest are kept"
    assert restart_from(30) == ([], [40]), "the run has gone on from 30"
    save(tmp_path, 50)
    assert leave_after(tmp_path, 30, keep_parts=2) == ["left_step_00000050"], "a whole one is kept for ever"
    save(tmp_path, 60)
    (step_folder(checkpoints, 60) / "rank_00000.safetensors").unlink()
    assert leave_after(tmp_path, 30) == ["left_step_00000060"], "the command goes back"
    assert sorted(path.name for path in checkpoints.glob("step_*")) == [
        f"step_000000{step}" for step in (10, 30)
    ]
