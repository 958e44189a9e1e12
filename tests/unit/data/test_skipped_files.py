from facetrain.data.skipped_files import SkippedFile, read_skipped_table, skipped_table


def test_a_table_of_skipped_files_is_read_back_with_any_names(tmp_path):
    names = ["ann/1.txt", "-1234/a.txt", "=1+1", "'-a", "'a", "a,b\n", ""]
    files = [SkippedFile(name, "suffix", "a reason") for name in names]
    (tmp_path / "skipped.csv").write_text(skipped_table(files))
    assert read_skipped_table(tmp_path / "skipped.csv") == files
    assert "'=1+1,suffix" in skipped_table(files)
