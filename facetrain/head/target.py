"""Target class of each sample: its center, its cosine in full precision, the margin on it, how often it is nearest."""

# G gathered batch   D embedding   K this rank's classes   S sampled of K

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from facetrain.distributed import collectives
from facetrain.head.class_centers import RowTable
from facetrain.head.margins.base import Margin, TargetCosine
from facetrain.head.sampling import SampledClasses


@dataclass(frozen=True)
class TargetClass:
    """Target classes of the gathered batch; entries of samples whose class is on another rank have no meaning."""

    position_G: Tensor
    """Position of the target class among the S classes that take part; −1 if it is on another rank."""
    is_local_G: Tensor
    """True if this rank holds the target class."""
    cos_G: Tensor
    """Target cosine before the margin; 0 if it is on another rank, unless the margin needs all of them."""
    center_GD: Tensor
    """Target center, of unit length; zeros if it is on another rank."""
    inverse_norm_G: Tensor
    """1 / |w| of that center."""
    with_margin: TargetCosine

    def logit(self, scale: float) -> Tensor:
        """Return the target logit with the margin (G,), −∞ if another rank has the class.

        −∞ adds nothing to the sums of these ranks, and the maximum over the ranks finds the logit.
        """
        return torch.where(self.is_local_G, self.with_margin.value_G * scale, -torch.inf)

    def columns(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return whether the target class is in positions [start, stop), and its column there (any, if it is not)."""
        inside_G = (self.position_G >= start) & (self.position_G < stop)
        return inside_G, (self.position_G - start).clamp(0, stop - start - 1)

    def order(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the samples in the order of their target classes, and where in it those of each of `size` begin.

        int64 (G,) and int32 (size + 1,).
        """
        # Stable, so that samples of one center are always added in the same order.
        position_G, sample_G = self.position_G.sort(stable=True)
        class_S1 = torch.arange(size + 1, device=position_G.device)
        return sample_G, torch.searchsorted(position_G, class_S1, out_int32=True)


def target_rows(sampled: SampledClasses) -> Tensor:
    """Return the row of each target class, where the tables are; an arbitrary row for classes on other ranks."""
    if sampled.target_row_G is not None:
        return sampled.target_row_G
    position_G = sampled.position_G.clamp_min(0)
    return position_G if sampled.index_S is None else sampled.index_S[position_G]


def find_target(
    unit_GD: Tensor,
    norm_G: Tensor | None,
    sampled: SampledClasses,
    weight: RowTable,
    margin: Margin,
    group: collectives.ProcessGroup | None,
    *,
    learns: bool = True,
) -> TargetClass:
    """Compute the cosine of each unit embedding to its target center, and apply the margin.

    `learns`: the margin's running averages take in this batch.

    Collective if the margin needs all target cosines: an all-reduce of one number per sample.
    """
    position_G, index_S = sampled.position_G, sampled.index_S
    # Everything below is computed for the whole batch, also where another rank has the class: to select the samples
    # of this rank, the host would have to wait for the device to count them.
    is_local_G = position_G >= 0
    center_GD, inverse_norm_G = torch.zeros_like(unit_GD), unit_GD.new_ones(len(unit_GD))
    cos_G = unit_GD.new_zeros(len(unit_GD))
    # A rank without classes in the step has no row to use in place of the others' targets.
    if len(weight.data if index_S is None else index_S):
        weight_GD = weight.fetch(target_rows(sampled)).to(unit_GD.dtype)
        # In the precision of the embeddings, whatever the dtype of the large products: the slope of an angular margin
        # grows without bound near a cosine of 1.
        inverse_norm_G = torch.linalg.vector_norm(weight_GD, dim=1).clamp_min(1e-12).reciprocal()
        center_GD = torch.where(is_local_G[:, None], weight_GD * inverse_norm_G[:, None], 0)
        # Rounding can leave [−1, 1], where arccos is NaN.
        cos_G = (torch.linalg.vecdot(unit_GD, weight_GD) * inverse_norm_G).clamp(-1, 1)
        cos_G = torch.where(is_local_G, cos_G, 0)
    if margin.needs_all_target_cosines:
        # All ranks but one add 0.
        cos_G = collectives.sum_(cos_G, group)
    if learns:
        # Before `apply`: the formulas use the averages with this batch in them, as the authors' codes do.
        margin.update_averages(norm_G, cos_G)
    return TargetClass(
        position_G,
        is_local_G,
        cos_G,
        center_GD,
        inverse_norm_G,
        with_margin=margin.apply(cos_G, norm_G),
    )


class NearestCount:
    """Number of samples whose target class was the nearest of the step's classes."""

    def __init__(self, group: collectives.ProcessGroup | None) -> None:
        self._group = group
        self._nearest: Tensor | int = 0
        self._images = 0

    def add(self, nearest: Tensor, images: int) -> None:
        """Count a batch of `images`, of which `nearest` (a scalar) had the nearest target class on this rank."""
        # Stays on the device until `take`.
        self._nearest = self._nearest + nearest
        self._images += images

    def take(self) -> tuple[int, int]:
        """Return that number on all ranks, and the number of samples, since the last call.

        Collective; waits for the device.
        """
        # All ranks have gathered the same images, but each knows its own targets: only the first number is summed.
        nearest = int(collectives.sum_(torch.tensor(int(self._nearest)), self._group))
        images, self._nearest, self._images = self._images, 0, 0
        return nearest, images
