"""Weights and images that a hash of their names gives, and the layout of the published IR networks."""

import math
import zlib

import numpy as np
import torch

DEPTHS = {"18": (2, 2, 2, 2), "50": (3, 4, 14, 3), "101": (3, 13, 30, 3)}
"""Name of an IR network -> blocks in each stage."""


def noise(key, count):
    """Numbers from -1 to 1 that a hash of the key and the position gives."""
    x = np.arange(min(count, 65521), dtype=np.uint64) + np.uint64(zlib.crc32(key.encode()))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> np.uint64(shift))) * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return np.resize(x / 2**31 - 1, count)


def weight_of(name, shape):
    if name.endswith("num_batches_tracked"):
        return torch.zeros(shape, dtype=torch.int64)
    value = noise(name, math.prod(shape))
    if name.endswith("running_var"):
        value = 1 + 0.25 * value
    elif len(shape) == 1 and name.endswith("weight"):
        value = 0.6 + 0.3 * value
    elif len(shape) >= 2 and shape[0] > 1:
        value = value * math.sqrt(3 / math.prod(shape[1:]))
    else:
        value = 0.1 * value
    return torch.from_numpy(value).reshape(shape).float()


def images():
    return torch.from_numpy(noise("images", 2 * 3 * 112 * 112)).reshape(2, 3, 112, 112).float()


def ir_layout(depths):
    """Names and shapes of AdaFace's and CVLface's IR networks."""
    layout = {"input_layer.0.weight": (64, 3, 3, 3), "input_layer.2.weight": (64,)}
    layout |= norm_layout("input_layer.1", 64)
    number, before = 0, 64
    for depth, width in zip(depths, (64, 128, 256, 512), strict=True):
        for _ in range(depth):
            block = f"body.{number}"
            if before != width:
                layout[f"{block}.shortcut_layer.0.weight"] = (width, before, 1, 1)
                layout |= norm_layout(f"{block}.shortcut_layer.1", width)
            layout |= norm_layout(f"{block}.res_layer.0", before)
            layout[f"{block}.res_layer.1.weight"] = (width, before, 3, 3)
            layout |= norm_layout(f"{block}.res_layer.2", width)
            layout[f"{block}.res_layer.3.weight"] = (width,)
            layout[f"{block}.res_layer.4.weight"] = (width, width, 3, 3)
            layout |= norm_layout(f"{block}.res_layer.5", width)
            number, before = number + 1, width
    layout |= norm_layout("output_layer.0", 512)
    layout |= {"output_layer.3.weight": (512, 512 * 7 * 7), "output_layer.3.bias": (512,)}
    return layout | norm_layout("output_layer.4", 512, affine=False)


def norm_layout(name, channels, *, affine=True):
    parameters = ("weight", "bias") if affine else ()
    layout = {f"{name}.{part}": (channels,) for part in (*parameters, "running_mean", "running_var")}
    return layout | {f"{name}.num_batches_tracked": ()}
