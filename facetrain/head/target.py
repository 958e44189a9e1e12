"""Each sample's own class: found first, in full precision, and kept out of the chunks of the others."""

# G gathered batch   D embedding   K this rank's classes   N sub-centers of a class

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from facetrain.distributed import collectives
from facetrain.head.class_centers import RowTable
from facetrain.head.margins import Margin, TargetCosine


@dataclass(frozen=True)
class TargetClass:
    """What a step needs of the own classes; those of other ranks hold zeros."""

    place_G: Tensor
    """Row among the classes that take part, or −1: on another rank."""
    here_G: Tensor
    nearest_G: Tensor
    """Which of the class's sub-centers is nearest; 0 where each class has one."""
    cos_G: Tensor
    """Before the margin; of all ranks where the margin sees the batch."""
    center_GD: Tensor
    """Of unit length."""
    inverse_G: Tensor
    """1 / |w| of that center."""
    target: TargetCosine
    """After the margin."""

    def columns(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Whether the own class lies in [start, stop), and in which column (any, if it does not)."""
        inside_G = (self.place_G >= start) & (self.place_G < stop)
        return inside_G, (self.place_G - start).clamp(0, stop - start - 1)


def rows_of(place_G: Tensor, index_S: Tensor | None) -> Tensor:
    """Return the rows of the table where the own classes are; of those on other ranks, any row."""
    place_G = place_G.clamp_min(0)
    return place_G if index_S is None else index_S[place_G]


def find_target(
    unit_GD: Tensor,
    norm_G: Tensor | None,
    place_G: Tensor,
    index_S: Tensor | None,
    weight: RowTable,
    dominant: Tensor | None,
    margin: Margin,
) -> TargetClass:
    """Compare each embedding with its own class's center, and apply the margin.

    With sub-centers the nearest counts, or the dominant one (`dominant`: (K,) int64) where it is known.
    Collective where the margin sees the batch: a number per sample then tells all ranks every own cosine.
    """
    here_G = place_G >= 0
    center_GD, inverse_G = torch.zeros_like(unit_GD), unit_GD.new_ones(len(unit_GD))
    cos_G, nearest_G = unit_GD.new_zeros(len(unit_GD)), torch.zeros_like(place_G)
    if len(weight.data if index_S is None else index_S):
        rows = rows_of(place_G, index_S)
        weight_GND = weight.fetch(rows).to(unit_GD.dtype).unflatten(1, (-1, unit_GD.shape[1]))
        inverse_GN = torch.linalg.vector_norm(weight_GND, dim=2).clamp_min(1e-12).reciprocal()
        cos_GN = torch.einsum("gd,gnd->gn", unit_GD, weight_GND) * inverse_GN
        nearest_G = cos_GN.argmax(1) if dominant is None else dominant[rows]
        each = torch.arange(len(unit_GD), device=unit_GD.device), nearest_G
        inverse_G = inverse_GN[each]
        center_GD = torch.where(here_G[:, None], weight_GND[each] * inverse_G[:, None], 0)
        cos_G = torch.where(here_G, cos_GN[each].clamp(-1, 1), 0)
    if margin.needs_all_target_cosines:
        cos_G = collectives.sum_(cos_G)
    margin.update_averages(norm_G, cos_G)
    return TargetClass(
        place_G, here_G, nearest_G, cos_G, center_GD, inverse_G, target=margin.apply(cos_G, norm_G)
    )
