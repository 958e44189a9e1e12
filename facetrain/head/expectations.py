"""Feature expectations of the classes: the second anchor of progressive cluster optimization.

You et al., "LVFace: Progressive Cluster Optimization for Large Vision Models in Face Recognition" (ICCV 2025, arXiv
2501.13420). A class i has a center w_i, which is learned, and an expectation e_i of its embeddings, which follows them.
With θ_j the angle of an embedding x of class i to w_j, θᵉ_j that to e_j, scale s and margins m1 and m2, the loss is

    log(1 + Σ_{j≠i} exp(s cos θ_j) / exp(s (cos θ_i − m1)) + Σ_{j≠i} exp(s cos θᵉ_j) / exp(s (cos θᵉ_i − m2)))

over the classes that take part in the step. Any margin can take the place of m1. No gradient goes to e. After a step,

    e_i ← α e_i + (1 − α) x,      α = 1 / (1 + exp(−cos θᵉ_i))

with the unit embedding x. Several embeddings of a class in a batch give the mean of what each of them gives alone.
"""

# G gathered batch   D embedding   S sampled classes of this rank   W world size   P statistics per sample

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.device.page_locked import to_device
from facetrain.head import softmax
from facetrain.head.class_centers import RowTables
from facetrain.head.class_shard import row_pieces
from facetrain.head.margins.base import Margin
from facetrain.head.row_file import Layout
from facetrain.head.sampling import Stage
from facetrain.head.sharded_softmax import ClassSweep, exchange_statistics
from facetrain.head.target import TargetClass, find_target, target_rows

_TABLE = "expectation"
"""Name of the table of the expectations."""


class Expectations:
    """Expectations of the classes of a head, which begin in the first stage that has them."""

    def __init__(self, stages: Sequence[Stage], margin: Margin) -> None:
        """Take the stages of the head, and the margin on the cosine to the expectation."""
        self._first = next((stage for stage in stages if stage.expectations != "off"), None)
        self._margin = margin
        self._have_begun = torch.tensor(False)  # on the host, which reads it

    def layout(self, columns: int, dtype: torch.dtype) -> Layout:
        """Return the table of the expectations, beside centers of so many columns; none if no stage has them."""
        return {} if self._first is None else {_TABLE: (columns, dtype)}

    def awaits(self, table: str) -> bool:
        """Return whether a table has no content yet: it is that of expectations which have not begun."""
        return table == _TABLE and not self._have_begun

    def begin_step(self, step: int, tables: RowTables) -> None:
        """Set the expectations to the unit class centers if they begin with this step.

        A checkpoint states that this is done: in a resumed run with other stages or another number of ranks, the stage
        may begin at a step that is already taken, or again.
        """
        if self._first is None or step < self._first.first_step or self._have_begun:
            return
        table, weight = (tables.by_name[name].data for name in (_TABLE, "weight"))
        # Some rows at a time: a normalized copy of the whole table would need its memory once more.
        precise = torch.promote_types(table.dtype, torch.float32)
        for start, stop in row_pieces(len(table)):
            table[start:stop].copy_(F.normalize(weight[start:stop].to(precise)))
        self._have_begun = torch.tensor(True)

    def begin_anew(self) -> None:
        """Set the expectations to the unit class centers in the next step: a `state_dict` has no table of them."""
        self._have_begun = torch.tensor(False)

    def second_anchor(self, sweep: ClassSweep, stage: Stage) -> ExpectationPass | None:
        """Return the pass over the expectations beside a sweep over the centers; None while there are none."""
        if stage.expectations == "off" or not self._have_begun:
            return None
        return ExpectationPass(
            # The same classes, chunks and loss over another table, which has no gradient.
            replace(sweep, table=_TABLE, margin=self._margin, take_gradient=None, keeps_exponentials=False),
            moving=stage.expectations == "moving" and sweep.learns,
        )

    def state(self) -> dict[str, Tensor]:
        """Return whether the expectations have begun, for a checkpoint; the table is one of the head's."""
        return {} if self._first is None else {"expectations_begun": self._have_begun}


class ExpectationPass:
    """One pass over the expectations of the classes of this rank that take part in a step."""

    def __init__(self, sweep: ClassSweep, *, moving: bool) -> None:
        """Take the sweep over the table of the expectations; `moving`: they follow the embeddings."""
        self._sweep, self._moving = sweep, moving
        self._inverse_norm_S: Tensor
        self._target: TargetClass
        self._factor_GD: Tensor
        self._logit_G: Tensor
        self._log_ratio_G: Tensor

    def log_ratio(self, unit_GD: Tensor, factor_GD: Tensor) -> Tensor:
        """Return the logarithm of the second fraction of the loss, (G,), the same on every rank. Collective.

        `factor_GD` are the unit embeddings in the dtype of the matrix products.
        """
        sweep = self._sweep
        # Without norms: the margin on the expectation is a constant.
        target = find_target(unit_GD, None, sweep.sampled, sweep.weight, sweep.margin, sweep.group)
        statistics_PG, self._inverse_norm_S, _ = sweep.statistics(factor_GD, target)
        logit_G, statistics_WPG = exchange_statistics(
            statistics_PG, target.logit(sweep.margin.scale), sweep.group
        )
        self._target, self._factor_GD, self._logit_G = target, factor_GD, logit_G
        log_negatives_G = softmax.join(statistics_WPG, bounded=sweep.chunk_type.is_bounded)
        self._log_ratio_G = log_negatives_G - logit_G
        return self._log_ratio_G

    def embedding_gradient(self, loss_G: Tensor) -> Tensor:
        """Return this rank's part of the gradient of each sample's loss by its unit embedding, over s: (G, D)."""
        sweep, target = self._sweep, self._target
        # With B the second fraction: the derivative of log(1 + A + B) by its target logit is −B / (1 + A + B).
        slope_G = -(self._log_ratio_G - loss_G).exp() * target.with_margin.by_cos_G
        by_target_GD = target.center_GD * torch.where(target.is_local_G, slope_G, 0)[:, None]
        # By a negative's logit z it is exp(z − z_y) / (1 + A + B), and the loss is the logarithm of the denominator.
        bounded = sweep.chunk_type.is_bounded
        log_total_G = softmax.log_denominator(self._logit_G, loss_G, bounded=bounded)
        grad_GD = torch.zeros_like(by_target_GD)
        for _, chunk in sweep.chunks(self._factor_GD, target, self._inverse_norm_S):
            grad_GD += chunk.embedding_gradient(chunk.slopes(log_total_G))
            del chunk
        if bounded:  # such chunks leave the denominator out of their slopes
            grad_GD.mul_((-log_total_G).exp()[:, None])
        return grad_GD.add_(by_target_GD)

    def update(self, unit_GD: Tensor, finite: Tensor) -> None:
        """Move the expectations of the batch's classes toward its embeddings, unless loss or slopes are not finite.

        Never waits for the device: all samples write a row, and samples of one class write the same value.
        """
        sweep, target = self._sweep, self._target
        if not self._moving or not sweep.sampled.size:
            return
        # A NaN would stay in an average for good.
        is_local_G = target.is_local_G & finite
        row_G = target_rows(sweep.sampled)
        # Of the whole batch from the same old values, so that the order of its images does not matter.
        old_GD = sweep.weight.fetch(row_G).to(unit_GD.dtype)
        moved_GD = (1 - torch.sigmoid(target.cos_G))[:, None] * (unit_GD - old_GD)
        moved_GD = torch.where(is_local_G[:, None], moved_GD, 0)
        # Samples of one class are neighbors after the sort; stable, so they are always added in the same order.
        sorted_G, order_G = target.position_G.sort(stable=True)
        first_G = torch.searchsorted(sorted_G, sorted_G)
        count_G = torch.searchsorted(sorted_G, sorted_G, right=True) - first_G
        sum_GD = torch.zeros_like(moved_GD).index_add_(0, first_G, moved_GD[order_G])[first_G]
        new_GD = old_GD.clone()
        new_GD[order_G] += sum_GD / count_G[:, None]
        # Samples of other ranks' classes repeat the write of a sample of this rank. Without one, all of them write row
        # 0 as it is. The index has a dimension: for `row_G[some]` with a scalar, the host would wait for its value.
        some = is_local_G.to(torch.uint8).argmax(0, keepdim=True)
        row_G = to_device(row_G, is_local_G.device)
        row_G = torch.where(is_local_G, row_G, row_G.index_select(0, some))
        new_GD = torch.where(is_local_G[:, None], new_GD, new_GD.index_select(0, some))
        sweep.weight.store(row_G, new_GD)
