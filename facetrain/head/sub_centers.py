"""Sub-centers: counts of the images nearest to each, and removal of those that are not dominant."""

# G gathered batch   K this rank's classes   N sub-centers of a class   S sampled of K

from __future__ import annotations

import math

import torch
from torch import Tensor

from facetrain.head.settings import HeadSettings
from facetrain.head.target import TargetClass, target_rows


class SubCenters:
    """Counts the images nearest to each sub-center, and drops all but the dominant one from a given step on.

    Deng et al., "Sub-center ArcFace" (ECCV 2020, section 3.3): clean images of an identity gather at one
    sub-center, mislabeled ones at the others. When the network can separate them, sub-centers that are not
    dominant are dropped, and images further than an angle (75° in the paper) from the dominant one are left
    out of the loss. The paper cleans the dataset that way for a second training; here the same training continues.
    """

    def __init__(
        self,
        num_classes: int,
        settings: HeadSettings,
        device: torch.device,
        *,
        drop_from_step: int | None = None,
    ) -> None:
        self._drop_from_step, self._drop_angle = drop_from_step, settings.drop_angle
        self._hits_KN: Tensor | None = None
        if settings.sub_centers > 1:
            self._hits_KN = torch.zeros(num_classes, settings.sub_centers, device=device)
        self._dominant_K: Tensor | None = None
        self.least_cos = -1.0
        """Images with a smaller target cosine are left out of the loss."""

    def begin_step(self, step: int) -> None:
        """Drop sub-centers if the step has come. The result depends only on the step and the counts."""
        if self._drop_from_step is None or step < self._drop_from_step:
            return
        self.least_cos = math.cos(math.radians(self._drop_angle))
        if self._hits_KN is not None and self._dominant_K is None:
            # From counts that a checkpoint holds: a run that resumes after the drop finds the same sub-centers.
            self._dominant_K = self._hits_KN.argmax(1)

    def dominant_of(self, class_S: Tensor | None) -> Tensor | None:
        """Return the remaining sub-center of each class (`class_S` None: of all), int64; None: none was dropped."""
        return self._dominant_K if self._dominant_K is None or class_S is None else self._dominant_K[class_S]

    def count(self, target: TargetClass, class_S: Tensor | None, finite: Tensor) -> None:
        """Count each image of this rank's classes for its nearest sub-center, unless the loss is not finite."""
        if self._hits_KN is None or self._dominant_K is not None:
            return
        # `target_rows` needs a row for the images of other ranks' classes.
        if not len(self._hits_KN if class_S is None else class_S):
            return
        index_G = target_rows(target.position_G, class_S) * self._hits_KN.shape[1] + target.nearest_G
        # Images of other ranks' classes add 0 to an arbitrary count.
        self._hits_KN.view(-1).index_add_(0, index_G, (target.is_local_G & finite).to(self._hits_KN.dtype))

    def row_state(self) -> dict[str, Tensor]:
        """Return the counts, one row per class, for a checkpoint."""
        return {} if self._hits_KN is None else {"hits": self._hits_KN}
