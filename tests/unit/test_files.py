import errno
from pathlib import Path

import pytest

from facetrain.errors import DataError
from facetrain.files import error_reason, listed, os_errors_as, parse_yaml, write_atomically


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
    assert error_reason(ValueError("x" * 10_000)) == "x" * 200 + "..."


def test_names_of_a_file_are_listed_without_control_characters_and_only_the_first_of_many():
    assert listed(["a", "b\x1b[2J", "c" * 99]) == "a, b\\x1b[2J, " + "c" * 60 + "..."
    assert listed(map(str, range(1000))).endswith(", 18, 19 and 980 more")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 5000,
        "a: !!timestamp x",
        "a: !!bool x",
        "a: 2001-13-01",
        "!!python/name:os.system ''",
        "a: \x00",
    ],
)
def test_a_text_that_is_not_yaml_of_plain_values_is_a_value_error(text):
    with pytest.raises(ValueError, match="."):
        parse_yaml(text)


def test_a_failed_write_leaves_the_old_text(tmp_path):
    path = tmp_path / "file.txt"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
