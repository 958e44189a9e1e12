"""Checksums of model files: what they find, and which files have none."""

import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from facetrain.errors import ModelError
from facetrain.models.checksum import CHECKSUM_KEY, checksum_of, checksum_of_onnx
from facetrain.models.embedding_model import open_model
from facetrain.models.onnx_layers import read_onnx_layers

CPU = torch.device("cpu")


def flip(path, place):
    """Flip a bit of the weights; `place` is from 0 to 1."""
    content = bytearray(path.read_bytes())
    start = 8 + struct.unpack_from("<Q", content)[0]
    content[start + int(place * (len(content) - start - 1))] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_a_flipped_bit_in_a_weight_is_an_error(model, place):
    open_model(model, CPU)
    flip(model, place)
    with pytest.raises(ModelError, match=r"model\.safetensors: .*damaged"):
        open_model(model, CPU)


def test_a_file_without_a_checksum_opens(model):
    from safetensors import safe_open

    with safe_open(model, "pt") as file:
        metadata = file.metadata()
    assert metadata.pop("sha256") == checksum_of(load_file(model))
    save_file(load_file(model), model, metadata)
    open_model(model, CPU)


def test_names_types_and_shapes_count_and_the_order_does_not():
    one, two = torch.zeros(2, 3), torch.arange(4.0)
    assert checksum_of({"a": one, "b": two}) == checksum_of({"b": two, "a": one})
    others = ({"b": one, "a": two}, {"a": one.view(3, 2), "b": two}, {"a": one.int(), "b": two})
    assert len({checksum_of({"a": one, "b": two}), *map(checksum_of, others)}) == 4


def test_damaged_weights_of_an_onnx_file_are_not_read_as_layers_either(tmp_path):
    onnx = pytest.importorskip("onnx")
    weight = onnx.numpy_helper.from_array(torch.ones(4, 3).numpy(), "w")
    image, embedding = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", size])
        for name, size in (("x", 3), ("y", 4))
    )
    node = onnx.helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "g", [image], [embedding], initializer=[weight])
    )
    onnx.helper.set_model_props(model, {CHECKSUM_KEY: checksum_of_onnx(model, tmp_path)})
    onnx.save(model, tmp_path / "m.onnx")
    read_onnx_layers(tmp_path / "m.onnx")
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(2 * torch.ones(4, 3).numpy(), "w"))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(
        ModelError, match=r"m\.onnx: .*damaged, or another program .* or remove sha256 from the meta"
    ):
        read_onnx_layers(tmp_path / "m.onnx")
