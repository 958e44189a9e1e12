"""Hostile files: at most ten seconds and twice the file plus 256 MiB, and one line of an error of facetrain."""

import json
import subprocess
import sys

import pytest

from facetrain.data.open_dataset import open_dataset
from facetrain.errors import DataError, ModelError
from facetrain.models.onnx_network import open_onnx
from facetrain.models.weight_files import read_weights
from facetrain.verify.sets.slice_table import slice_columns
from tests.support.bombs import (
    MAX_SECONDS,
    SPARE_MIB,
    write_constant_of_shape,
    write_external_onnx,
)
from tests.support.command import environment
from tests.support.datasets import write_tar


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
    assert done.returncode == 0 and len(found) > 30, done.stderr
    for one in found:
        assert not one["message"].startswith("unexpected ") and "\n" not in one["message"], one
        assert one["seconds"] < MAX_SECONDS, one
        assert one["mib"] <= SPARE_MIB + 2 * one["bytes"] / (1 << 20), one


def test_a_nested_label_in_a_tar_is_an_error_of_the_dataset(tmp_path):
    with pytest.raises(DataError, match="contains no identity"):
        write_tar(tmp_path / "a.tar", {"a.jpg": b"x", "a.json": b"[" * 1_000_000})
        open_dataset(tmp_path)


def test_a_graph_that_declares_or_computes_huge_values_is_refused_before_it_is_loaded(tmp_path):
    pytest.importorskip("onnxruntime")
    (tmp_path / "w").touch()
    with pytest.raises(ModelError, match=" w .*1099511627776.*4,398,046,511,104 bytes"):
        open_onnx(write_external_onnx(tmp_path / "a.onnx", "w", dims=1 << 40))
    for doublings in (0, 32):
        with pytest.raises(ModelError, match=r" c\d+ .*2,147,483,648"):
            open_onnx(write_constant_of_shape(tmp_path / "b.onnx", doublings=doublings, size=1 << 30))
    with pytest.raises(ModelError, match=r" x .*20000 × 3 × 112 × 112"):
        open_onnx(write_constant_of_shape(tmp_path / "b.onnx", size=1, batch=20_000))


def test_one_long_value_of_a_slice_does_not_widen_the_others(tmp_path):
    values = ["y"] * 200_000 + ["x" * 100_000]
    assert slice_columns(tmp_path, {"name": values})["name"].nbytes < 2_000_000


def test_an_archive_in_several_parts_is_no_weight_file(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"PK\6\7" + bytes(12) + b"\2\0\0\0" + b"PK\5\6" + bytes(18))
    with pytest.raises(ModelError, match="damaged or incomplete"):
        read_weights(tmp_path / "a.pt")
