"""Optimizer of the class centers, which updates only the rows of a step.

The center of a class outside the sample is neither updated nor decayed, and its momentum stays as it is, as in the
first version of Partial FC.
"""

# S rows of a step   D columns of a row

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from facetrain.counter_rng import key_of
from facetrain.device.capability import can_run_kernels
from facetrain.errors import ConfigError
from facetrain.head.center_gradient import UnfinishedGradient
from facetrain.head.class_centers import Rows, RowTable
from facetrain.head.row_file import Layout
from facetrain.head.stochastic_rounding import Noise, int8_block
from facetrain.optim.settings import ADAMW_EPS


@dataclass(frozen=True, kw_only=True)
class CenterUpdate:
    """Update of the class centers by the head itself: SGD with momentum, or AdamW."""

    name: str = "sgd"
    """`sgd` or `adamw`."""
    momentum: float = 0.9
    """Only for sgd."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and the second moment; only for adamw."""
    weight_decay: float = 5e-4
    """Of the centers that take part in a step."""
    moment_dtype: torch.dtype = torch.float32
    """Dtype in which the moments are stored; int8 only for sgd."""
    in_backward: bool = True
    """Update chunk by chunk in the backward pass, of which a step then has one. False: `step` updates."""


def moment_layout(update: CenterUpdate, columns: int) -> Layout:
    """Return the tables that the optimizer keeps for a table with `columns` columns.

    Raises:
        ConfigError: the optimizer cannot keep its moments in their dtype.
    """
    dtype = update.moment_dtype
    if update.name == "adamw":
        if dtype == torch.int8:
            # Second moments span many powers of ten; 127 equal steps would round most of them to 0.
            raise ConfigError("head.momentum_dtype int8 is for optim.name sgd; use bfloat16 with adamw")
        # Rows are updated in different steps, so each counts its own for the bias correction.
        return {
            "first_moment": (columns, dtype),
            "second_moment": (columns, dtype),
            "steps": (1, torch.float32),
        }
    if not update.momentum:
        return {}
    layout = {"momentum": (columns, dtype)}
    if dtype == torch.int8:
        layout["momentum_scale"] = (columns // int8_block(columns), torch.float32)
    return layout


_MOMENTS = ("momentum", "first_moment", "second_moment", "steps")
_ONE_PASS = ("weight", "momentum", "momentum_scale")
"""Tables of the update in one pass. A head can have others, such as its expectations."""


class RowOptimizer:
    """SGD with momentum, or AdamW, over selected rows of a table."""

    def __init__(
        self,
        numbers: CenterUpdate,
        device: torch.device,
        *,
        seed: int = 0,
    ) -> None:
        """Take the optimizer's numbers."""
        self._numbers, self._device, self._seed = numbers, device, seed
        self.one_pass = False
        """Whether the kernel updates that `one_pass_available` has checked."""
        self.begin_step(0, 0, lr=0.0)

    def begin_step(self, step: int, rank: int, *, lr: float) -> None:
        """Start a step with its own random numbers for stochastic rounding."""
        self._noise, self._lr = Noise(key_of(self._seed, step, rank), self._device), lr

    def update(
        self, tables: dict[str, RowTable], rows: Rows, gradient: Tensor | UnfinishedGradient, valid: Tensor
    ) -> None:
        """Update rows of `tables` (the weight and the tables of `moment_layout`) by their gradient (S, D).

        The gradient is overwritten; with `one_pass` it may be unfinished. If the bool scalar `valid` is false, nothing
        changes. On a GPU it is never read by the host, which would wait for the device.
        """
        if self.one_pass:
            self._update_in_one_pass(tables, rows, gradient, valid)
            return
        assert isinstance(gradient, Tensor), "only the update in one pass finishes a gradient"
        # On a CPU the flag is there. On a GPU the kernels below read it, and the host goes on.
        if valid.device.type == "cpu" and not valid:
            return
        # Rows of a row file are not contiguous, as the fused kernel requires. The moments come first: stored in another
        # order, they would be rounded with other random numbers.
        values = {
            name: tables[name].fetch(rows).to(gradient.dtype).contiguous()
            for name in (*_MOMENTS, "weight")
            if name in tables
        }
        step = self._adamw_step if self._numbers.name == "adamw" else self._sgd_step
        step(values, gradient, valid)
        for name, value in values.items():
            tables[name].store(rows, value, self._noise)

    def _update_in_one_pass(
        self, tables: dict[str, RowTable], rows: Rows, gradient: Tensor | UnfinishedGradient, valid: Tensor
    ) -> None:
        from facetrain.head.kernels.center_update import update_centers

        tables = {name: tables[name] for name in _ONE_PASS if name in tables}
        copied = tables["weight"].is_elsewhere
        # Rows that are on the device are updated in place, others in a copy.
        values = {name: table.read(rows) if copied else table.data for name, table in tables.items()}
        update_centers(
            values,
            slice(0, len(values["weight"])) if copied else rows,
            gradient,
            valid,
            self._noise,
            lr=self._lr,
            momentum=self._numbers.momentum,
            weight_decay=self._numbers.weight_decay,
        )
        if copied:
            for name, table in tables.items():
                table.store(rows, values[name])

    def _sgd_step(self, values: dict[str, Tensor], gradient: Tensor, valid: Tensor) -> None:
        # Fused: one pass over weight, gradient and momentum. The same update by plain operations takes 2.2 times as
        # long on a CPU (2,048 rows of 512, torch 2.13).
        sgd(
            [values["weight"]],
            [gradient.contiguous()],
            [values.get("momentum")],
            fused=True,
            weight_decay=self._numbers.weight_decay,
            momentum=self._numbers.momentum,
            lr=self._lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            found_inf=None if valid.device.type == "cpu" else (~valid).float(),
        )

    def _adamw_step(self, values: dict[str, Tensor], gradient: Tensor, valid: Tensor) -> None:
        """Update by Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2).

        torch's fused kernel counts the steps per tensor; here each row has its own count.
        """
        first, second, steps, weight = (
            values[name] for name in ("first_moment", "second_moment", "steps", "weight")
        )
        # On a GPU an invalid step is computed with a factor of 0, so that the host need not read `valid`.
        factor: float | Tensor = 1.0
        if valid.device.type != "cpu":
            gradient, factor = torch.where(valid, gradient, 0.0), valid.to(gradient.dtype)
        # With the factor 0 all betas are 1: the moments stay as they are.
        betas = [1 - (1 - beta) * factor for beta in self._numbers.betas]
        first.mul_(betas[0]).add_(gradient * (1 - betas[0]))
        second.mul_(betas[1]).add_(gradient * gradient * (1 - betas[1]))
        steps.add_(factor)
        # A row whose only steps were skipped has counted none: 0 / 0 without the bound.
        first_unbiased, second_unbiased = (
            moment / (1 - beta**steps).clamp_min(1e-30)
            for moment, beta in zip((first, second), self._numbers.betas, strict=True)
        )
        weight.mul_(1 - self._lr * self._numbers.weight_decay * factor)
        direction = first_unbiased / (second_unbiased.sqrt_() + ADAMW_EPS)
        if isinstance(factor, Tensor):
            weight.addcmul_(direction, -self._lr * factor)
        else:
            weight.add_(direction, alpha=-self._lr)


def one_pass_available(update: CenterUpdate, device: torch.device, embedding_size: int) -> bool:
    """Return whether the Triton kernel can update these centers: SGD on a GPU of compute capability 8.0 or higher."""
    if update.name != "sgd" or not can_run_kernels(device):
        return False
    from facetrain.head.kernels.center_update import LARGEST_SIZE

    return embedding_size <= LARGEST_SIZE
