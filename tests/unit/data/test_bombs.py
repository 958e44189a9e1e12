"""Hostile files: at most ten seconds and twice the file plus 256 MiB, and one line of an error of facetrain."""

import json
import subprocess
import sys

import pytest

from facetrain.data.open_dataset import open_dataset
from facetrain.errors import DataError
from tests.support.bombs import MAX_SECONDS, SPARE_MIB, _tar
from tests.support.command import environment


@pytest.mark.long
def test_no_reader_exceeds_the_limits_on_any_bomb():
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.bombs"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(found) > 25, done.stderr
    for one in found:
        assert "unexpected" not in one["message"] and "\n" not in one["message"], one
        assert one["seconds"] < MAX_SECONDS, one
        assert one["mib"] <= SPARE_MIB + 2 * one["bytes"] / (1 << 20), one


def test_a_nested_label_in_a_tar_is_an_error_of_the_dataset(tmp_path):
    with pytest.raises(DataError, match="contains no identity"):
        open_dataset(_tar(tmp_path / "a", "a.json", b"[" * 1_000_000))
