"""Ranges of activations with the smallest rounding error."""

# B images   C channels   H, W height and width   N numbers

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from facetrain.models.int8.network import Int8Network, Range

_NUMBERS_PER_IMAGE = 192
"""Numbers of a value that are taken from each image, for the search."""
_SHARES = [n / 40 for n in range(40, 11, -1)]
"""Ends of the range that are tried, as shares of the smallest and the largest number."""


def find_ranges(network: Int8Network, batches: Iterable[Tensor], *, clips: bool = True) -> Int8Network:
    """Return the network with ranges of its rounded values, from the float network on images.

    Args:
        network: Layers; its ranges are replaced.
        batches: Prepared images (B, 3, H, W).
        clips: Whether a range may leave out the largest numbers, to round the others more finely: it is then the one
            with the smallest mean squared error. Otherwise it is from the smallest to the largest number.
    """
    rounded = set(network.rounded_values())
    samples: dict[str, list[Tensor]] = {name: [] for name in rounded}
    generator = torch.Generator().manual_seed(0)

    def observe(name: str, value: Tensor) -> None:
        if name in rounded:
            samples[name].append(_sample(value.flatten(1), generator))

    with torch.no_grad():
        for image_BCHW in batches:
            network.embed(image_BCHW, rounds=False, observe=observe)
    found = {name: torch.cat(parts, 1) for name, parts in samples.items()}
    return replace(
        network, ranges={name: _range_of(*both_2N, clips=clips) for name, both_2N in found.items()}
    )


def _sample(value_BN: Tensor, generator: torch.Generator) -> Tensor:
    """Return some numbers of each image and its two ends, with the count of numbers that each represents, (2, N).

    Each end counts once. With the weight of a random number, the ends would be 1 % of the sample instead of 2 numbers
    of thousands, and no range would leave them out.
    """
    images, size = value_BN.shape
    count = min(_NUMBERS_PER_IMAGE, size)
    chosen_BN = value_BN[:, torch.randint(size, (count,), generator=generator)]
    ends_B2 = torch.stack([value_BN.amin(1), value_BN.amax(1)], 1)
    x_N = torch.cat([chosen_BN.flatten(), ends_B2.flatten()])
    weight_N = torch.ones_like(x_N)
    weight_N[: images * count] = size / count
    return torch.stack([x_N, weight_N])


def _range_of(x_N: Tensor, weight_N: Tensor, *, clips: bool) -> Range:
    low, high = min(float(x_N.min()), 0.0), max(float(x_N.max()), 0.0)
    best = Range(low, high)
    if not clips:
        return best
    # One end after the other, twice: the best place of one depends a little on the other.
    for end, furthest in 2 * (("low", low), ("high", high)):
        tried = [replace(best, **{end: furthest * share}) for share in _SHARES]
        best = min(tried, key=lambda one: float((one.round(x_N) - x_N).square() @ weight_N))
    return best
