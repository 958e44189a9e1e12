"""Base class of the margins, which finds the derivatives of a margin's formula.

With θ the angle between an embedding and the center of its identity, most margins replace the target's cosine by

    cos(m1·θ + m2) − m3

SphereFace (arXiv 1704.08063) introduced m1, ArcFace (arXiv 1801.07698, equation 3) m2, CosFace
(arXiv 1801.09414, equation 4) m3; the combination is equation 4 of ArcFace. The cosines of all other classes,
the negatives, stay unless a margin's docstring describes a change.
"""

# G gathered batch   C classes of a chunk

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from facetrain.errors import UsageError
from facetrain.own_parts import describe_result


class TargetCosine(NamedTuple):
    """Target cosine of each sample after the margin, and its derivatives; (G,) each."""

    value_G: Tensor
    by_cos_G: Tensor
    """Derivative by the cosine before the margin."""
    by_norm_G: Tensor | None = None
    """Derivative by the embedding's norm; None: zero."""


class Margin:
    """Base class of the margins. A subclass gives the formula, `target`; autograd differentiates it."""

    needs_norms: bool = False
    """The formula contains the norms of the embeddings, so each rank sends them along with its embeddings.

    True for every subclass with a `penalty`."""
    needs_all_target_cosines: bool = False
    """The formula contains the target cosines of the whole batch, so all ranks exchange them."""

    def __init__(self, *, scale: float = 64.0, filter_threshold: float = 0.0, seed: int = 0) -> None:
        """Take the factor on the cosines, and the numbers that all margins have.

        A negative whose cosine exceeds `filter_threshold` counts as label noise, and its logit is set to 0 (0: no
        filter). `seed` is for margins that draw random numbers.
        """
        self.scale, self.filter_threshold, self.seed = scale, filter_threshold, seed
        self.name = type(self).__name__
        """Name for messages."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.penalty is not Margin.penalty:
            cls.needs_norms = True

    @property
    def changes_negatives(self) -> bool:
        """Whether the formula changes the negatives' cosines; the filter does not count."""
        return type(self).change_negatives_ is not Margin.change_negatives_

    def target(self, cos_G: Tensor, norm_G: Tensor | None) -> Tensor:
        """Return the target cosines with the margin, (G,): the formula, of operations that autograd can differentiate.

        `cos_G` holds the target cosines in [−1, 1], `norm_G` the norms of the embeddings if `needs_norms`. Where no
        gradient shall pass, detach. The derivative of `torch.arccos` is infinite at ±1; that of `angle` is not.
        """
        raise NotImplementedError

    def penalty(self, norm_G: Tensor) -> Tensor | None:
        """Return the term added to each sample's loss, a formula of the norm, (G,). The base class has no term."""
        return None

    def apply(self, cos_G: Tensor, norm_G: Tensor | None) -> TargetCosine:
        """Return the target cosines with the margin and their derivatives. Called once per micro-batch.

        Raises:
            UsageError: the formula does not return one number for each sample, or has no gradient.
        """
        if norm_G is None:
            return TargetCosine(*self._differentiated(lambda cos: self.target(cos, None), cos_G))
        return TargetCosine(*self._differentiated(self.target, cos_G, norm_G))

    def norm_penalty(self, norm_G: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return `penalty` and its derivative by the norm, (G,) each; None: no term."""
        if type(self).penalty is Margin.penalty:
            return None
        value_G, slope_G = self._differentiated(self.penalty, norm_G)
        return value_G, slope_G

    def change_negatives_(self, logit_GC: Tensor, target_cos_G: Tensor) -> Tensor | None:
        """Change the negatives' logits in place; return the factor (G, C) on their derivatives, or None for 1.

        By hand and not by autograd, which would keep several tensors of the size of the logits. `target_cos_G` holds
        the target cosines before the margin. For samples whose class is on another rank it is valid only if
        `needs_all_target_cosines`.
        """
        if not self.filter_threshold:
            return None
        trusted_GC = logit_GC <= self.filter_threshold * self.scale
        # To 0 and not to −∞, as in arcface_torch: a filtered negative counts like a class at a right angle.
        logit_GC.mul_(trusted_GC)
        return trusted_GC

    def begin_step(self, step: int) -> None:
        """Start a step. Margins that draw random numbers derive them from its number."""

    def update_averages(self, norm_G: Tensor | None, cos_G: Tensor) -> None:
        """Update running averages from the global batch. Called before `apply`, in training alone."""

    def snapshot(self) -> Margin:
        """Return a margin that later batches do not change, of which the chunks of a batch are computed twice."""
        return self

    def state(self) -> dict[str, Tensor]:
        """Return the running averages for a checkpoint. To load them, copy into these tensors.

        The names are the same from the constructor on: before the first batch, a checkpoint is loaded.
        """
        return {}

    def _differentiated(self, formula: Callable[..., Tensor | None], *inputs_G: Tensor) -> list[Tensor]:
        """Return a formula's value for each sample, and its derivative by each input; (G,) each."""
        # Also inside of the head's own forward pass, where autograd is off, and in inference mode, whose tensors it
        # does not take.
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [input_G.detach().clone().requires_grad_() for input_G in inputs_G]
            value_G = self._one_number_each(formula(*leaves), inputs_G[0])
            if not value_G.requires_grad:
                raise UsageError(
                    f"the margin {self.name} returns numbers without a gradient; compute them from its arguments by "
                    "operations of torch, without torch.no_grad, detach or item"
                )
            # Samples do not depend on each other: the derivative of the sum is that of each. Of a sum, and not with a
            # gradient of ones, for whose check torch would import its symbolic shapes: a second of CPU time.
            slopes = torch.autograd.grad(value_G.sum(), leaves, materialize_grads=True)
        return [value_G.detach(), *slopes]

    def _one_number_each(self, value: object, input_G: Tensor) -> Tensor:
        """Return the value of a formula if it is a tensor like its input; a mean would be broadcast in silence."""
        if not isinstance(value, Tensor) or (value.shape, value.dtype) != (input_G.shape, input_G.dtype):
            raise UsageError(
                f"the margin {self.name} maps {len(input_G):,} samples to {describe_result(value)}; return one tensor "
                f"of shape (G,) and {input_G.dtype}, with a number for each sample"
            )
        return value


def angle(cos: Tensor) -> Tensor:
    """Return the angle in [0, π] of a cosine, with a derivative that is finite at cos = ±1.

    It is −1/sin, with the sine at least √ε of the dtype.
    """
    found: Tensor = _Angle.apply(cos)
    return found


class _Angle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cos: Tensor) -> Tensor:
        ctx.save_for_backward(cos)
        return torch.arccos(cos)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (cos,) = ctx.saved_tensors
        return -grad / (1 - cos * cos).clamp_min(torch.finfo(cos.dtype).eps).sqrt()


class RunningAverages:
    """Exponential moving averages of statistics of the global batch.

    Every rank sees the same global batch, so the averages are equal on all ranks without communication.
    """

    def __init__(self, **start: float) -> None:
        # float64: with a weight of 0.01, a change below 6e-6 of a float32 average would be lost in its rounding.
        self.values = {name: torch.tensor(value, dtype=torch.float64) for name, value in start.items()}

    def clone(self) -> RunningAverages:
        """Return averages of their own with the same values."""
        cloned = RunningAverages()
        cloned.values = {name: value.clone() for name, value in self.values.items()}
        return cloned

    def update(self, weight: float, **batch: Tensor) -> None:
        """Move each average by `weight` toward the batch's value; ignore values that are not finite."""
        for name, value in batch.items():
            old = self.values[name] = self.values[name].to(value.device)
            new = old + weight * (value.double() - old)
            # Selected on the device: to test the value, the host would have to wait for it.
            old.copy_(torch.where(torch.isfinite(new), new, old))
