import errno
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from facetrain.config.schema import Config
from facetrain.distributed.elastic_agent import launch_ranks
from facetrain.distributed.topology import Topology
from facetrain.errors import CheckpointError, DataError, FacetrainError, RunError, UsageError
from facetrain.files import (
    damage_reason,
    error_reason,
    new_file,
    new_folder,
    os_errors_as,
    require_absent,
    require_temporary_folder,
    write_atomically,
    write_fault,
)
from facetrain.run.asked_config import open_mirror, recorded_config
from facetrain.run.request import TrainRequest
from tests.support.faults import make_read_only, small_disk


def test_an_error_of_the_system_names_path_reason_and_advice(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(DataError) as caught, os_errors_as(DataError, Path("other"), "check the path"):
        missing.read_text()
    assert str(caught.value) == f"{missing}: No such file or directory; check the path"


@pytest.mark.parametrize(
    ("kind", "raised", "number", "message"),
    [
        (DataError, DataError, errno.EIO, "data: Input/output error"),
        (DataError, DataError, errno.EROFS, "data: Read-only file system; choose another path"),
        (
            DataError,
            RunError,
            errno.ENOSPC,
            "data: No space left on device; free space or choose another path",
        ),
        (UsageError, RunError, errno.EDQUOT, "data: Disk quota exceeded; free space or choose another path"),
        (CheckpointError, CheckpointError, errno.EDQUOT, "data: Disk quota exceeded; free space or choose"),
    ],
)
def test_an_error_without_a_path_gets_the_given_one_and_a_full_disk_is_no_wrong_input(
    kind, raised, number, message
):
    with pytest.raises(FacetrainError, match=f"^{message}") as caught, os_errors_as(kind, Path("data")):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is raised


def test_a_folder_that_cannot_be_written_to_says_why(tmp_path):
    assert write_fault(tmp_path) == ""
    assert write_fault(tmp_path / "none") == os.strerror(errno.ENOENT)
    with small_disk(tmp_path / "disk", size_kib=64):
        make_read_only(tmp_path / "disk")
        assert write_fault(tmp_path / "disk") == os.strerror(errno.EROFS)


def test_a_reason_fits_on_one_line():
    assert error_reason(ValueError("first\n  second")) == "first second"
    assert error_reason(ValueError()) == "ValueError"
    with pytest.raises(UnicodeDecodeError) as caught:
        "same".encode("utf-16").decode()
    assert error_reason(caught.value) == "is not text in UTF-8 (byte 0xff); save it as UTF-8"
    assert error_reason(ValueError("x" * 10_000)) == "x" * 200 + "..."


def test_a_binary_file_is_damaged_unless_the_operating_system_or_a_library_refuses_it():
    advice = "; the file is damaged or incomplete: copy it again"
    text = UnicodeDecodeError("utf-8", b"\xbf", 0, 1, "invalid start byte")
    assert damage_reason(text) == "text not in UTF-8 (byte 0xbf)" + advice
    assert damage_reason(KeyError(99)) == "99" + advice
    assert damage_reason(OSError("corrupt footer")) == "corrupt footer" + advice
    assert damage_reason(PermissionError(errno.EACCES, "no", "a")) == "no"
    assert damage_reason(NotImplementedError("codec LZO")) == "codec LZO"


def test_a_failed_write_leaves_the_old_text(tmp_path):
    path = tmp_path / "file.txt"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["file.txt"]


def test_a_write_that_a_full_disk_ends_leaves_nothing_that_takes_its_space(tmp_path):
    with small_disk(tmp_path / "disk", size_kib=64):
        path = tmp_path / "disk" / "file"
        write_atomically(path, "old")
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, "new" * 100_000)
        assert path.read_text() == "old" and [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_two_writers_of_one_file_with_one_process_id_do_not_share_a_temporary_file(tmp_path):
    path = tmp_path / "file.txt"
    with new_file(path, DataError) as one, one.open("w") as file:
        file.write("first")
        with new_file(path, DataError) as other:
            other.write_text("second, which is complete")
        assert path.read_text() == "second, which is complete"
    assert path.read_text() == "first" and [one.name for one in tmp_path.iterdir()] == ["file.txt"]


def test_a_new_file_and_folder_have_the_permissions_of_ordinary_ones(tmp_path):
    before = os.umask(0o026)
    try:
        with new_file(tmp_path / "file", DataError) as scratch:
            scratch.touch()
        with new_folder(tmp_path / "folder"):
            pass
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("file", "folder")] == [0o640, 0o751]


def test_errors_name_the_output_and_not_its_temporary_path(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "out", tmp_path / "absent" / "out"):
        with pytest.raises(DataError, match=rf"^{path}: [\w ]+$"), new_file(path, DataError) as scratch:
            scratch.touch()
        with pytest.raises(DataError, match=rf"^{path}: [\w ]+$"), os_errors_as(DataError, tmp_path):
            write_atomically(path, "text")
    with (
        pytest.raises(DataError, match=rf"^{tmp_path}/out/a: "),
        new_folder(tmp_path / "out") as scratch,
    ):
        (scratch / "a").read_bytes()


@pytest.mark.parametrize("target", ["file", "folder", "unmounted/out"])
def test_an_output_that_exists_is_refused_and_so_is_a_link_to_nothing(target, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "out").symlink_to(target)
    advice = f"is a link to {tmp_path / target}, where nothing is" if "/" in target else "already exists"
    with pytest.raises(DataError, match=f"^{tmp_path}/out: {advice}"), new_folder(tmp_path / "out"):
        pytest.fail("the work has begun")
    assert (tmp_path / "out").is_symlink()


def test_an_output_that_cannot_be_created_is_refused_before_the_work(tmp_path):
    def check(output):
        place = tmp_path / output.parts[0]
        reason = f"^{tmp_path / output}: cannot be created: {place}: .*; choose another path"
        with pytest.raises(DataError, match=reason), new_folder(tmp_path / output):
            pytest.fail("the work has begun")

    require_absent(tmp_path / "new" / "out")
    (tmp_path / "file").touch()
    check(Path("file/out"))
    with small_disk(tmp_path / "disk", size_kib=64):
        make_read_only(tmp_path / "disk")
        check(Path("disk/out"))
        check(Path("disk/new/out"))


def test_an_output_that_another_command_has_written_meanwhile_stays(tmp_path):
    output = tmp_path / "out"
    with pytest.raises(DataError, match=f"^{output}: already exists; "), new_folder(output):
        output.mkdir()
        (output / "file").touch()
    assert [one.name for one in tmp_path.rglob("*")] == ["out", "file"]


def test_the_temporary_folder_of_another_process_with_the_same_id_stays(tmp_path):
    foreign = tmp_path / f".out.{os.getpid()}.tmp"
    foreign.mkdir()
    with new_folder(tmp_path / "out") as scratch:
        (scratch / "file").touch()
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "other"):
        raise KeyboardInterrupt
    assert sorted(one.name for one in tmp_path.iterdir()) == [foreign.name, "out"]


def test_a_container_without_a_folder_for_temporary_files_is_told_which_variable_names_one(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", None)  # as in a new process
    require_temporary_folder()
    monkeypatch.setattr(tempfile, "tempdir", None)
    # root may write to every folder, but not to one that is missing
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    for uses_it in (
        require_temporary_folder,
        lambda: launch_ranks([], Topology(nproc_per_node=2)),
        lambda: open_mirror(Config(data={"train": "x"}, checkpoint={"mirror": "s3://bucket/runs"}), tmp_path),
        lambda: recorded_config(TrainRequest(command="resume", run_dir="s3://bucket/runs/one")),
    ):
        with pytest.raises(UsageError, match="set the environment variable TMPDIR"):
            uses_it()
    disk = SimpleNamespace(f_bavail=0, f_flag=os.ST_RDONLY)
    monkeypatch.setattr(os, "statvfs", lambda folder: disk)
    with pytest.raises(UsageError, match="set the environment variable TMPDIR"):
        require_temporary_folder()
    disk.f_flag = 0
    with pytest.raises(RunError, match="^/tmp: No space left on device; free space"):
        require_temporary_folder()
