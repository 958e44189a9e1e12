"""Accuracy that static int8 costs InsightFace's MobileFaceNet y1, on real faces."""

import json

import pytest

from tests.support.command import facetrain
from tests.support.shared import shared_path

pytest.importorskip("onnxscript")


@pytest.mark.long
def test_static_int8_of_y1_loses_at_most_0_15_points_on_pairs_of_lfw(tmp_path):
    process = facetrain(
        "export", shared_path("real/y1/model-symbol.json"), "--format", "onnx", "--int8", "static",
        "--images", shared_path("real/faces_train"), "--output", tmp_path / "y1.onnx",
        "--target", "lfw_folds1-2", "--data-dir", shared_path("real/lfw_verification"), "--json",
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    accuracy = report["rates"]["lfw_folds1-2"]["accuracy"]
    assert accuracy["model"] - accuracy["file"] <= 0.0015
    assert report["cosine"]["mean"] > 0.99
