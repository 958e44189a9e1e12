"""Test model with the inputs and outputs of YuNet: it detects a face at each white block of 32 × 32 pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from facetrain.face_landmarks import ARCFACE_TEMPLATE

FACE = 112
"""Pixels a side of the detected faces. Their landmarks are those of ArcFace's template."""


def write_detector(path: Path) -> Path:
    """Write an ONNX file with YuNet's twelve outputs; only those of stride 32 detect faces."""
    from onnx import TensorProto, helper, numpy_helper, save

    names, nodes, weights = ("cls", "obj", "bbox", "kps"), [], {}
    channels = {"cls": 1, "obj": 1, "bbox": 4, "kps": 10}
    size = np.log(FACE / 32)
    # For each cell, relative to its corner and in units of cells: the center of the box, the logarithm of its size, and
    # the landmarks.
    constant = {
        "bbox": [0.5, 0.5, size, size],
        "kps": ((ARCFACE_TEMPLATE - FACE / 2) / 32 + 0.5).reshape(-1).tolist(),
    }
    for stride in (8, 16, 32):
        for name in names:
            out = f"{name}_{stride}"
            kernel = np.zeros((channels[name], 3, stride, stride), np.float32)
            bias = np.array(constant.get(name, [0.0]), np.float32)
            if name in ("cls", "obj") and stride == 32:
                kernel += 1 / (3 * stride * stride * 20)  # (mean − 235) / 20: below 0.6 unless it is white
                bias -= 235 / 20
            weights |= {f"{out}.weight": kernel, f"{out}.bias": bias}
            nodes += [
                helper.make_node(
                    "Conv", ["input", f"{out}.weight", f"{out}.bias"], [f"{out}.map"],
                    kernel_shape=[stride, stride], strides=[stride, stride],
                ),
                helper.make_node("Transpose", [f"{out}.map"], [f"{out}.last"], perm=[0, 2, 3, 1]),
                helper.make_node("Reshape", [f"{out}.last", f"{out}.shape"], [out]),
            ]  # fmt: skip
            weights[f"{out}.shape"] = np.array([1, -1, channels[name]], np.int64)
    graph = helper.make_graph(
        nodes,
        "yunet",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 3, "height", "width"])],
        [
            helper.make_tensor_value_info(f"{name}_{stride}", TensorProto.FLOAT, [1, None, channels[name]])
            for name in names
            for stride in (8, 16, 32)
        ],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    save(model, path)
    return path
