"""Ranges of activations with the smallest rounding error."""

# B images   C channels   H, W height and width   N numbers

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from facetrain.models.int8.network import Int8Network, Range

_NUMBERS_PER_IMAGE = 192
"""Numbers of a value that are taken from each image, for the search; its smallest and largest number are added."""
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
        if name not in rounded:
            return
        value_BN = value.flatten(1)
        chosen = torch.randint(
            value_BN.shape[1], (min(_NUMBERS_PER_IMAGE, value_BN.shape[1]),), generator=generator
        )
        ends_B2 = torch.stack([value_BN.amin(1), value_BN.amax(1)], 1)
        samples[name].append(torch.cat([value_BN[:, chosen].flatten(), ends_B2.flatten()]))

    with torch.no_grad():
        for image_BCHW in batches:
            network.embed(image_BCHW, rounds=False, observe=observe)
    found = {name: torch.cat(parts) for name, parts in samples.items()}
    return replace(network, ranges={name: _range_of(x_N, clips=clips) for name, x_N in found.items()})


def _range_of(x_N: Tensor, *, clips: bool) -> Range:
    low, high = min(float(x_N.min()), 0.0), max(float(x_N.max()), 0.0)
    best = Range(low, high)
    if not clips:
        return best
    # One end after the other, twice: the best place of one depends a little on the other.
    for end, furthest in 2 * (("low", low), ("high", high)):
        tried = [replace(best, **{end: furthest * share}) for share in _SHARES]
        best = min(tried, key=lambda one: float((one.round(x_N) - x_N).square().mean()))
    return best
