"""Digests of the files of a model."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from facetrain.errors import ModelError
from facetrain.models.model_digest import digest_model, digest_model_files
from facetrain.models.model_file import save_model
from tests.support.models import write_model


def flip_last_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def write_onnx(path):
    """Write a graph whose only weight is in the file `weights` beside it."""
    onnx = pytest.importorskip("onnx")
    image, sums = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4]) for name in ("x", "y")
    )
    weight = onnx.numpy_helper.from_array(np.ones(4, np.float32), "w")
    node = onnx.helper.make_node("Add", ["x", "w"], ["y"])
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [image], [sums], [weight]))
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)


def test_weights_of_an_onnx_file_in_another_file_count(tmp_path):
    path = tmp_path / "m.onnx"
    write_onnx(path)
    model = SimpleNamespace(network=nn.Identity())  # no tensors, as a network in onnxruntime
    before = digest_model_files(path)
    assert digest_model(model, path) == before
    flip_last_bit(tmp_path / "weights")
    assert digest_model_files(path) != before
    assert digest_model(model, path) == digest_model_files(path)


@pytest.mark.parametrize("given", ["model-symbol.json", "model-0003.params"])
def test_both_files_of_an_mxnet_model_count(given, tmp_path):
    files = [tmp_path / "model-symbol.json", tmp_path / "model-0003.params"]
    for file in files:
        file.write_bytes(b"data")
    digests = [digest_model_files(tmp_path / given)]
    for file in files:
        flip_last_bit(file)
        digests.append(digest_model_files(tmp_path / given))
    assert len(set(digests)) == 3


def test_the_color_order_beside_weights_counts_and_nothing_else_that_is_stated_there(tmp_path):
    files = {
        name: tmp_path / name for name in ("cvlface.pt", "arcface.pt", "other.safetensors", "own.safetensors")
    }
    torch.save({"net.conv1.weight": torch.ones(3)}, files["cvlface.pt"])
    torch.save({"conv1.weight": torch.ones(3)}, files["arcface.pt"])
    save_file({"conv1.weight": torch.ones(3)}, files["other.safetensors"])
    write_model(files["own.safetensors"])
    digests = {name: [digest_model_files(file)] for name, file in files.items()}
    for place in ("config.json", "pretrained_model/model.yaml", "cvlface.yaml"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        for more in ("", ', "more": 1'):
            for color_space in ("RGB", "BGR"):
                (tmp_path / place).write_text(f'{{"color_space": "{color_space}"{more}}}')
                for name, file in files.items():
                    digests[name].append(digest_model_files(file))
    unstated, *stated = digests.pop("cvlface.pt")
    assert stated == stated[:2] * 6 and len({unstated, *stated}) == 3
    assert all(len(set(same)) == 1 for same in digests.values())


def test_another_model_in_the_place_of_a_file_has_another_digest_and_a_missing_one_is_an_error(tmp_path):
    path = tmp_path / "model.safetensors"
    write_model(path)
    before = digest_model_files(path)
    assert digest_model_files(tmp_path) == before
    write_model(path)
    assert digest_model_files(path) != before
    path.unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors: No such file"):
        digest_model_files(path)


def test_thresholds_do_not_change_the_digest_of_a_model_but_the_rest_of_its_description_does(tmp_path):
    path, state = tmp_path / "model.safetensors", {"weight": torch.ones(3)}
    digests = []
    for more in ({}, {"thresholds": []}, {"thresholds": [], "step": 2}):
        save_model(path, state, {"backbone": {"name": "r18"}} | more)
        digests.append(digest_model_files(path))
    assert digests[0] == digests[1] != digests[2]
    save_file(state, path)  # of another program, without a checksum
    before = digest_model_files(path)
    flip_last_bit(path)
    assert digest_model_files(path) != before
