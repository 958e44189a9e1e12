"""Compare the fused trunk with the plain one in float64, and print the errors.

Run with TRITON_INTERPRET=1, or on a GPU.
"""

import copy
import json

import torch
from torch import nn

from facetrain.backbone.fused_iresnet import FusedTrunk, _Context, through_batch_norm
from facetrain.backbone.iresnet import IResNet
from facetrain.backbone.kernels import launch
from facetrain.backbone.kernels.normalize import normalize
from facetrain.backbone.kernels.statistics import partial_statistics

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTHS = (16, 24, 32, 70)
"""No multiples of a kernel's tile but one; oneDNN's strided 1 × 1 convolution fails below 16 channels."""


def network(side: int) -> IResNet:
    torch.manual_seed(0)
    net = IResNet((2, 1, 1, 1), WIDTHS, embedding_size=16, image_size=side)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
        elif isinstance(module, nn.PReLU):
            nn.init.uniform_(module.weight, -0.2, 0.5)
    return net.to(DEVICE, memory_format=torch.channels_last)


def step(net: IResNet, trunk, image: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return result, gradients and buffers of two training steps without an update, in float64."""
    for _ in range(2):
        net.zero_grad()
        feature = trunk(image)
        weight = torch.sin(torch.arange(feature.numel(), dtype=torch.float64)).view(feature.shape)
        feature.backward(weight.to(feature))
    found = {"result": feature.detach()}
    found |= {f"gradient {name}": p.grad for name, p in net.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": buffer for name, buffer in net.named_buffers() if "features" not in name}
    return {name: tensor.cpu().double() for name, tensor in found.items()}


def errors(
    dtype: torch.dtype, batch: int, side: int, *, offset: float = 0.0, programs: int = 0
) -> dict[str, dict[str, float]]:
    """Return the errors of the plain and of the fused trunk, relative to the L2 norm of each true tensor.

    Args:
        dtype: dtype of the activations.
        batch: images.
        side: width and height of an image.
        offset: is added to the images, so that the mean of an activation is far above its deviation.
        programs: programs along the rows, each with several tiles; 0: as many as on a GPU, each with one.
    """
    if programs:
        launch.programs_along_rows = lambda x: min(-(-launch.size_of(x)[0] // launch.BLOCK_ROWS), programs)
    plain = network(side)
    image = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(1)) + offset
    image = image.to(DEVICE).contiguous(memory_format=torch.channels_last)
    fused, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    true = step(exact, exact.trunk, image.double())
    narrow = {"device_type": DEVICE.type, "dtype": dtype, "enabled": dtype != torch.float32}

    def in_precision(trunk):
        def run(x):
            with torch.autocast(**narrow):
                return trunk(x)

        return run

    found = {
        "plain": step(plain, in_precision(plain.trunk), image),
        "fused": step(fused, in_precision(FusedTrunk(fused)), image),
    }
    # The gradient of these biases is zero: a batch norm follows that removes every constant, except for the last one.
    zero = [name for name, tensor in true.items() if tensor.abs().max() < 1e-9]
    return {
        name: {
            way: ((tensors[name] - tensor).norm() / tensor.norm().clamp_min(1e-9)).item()
            for way, tensors in found.items()
        }
        for name, tensor in true.items()
        if name not in zero
    }


def weight_error(dtype: torch.dtype, mean: float) -> dict[str, dict[str, float]]:
    """Return the errors of the weight gradient of conv1(batch norm(x)), for x with deviation 1, without a network."""
    torch.manual_seed(0)
    convolution, norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
    nn.init.normal_(norm.bias, 0, 0.3)
    x, grad = (torch.randn(2, 16, 9, 9) + mean).to(dtype), torch.randn(2, 16, 9, 9).to(dtype)
    x, grad = (t.to(DEVICE).contiguous(memory_format=torch.channels_last) for t in (x, grad))
    convolution, norm = convolution.to(DEVICE, memory_format=torch.channels_last), norm.to(DEVICE)
    y = copy.deepcopy(norm).double()(x.double())
    true, plain = (
        torch.nn.grad.conv2d_weight(y.to(kind), convolution.weight.shape, grad.to(kind), padding=1).double()
        for kind in (torch.float64, dtype)
    )
    context = _Context({convolution: convolution.weight.detach().to(dtype)})
    stats = context.statistics(norm, partial_statistics(x))
    _, _, normed = normalize(x, stats, normed=True)
    total = grad.float().sum((0, 2, 3))
    grad_weight, _ = through_batch_norm(context, convolution, grad, normed, stats, total)
    errors = {"plain": plain, "fused": grad_weight.double()}
    return {"gradient": {way: ((each - true).norm() / true.norm()).item() for way, each in errors.items()}}


def main() -> None:
    # The interpreter cuts float32 off to bfloat16 instead of rounding it; a GPU rounds.
    narrow = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    found = {
        "float32": errors(torch.float32, 3, 9),
        "float32, mean far above the deviation": errors(torch.float32, 2, 8, offset=30.0),
        "16 bits": errors(narrow, 3, 16),
        "16 bits, weight of a convolution of inputs with a mean of 50 deviations": weight_error(narrow, 50.0),
        "float32, one program, one image, 7 x 7": errors(torch.float32, 1, 28, programs=1),
    }
    for programs in (2, 3, 4):
        found[f"float32, {programs} programs"] = errors(torch.float32, 3, 16, programs=programs)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
