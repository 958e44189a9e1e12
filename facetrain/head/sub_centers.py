"""Sub-centers: which of a class's centers its images choose, and the end of those that noise has chosen."""

# G gathered batch   K this rank's classes   N sub-centers of a class

from __future__ import annotations

import math

import torch
from torch import Tensor

from facetrain.head.target import TargetClass, rows_of


class SubCenters:
    """Counts the images that were nearest to each sub-center, and drops all but the dominant one.

    Deng et al., "Sub-center ArcFace" (ECCV 2020, section 3.3): clean images of an identity gather at one
    sub-center, wrong ones at the others. When the network tells them apart, sub-centers that are not
    dominant are dropped, and images further than an angle (75° there) from the dominant one are left
    out. There that makes a cleaned dataset for a second training; here the same training goes on.
    """

    def __init__(
        self,
        num_classes: int,
        count: int,
        device: torch.device,
        *,
        drop_from_step: int | None = None,
        drop_angle: float = 180.0,
    ) -> None:
        self._drop_from_step, self._drop_angle = drop_from_step, drop_angle
        self._hits_KN = torch.zeros(num_classes, count, device=device) if count > 1 else None
        self._dominant: Tensor | None = None
        self.least_cos = -1.0
        """Cosine to the own center below which an image is left out."""

    def begin_step(self, step: int) -> None:
        """Drop what is to be dropped from this step on; a pure function of the step and the counts."""
        if self._drop_from_step is None or step < self._drop_from_step:
            return
        self.least_cos = math.cos(math.radians(self._drop_angle))
        if self._hits_KN is not None and self._dominant is None:
            self._dominant = self._hits_KN.argmax(1)

    def dominant_of(self, class_S: Tensor | None) -> Tensor | None:
        """Return which sub-center is left of these classes (None: of all), int64; None: all are left."""
        return self._dominant if self._dominant is None or class_S is None else self._dominant[class_S]

    def count(self, own: TargetClass, index_S: Tensor | None, finite: Tensor) -> None:
        """Count each image of this rank's classes at the sub-center it was nearest to."""
        if self._hits_KN is None or self._dominant is not None:
            return
        if not len(self._hits_KN if index_S is None else index_S):
            return
        index_G = rows_of(own.place_G, index_S) * self._hits_KN.shape[1] + own.nearest_G
        # Images of other ranks' classes add 0 to some count.
        self._hits_KN.view(-1).index_add_(0, index_G, (own.here_G & finite).to(self._hits_KN.dtype))

    def row_state(self) -> dict[str, Tensor]:
        """Return the counts, one row per class, for a checkpoint."""
        return {} if self._hits_KN is None else {"hits": self._hits_KN}
