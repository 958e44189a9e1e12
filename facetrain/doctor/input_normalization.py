"""Check that initial weights were trained on the input that facetrain gives them.

The first batch norm of a network keeps the mean and the variance of its input during training. Training images,
normalized in each of the usual ways, go through the layers before it: the best match shows the normalization with
which the weights were trained.
"""

# B images   C channels   H, W height and width

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from facetrain.doctor.check_result import CheckResult, passed, warning

_EXPECTED = "(pixels − 127.5) / 127.5, RGB"
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CLEAR_FACTOR = 4.0
"""Ratio of two mismatches from which the better one is likely; from half of it on, it is possible."""
_LARGE_MISMATCH = 0.25
"""Mismatch of the expected input below which no other input is considered; 0.10 for a published network."""


class _FirstNormReachedError(Exception):
    """Carries the first batch norm and its input out of the forward call."""

    def __init__(self, norm: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.norm, self.x = norm, x


def check_normalization(
    path: str, network: nn.Module, image_BHWC: np.ndarray, merged_norms: Iterable[str] = ()
) -> CheckResult:
    """Compare the first batch norm's statistics with its input from images normalized in several ways.

    Args:
        path: file of the weights, for the message.
        network: network with the weights, on the CPU.
        image_BHWC: training images, uint8 RGB.
        merged_norms: names of norms whose statistics the file does not have.
    """
    check = "initial normalization"
    pixels_BCHW = torch.from_numpy(np.ascontiguousarray(image_BHWC)).permute(0, 3, 1, 2).float()
    without_statistics = {id(network.get_submodule(name)) for name in merged_norms}
    mismatch = {}
    for name, input_BCHW in _inputs(pixels_BCHW).items():
        reached = _first_norm_input(network, input_BCHW)
        if reached is None or id(reached.norm) in without_statistics:
            return passed(check, f"{path}: not checked, because it has no batch norm's statistics")
        mismatch[name] = _mismatch(reached.norm, reached.x)
    best, expected = min(mismatch, key=mismatch.__getitem__), mismatch[_EXPECTED]
    factor = expected / max(mismatch[best], 1e-6)
    if best == _EXPECTED or expected < _LARGE_MISMATCH or factor < _CLEAR_FACTOR / 2:
        return passed(check, f"{path}: its statistics fit {_EXPECTED} (mismatch {expected:.2f})")
    return warning(
        check,
        f"{path}: its statistics fit {best} better than {_EXPECTED} (mismatch {mismatch[best]:.2f} instead of "
        f"{expected:.2f})",
        "these weights were probably trained on other input than facetrain's: convert them, or start without them",
        "likely" if factor > _CLEAR_FACTOR else "possible",
    )


def _inputs(pixels_BCHW: Tensor) -> dict[str, Tensor]:
    expected = (pixels_BCHW - 127.5) / 127.5
    mean, std = (torch.tensor(values)[:, None, None] for values in (_IMAGENET_MEAN, _IMAGENET_STD))
    return {
        _EXPECTED: expected,
        "(pixels − 127.5) / 127.5, BGR": expected.flip(1),
        "pixels from 0 to 255": pixels_BCHW,
        "pixels from 0 to 255, BGR": pixels_BCHW.flip(1),
        "pixels / 255": pixels_BCHW / 255,
        "the mean and deviation of ImageNet": (pixels_BCHW / 255 - mean) / std,
        "images normalized twice": (expected - 127.5) / 127.5,
    }


def _first_norm_input(network: nn.Module, input_BCHW: Tensor) -> _FirstNormReachedError | None:
    """Run the network up to its first batch norm; None if it has none."""

    def stop(norm: nn.Module, inputs: tuple[Tensor]) -> None:
        raise _FirstNormReachedError(norm, inputs[0])

    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    # On every norm, because the order of modules is not the order of their calls.
    hooks = [norm.register_forward_pre_hook(stop) for norm in norms]
    was_training = network.training
    try:
        with torch.no_grad():
            network.eval()(input_BCHW)
    except _FirstNormReachedError as reached:
        return reached
    finally:
        network.train(was_training)
        for hook in hooks:
            hook.remove()
    return None


def _mismatch(norm: nn.Module, x: Tensor) -> float:
    """Return the median over the channels of the squared differences in mean (in deviations) and log variance."""
    x_CN = x.double().transpose(0, 1).flatten(1)
    mean_C, variance_C = x_CN.mean(1), x_CN.var(1)
    known_mean_C, known_variance_C = (
        norm.get_buffer(name).double() for name in ("running_mean", "running_var")
    )
    # A channel without variance is dead: it has no information about the input.
    alive_C = known_variance_C > 1e-4 * known_variance_C.max()
    known_C = known_variance_C[alive_C]
    # In units of the stored deviation, and in the logarithm: a factor of 2 weighs as much as one of 1/2.
    offset_C = (mean_C[alive_C] - known_mean_C[alive_C]).square() / known_C
    spread_C = (variance_C[alive_C].clamp(min=1e-12) / known_C).log().square()
    return float((offset_C + spread_C).median())
