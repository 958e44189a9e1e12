import pytest

from facetrain.data.skipped_files import SkippedFile, read_skipped_table, skipped_count, skipped_table
from facetrain.errors import DataError


def test_a_table_of_skipped_files_is_read_back_with_any_names(tmp_path):
    names = ["ann/1.txt", "-1234/a.txt", "=1+1", "'-a", "'a", "a,b\n", ""]
    files = [SkippedFile(name, "suffix", "a reason") for name in names]
    (tmp_path / "skipped.csv").write_text(skipped_table(files))
    assert read_skipped_table(tmp_path / "skipped.csv") == files
    assert "'=1+1,suffix" in skipped_table(files)


@pytest.mark.parametrize("text", [b"", b"a,b\n1,2\n", b"file,kind,reason\na\n", b"\xff\xfe"])
def test_another_table_is_refused(tmp_path, text):
    (tmp_path / "skipped.csv").write_bytes(text)
    with pytest.raises(DataError, match=r"skipped\.csv: not a table"):
        read_skipped_table(tmp_path / "skipped.csv")


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (["suffix"], "1 file"),
        (["empty"], "1 folder"),
        (["nested", "empty"], "2 folders"),
        (["suffix", "nested", "unreadable"], "3 files and folders"),
    ],
)
def test_folders_are_not_counted_as_files(kinds, words):
    assert skipped_count([SkippedFile("ann", kind, "a reason") for kind in kinds]) == words
