import errno
from pathlib import Path

import pytest

from facetrain.errors import DataError
from facetrain.files import error_reason, os_errors_as, write_atomically


def test_an_error_of_the_system_names_path_reason_and_advice(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(DataError) as caught, os_errors_as(DataError, Path("other"), "check the path"):
        missing.read_text()
    assert str(caught.value) == f"{missing}: No such file or directory; check the path"


def test_an_error_without_a_path_gets_the_given_one():
    with (
        pytest.raises(DataError, match="^data: No space left on device$"),
        os_errors_as(DataError, Path("data")),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_reason_fits_on_one_line():
    assert error_reason(ValueError("first\n  second")) == "first second"
    assert error_reason(ValueError()) == "ValueError"


def test_a_failed_write_leaves_the_old_text(tmp_path):
    path = tmp_path / "file.txt"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
