import os

from facetrain.run.folder.leftovers import remove_leftovers

LEFTOVERS = [
    ".model.safetensors.0123456789abcdef.tmp",
    ".model.onnx.0123456789abcdef.tmp.onnx",
    ".state.json.writing",
    ".tmpaB3dEf",
    ".run.lock.0123456789abcdef",
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
    (tmp_path / ".folder.0123456789abcdef.tmp").mkdir()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*KEPT, ".folder.0123456789abcdef.tmp"])
