import json
import struct

import numpy as np
import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.checkpoint.model_file import open_model
from facetrain.checkpoint.mxnet_params import read_params
from facetrain.checkpoint.mxnet_symbol import open_mxnet
from facetrain.errors import ModelError

V1, V2, V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
KINDS = {"float32": 0, "float64": 1, "float16": 2, "uint8": 3, "int32": 4, "int8": 5, "int64": 6}


def params_bytes(arrays: dict[str, np.ndarray], version: int | None = V2) -> bytes:
    out = struct.pack("<QQQ", 0x112, 0, len(arrays))
    for array in arrays.values():
        if version is None:
            out += struct.pack(f"<I{array.ndim}I", array.ndim, *array.shape)
        else:
            out += struct.pack("<I", version) + (b"" if version == V1 else struct.pack("<i", 0))
            out += struct.pack(f"<i{array.ndim}q", array.ndim, *array.shape)
        out += struct.pack("<iii", 1, 0, KINDS[str(array.dtype)]) + array.tobytes()
    out += struct.pack("<Q", len(arrays))
    return out + b"".join(struct.pack("<Q", len(name)) + name.encode() for name in arrays)


class Graph:
    """Writes the symbol of an IResNet as InsightFace's MXNet code names and nests it."""

    def __init__(self):
        self.nodes, self.arrays = [], {}

    def node(self, op, name, inputs, attrs=None):
        self.nodes.append(
            {"op": op, "name": name, "attrs": attrs or {}, "inputs": [[i, 0, 0] for i in inputs]}
        )
        return len(self.nodes) - 1

    def weight(self, name, tensor):
        self.arrays[name] = tensor.detach().numpy()
        return self.node("null", name, [])

    def conv(self, x, name, conv):
        attrs = {"kernel": str(conv.kernel_size), "stride": str(conv.stride), "pad": str(conv.padding)}
        weight = self.weight(f"arg:{name}_weight", conv.weight)
        return self.node("Convolution", name, [x, weight], attrs | {"no_bias": "True"})

    def bn(self, x, name, bn, *, fixed=False):
        gamma = torch.full_like(bn.weight, 7.0) if fixed else bn.weight
        inputs = [self.weight(f"arg:{name}_gamma", gamma), self.weight(f"arg:{name}_beta", bn.bias)]
        inputs.append(self.weight(f"aux:{name}_moving_mean", bn.running_mean))
        inputs.append(self.weight(f"aux:{name}_moving_var", bn.running_var))
        return self.node("BatchNorm", name, [x, *inputs], {"eps": str(bn.eps), "fix_gamma": str(fixed)})

    def prelu(self, x, name, prelu):
        weight = self.weight(f"arg:{name}_gamma", prelu.weight)
        return self.node("LeakyReLU", name, [x, weight], {"act_type": "prelu"})


def write_iresnet(folder, net):
    g = Graph()
    x = g.node("identity", "id", [g.node("null", "data", [])])
    x = g.node("_minus_scalar", "_minusscalar0", [x], {"scalar": "127.5"})
    x = g.node("_mul_scalar", "_mulscalar0", [x], {"scalar": str(1 / 127.5)})
    x = g.prelu(g.bn(g.conv(x, "conv0", net.conv1), "bn0", net.bn1), "relu0", net.prelu)
    for stage in range(1, 5):
        for unit, block in enumerate(net.get_submodule(f"layer{stage}"), 1):
            name = f"stage{stage}_unit{unit}"
            y = g.bn(
                g.conv(g.bn(x, f"{name}_bn1", block.bn1), f"{name}_conv1", block.conv1),
                f"{name}_bn2",
                block.bn2,
            )
            y = g.conv(g.prelu(y, f"{name}_relu1", block.prelu), f"{name}_conv2", block.conv2)
            y = g.bn(y, f"{name}_bn3", block.bn3)
            if block.downsample is not None:
                x = g.bn(g.conv(x, f"{name}_conv1sc", block.downsample[0]), f"{name}_sc", block.downsample[1])
            x = g.node("elemwise_add", f"_plus{stage}{unit}", [y, x])
    x = g.node("Dropout", "dropout0", [g.bn(x, "bn1", net.bn2)], {"p": "0.4"})
    inputs = [x, g.weight("arg:pre_fc1_weight", net.fc.weight), g.weight("arg:pre_fc1_bias", net.fc.bias)]
    x = g.bn(
        g.node("FullyConnected", "pre_fc1", inputs, {"num_hidden": "16"}), "fc1", net.features, fixed=True
    )
    g.node("SoftmaxOutput", "softmax", [x, g.node("null", "softmax_label", [])])
    for node in g.nodes:
        node["name"] = node["name"].split(":")[-1]
    (folder / "model-symbol.json").write_text(
        json.dumps({"nodes": g.nodes, "heads": [[len(g.nodes) - 1, 0, 0]]})
    )
    (folder / "model-0000.params").write_bytes(params_bytes(g.arrays))


@pytest.mark.parametrize("version", [None, V1, V2, V3])
def test_arrays_of_every_version_and_type_are_read(tmp_path, version):
    arrays = {f"arg:{kind}": np.arange(6).reshape(2, 3).astype(kind) for kind in KINDS}
    (tmp_path / "a.params").write_bytes(params_bytes(arrays, version))
    for name, tensor in read_params(tmp_path / "a.params").items():
        assert str(tensor.dtype) == f"torch.{name}"
        np.testing.assert_array_equal(tensor.numpy(), arrays[f"arg:{name}"])


def test_a_params_file_that_is_cut_or_changed_anywhere_is_refused_or_read(tmp_path):
    data = params_bytes({"arg:a": np.ones((2, 3), "float32"), "aux:b": np.ones(2, "float32")})
    path = tmp_path / "a.params"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ModelError):
            read_params(path)
    for place in range(len(data)):
        path.write_bytes(data[:place] + b"\xff" + data[place + 1 :])
        try:
            read_params(path)
        except ModelError as error:
            assert str(path) in str(error)


def test_an_iresnet_with_fixed_gamma_and_prelu_gives_the_embeddings_of_torch(tmp_path):
    torch.manual_seed(0)
    net = build_backbone("iresnet", layers=(2, 1, 1, 1), widths=(8, 8, 16, 16), embedding_size=16)
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.running_mean)
    write_iresnet(tmp_path, net.eval())
    image = torch.randint(0, 256, (3, 112, 112, 3), dtype=torch.uint8)
    for name in ("model-symbol.json", "model-0000.params"):
        opened = open_model(tmp_path / name, torch.device("cpu"))
        assert opened.embedding_size == 16
        with torch.no_grad():
            found = opened.network(opened.prepare(image))
            expected = net((image.permute(0, 3, 1, 2).float() - 127.5) / 127.5)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("symbol", "said"),
    [
        ("{", "no graph"),
        ("[]", "no graph"),
        ('{"nodes": [{"op": "Custom", "name": "c", "inputs": []}], "heads": [[0, 0, 0]]}', "c is a Custom"),
        (
            '{"nodes": [{"op": "Flatten", "name": "f", "inputs": [[0, 0]]}], "heads": [[0, 0, 0]]}',
            "before its inputs",
        ),
    ],
)
def test_a_graph_that_cannot_be_run_is_refused(tmp_path, symbol, said):
    (tmp_path / "m-symbol.json").write_text(symbol)
    with pytest.raises(ModelError, match="m-0000.params is not beside it"):
        open_mxnet(tmp_path / "m-symbol.json")
    (tmp_path / "m-0000.params").write_bytes(params_bytes({}))
    with pytest.raises(ModelError, match=said):
        open_mxnet(tmp_path / "m-symbol.json")
