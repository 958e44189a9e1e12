"""Writer of MXNet files, with the names and the structure of InsightFace's networks."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

V1, V2, V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
KINDS = {"float32": 0, "float64": 1, "float16": 2, "uint8": 3, "int32": 4, "int8": 5, "int64": 6}


def params_bytes(arrays: dict[str, np.ndarray], version: int | None = V2) -> bytes:
    """Return the bytes of a .params file in a version of the format; None is the oldest, without a version."""
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
    """Builder of an MXNet graph; every method returns the number of the node that it adds last."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, object]] = []
        self.arrays: dict[str, np.ndarray] = {}

    def node(self, op: str, name: str, inputs: list[int], attrs: dict[str, str] | None = None) -> int:
        given = {"attrs": attrs} if attrs else {}
        self.nodes.append({"op": op, "name": name, **given, "inputs": [[i, 0, 0] for i in inputs]})
        return len(self.nodes) - 1

    def weight(self, kind: str, name: str, tensor: Tensor) -> int:
        self.arrays[f"{kind}:{name}"] = tensor.detach().float().numpy()
        return self.node("null", name, [])

    def conv(self, x: int, name: str, conv: nn.Conv2d) -> int:
        attrs = {
            "kernel": str(conv.kernel_size), "no_bias": "True", "num_filter": str(conv.out_channels),
            "num_group": str(conv.groups), "pad": str(conv.padding), "stride": str(conv.stride),
        }  # fmt: skip
        return self.node("Convolution", name, [x, self.weight("arg", f"{name}_weight", conv.weight)], attrs)

    def norm(self, x: int, name: str, norm: nn.BatchNorm2d | nn.BatchNorm1d, *, fixed: bool = False) -> int:
        # The stored value of a fixed gamma must never be used.
        gamma = torch.full_like(norm.weight, 7.0) if fixed else norm.weight
        inputs = [
            x,
            self.weight("arg", f"{name}_gamma", gamma),
            self.weight("arg", f"{name}_beta", norm.bias),
        ]
        inputs.append(self.weight("aux", f"{name}_moving_mean", norm.running_mean))
        inputs.append(self.weight("aux", f"{name}_moving_var", norm.running_var))
        return self.node("BatchNorm", name, inputs, {"eps": str(norm.eps), "fix_gamma": str(fixed)})

    def prelu(self, x: int, name: str, prelu: nn.PReLU) -> int:
        weight = self.weight("arg", f"{name}_gamma", prelu.weight)
        return self.node("LeakyReLU", name, [x, weight], {"act_type": "prelu"})

    def write(self, folder: Path) -> Path:
        symbol = {"nodes": self.nodes, "heads": [[len(self.nodes) - 1, 0, 0]]}
        (folder / "model-symbol.json").write_text(json.dumps(symbol))
        (folder / "model-0000.params").write_bytes(params_bytes(self.arrays))
        return folder / "model-symbol.json"


def write_iresnet(
    folder: Path, net: nn.Module, *, offset: float = 127.5, factor: float = 0.0078125, half: bool = False
) -> Path:
    """Write an IResNet like the LResNetE-IR networks of InsightFace's model zoo, including the softmax of the training.

    The network takes (p − offset) · factor for pixels p. The gamma of the last norm is fixed. `half`: with the casts of
    a training in float16.
    """
    g = Graph()
    x = g.node("identity", "id", [g.node("null", "data", [])])
    x = g.node("_minus_scalar", "_minusscalar0", [x], {"scalar": str(offset)})
    x = g.node("_mul_scalar", "_mulscalar0", [x], {"scalar": str(factor)})
    if half:
        x = g.node("Cast", "cast0", [x], {"dtype": "float16"})
    x = g.prelu(g.norm(g.conv(x, "conv0", net.conv1), "bn0", net.bn1), "relu0", net.prelu)
    added = 0
    for stage in range(1, 5):
        for unit, block in enumerate(net.get_submodule(f"layer{stage}"), 1):
            name = f"stage{stage}_unit{unit}"
            y = g.conv(g.norm(x, f"{name}_bn1", block.bn1), f"{name}_conv1", block.conv1)
            y = g.prelu(g.norm(y, f"{name}_bn2", block.bn2), f"{name}_relu1", block.prelu)
            y = g.norm(g.conv(y, f"{name}_conv2", block.conv2), f"{name}_bn3", block.bn3)
            if block.downsample is not None:
                conv, norm = block.downsample
                x = g.norm(g.conv(x, f"{name}_conv1sc", conv), f"{name}_sc", norm)
            x, added = g.node("elemwise_add", f"_plus{added}", [y, x]), added + 1
    x = g.node("Dropout", "dropout0", [g.norm(x, "bn1", net.bn2)], {"p": "0.4"})
    if half:
        x = g.node("Cast", "cast1", [x], {"dtype": "float32"})
    width = net.fc.out_features
    inputs = [
        x,
        g.weight("arg", "pre_fc1_weight", net.fc.weight),
        g.weight("arg", "pre_fc1_bias", net.fc.bias),
    ]
    x = g.node("FullyConnected", "pre_fc1", inputs, {"no_bias": "False", "num_hidden": str(width)})
    x = g.norm(x, "fc1", net.features, fixed=True)
    g.node("SoftmaxOutput", "softmax", [x, g.node("null", "softmax_label", [])])
    return g.write(folder)


def randomize(net: nn.Module, *, eps: float = 1e-5, seed: int = 0) -> nn.Module:
    """Give norms, PReLUs and biases of a network random values, as after training; return it in evaluation mode."""
    random = torch.Generator().manual_seed(seed)

    def draw(tensor: Tensor, low: float, high: float) -> None:
        tensor.data.copy_(torch.rand(tensor.shape, generator=random) * (high - low) + low)

    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.eps = eps
            if module.weight.requires_grad:
                draw(module.weight, 0.3, 0.8)
            draw(module.bias, -0.3, 0.3)
            draw(module.running_mean, -0.3, 0.3)
            draw(module.running_var, 0.5, 2.0)
        elif isinstance(module, nn.PReLU):
            draw(module.weight, -0.1, 0.5)
        elif isinstance(module, nn.Linear) and module.bias is not None:
            draw(module.bias, -0.3, 0.3)
    return net.eval()
