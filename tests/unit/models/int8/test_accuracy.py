"""Accuracy that static int8 costs InsightFace's MobileFaceNet y1, on real faces."""

import json
from pathlib import Path

import pytest

from tests.support.command import output_of
from tests.support.shared import shared_path

pytest.importorskip("onnxscript")


@pytest.mark.long
def test_static_int8_of_y1_loses_at_most_0_15_points_on_pairs_of_lfw(tmp_path):
    model, file = shared_path("real/y1/model-symbol.json"), tmp_path / "y1.onnx"
    images = shared_path("real/faces_train")
    report = output_of(
        "export", model, "--format", "onnx", "--int8", "--images", images, "--output", file, "--json"
    )
    # Without VNNI, sums of the 8-bit weights can overflow.
    lowest = 0.99 if "vnni" in Path("/proc/cpuinfo").read_text() else 0.96
    assert json.loads(report)["cosine"]["mean"] > lowest
    sets = ["--target", "lfw_folds1-2", "--data-dir", shared_path("real/lfw_verification"), "--json", "-"]
    compared = json.loads(output_of("eval", file, "--against", model, *sets))
    accuracy = compared["differences"]["lfw_folds1-2"]["accuracy"]
    assert accuracy["second"] - accuracy["first"] <= 0.0015
