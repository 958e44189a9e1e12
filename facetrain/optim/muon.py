"""Muon: momentum SGD with orthogonalized steps, for the weights of convolutions and linear layers."""

# N weights of the same shape   R rows   C columns of a weight as a matrix

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor, nn

from facetrain.optim.optimizer import GroupOptimizer, ParameterGroup

_COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Coefficients of x, x³ and x⁵ in a Newton–Schulz step: its slope at 0 is as steep as possible."""
_NEWTON_SCHULZ_STEPS = 5
_LEAST_NORM = 1e-7
"""A gradient of zeros stays zero."""


class Muon(GroupOptimizer):
    """Optimizer that moves each weight by an orthogonal matrix near its momentum.

    Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024,
    https://kellerjordan.github.io/posts/muon/). A weight (O, I, …) is a matrix of R = O rows and C = I · … columns.
    With the gradient G, the momentum μ, its buffer B, the weight decay λ and the learning rate γ, a step is

        B ← μ B + (1 − μ) G
        W ← (1 − γ λ) W − γ √max(1, R / C) · orthogonalize(μ B + (1 − μ) G)

    It equals `torch.optim.Muon`, which takes matrices only and cannot skip a step on the device. Weights of the same
    shape share their matrix products.
    """

    def __init__(self, groups: list[ParameterGroup], *, momentum: float = 0.95, weight_decay: float) -> None:
        """Take the weights in groups with a learning rate `lr` each, which is 0 until it is set."""
        super().__init__(groups)
        self._momentum, self._weight_decay = momentum, weight_decay
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight] = {"momentum_buffer": torch.zeros_like(weight)}

    @torch.no_grad()
    def step(self, grad_scale: Tensor, skip: Tensor) -> None:
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            same_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    same_shape[weight.shape].append((weight, weight.grad))
            # The blocks of a stage have equal shapes: one batched product instead of dozens of small ones.
            for pairs in same_shape.values():
                self._update(pairs, group["lr"], grad_scale, skip)

    def _update(
        self, pairs: list[tuple[Tensor, Tensor]], lr: float, grad_scale: Tensor, skip: Tensor
    ) -> None:
        """Update weights of the same shape by their gradients."""
        directions = []
        for weight, gradient in pairs:
            buffer = self.state[weight]["momentum_buffer"]
            # A skipped step leaves the buffer as it is: its mean with itself is exact.
            gradient = torch.where(skip.bool(), buffer, gradient / grad_scale)
            buffer.lerp_(gradient, 1 - self._momentum)
            directions.append(gradient.lerp(buffer, self._momentum).reshape(len(weight), -1))
        matrix_NRC = torch.stack(directions)
        rows, columns = matrix_NRC.shape[1:]
        # 0 in a skipped step: the weights keep their values without a branch on the host.
        rate = lr * (1 - skip)
        step_NRC = orthogonalize(matrix_NRC) * (rate * math.sqrt(max(1.0, rows / columns)))
        for (weight, _), step_RC in zip(pairs, step_NRC, strict=True):
            weight.mul_(1 - rate * self._weight_decay).sub_(step_RC.reshape(weight.shape))


def orthogonalize(matrix_NRC: Tensor) -> Tensor:
    """Return nearly orthogonal matrices (N, R, C) with the singular vectors of the given ones, float32.

    Five Newton–Schulz steps of fifth degree map all singular values near 1 (about 0.7 to 1.2), except values below
    a thousandth of the matrix's norm. The products of bfloat16 matrices, and all on a GPU, are computed in bfloat16,
    which changes nothing for the training (Jordan et al.).
    """
    x = matrix_NRC.bfloat16() if matrix_NRC.is_cuda else matrix_NRC
    is_tall = x.shape[1] > x.shape[2]
    # The iteration squares x·xᵀ: of the two products with the transpose, the smaller one.
    x = x.mT if is_tall else x
    # The Frobenius norm is at least the largest singular value, which the iteration needs to be at most 1.
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(_LEAST_NORM)
    x = _take_steps(x) if x.dtype == torch.bfloat16 else _take_joined_steps(x)
    return (x.mT if is_tall else x).float()


def _take_steps(x: Tensor) -> Tensor:
    """Take the Newton–Schulz steps one after the other: x ← (a + b·x·xᵀ + c·(x·xᵀ)²)·x."""
    a, b, c = _COEFFICIENTS
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _take_joined_steps(x: Tensor) -> Tensor:
    """Take the same steps, but multiply their factors first and x last: of its many columns are made two products.

    A step multiplies x by a factor that is a polynomial of x·xᵀ, so that x·xᵀ of the next step follows without x. In
    bfloat16, the rounding of x·xᵀ would grow without bound.
    """
    a, b, c = _COEFFICIENTS
    gram = x @ x.mT
    factors: Tensor | None = None
    for left in reversed(range(_NEWTON_SCHULZ_STEPS)):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        factors = factor if factors is None else factor @ factors
        if left:
            gram = factor @ gram @ factor
    assert factors is not None, "there are steps"
    return factors @ x


def hidden_weights(module: nn.Module, last_layers: tuple[str, ...]) -> set[Tensor]:
    """Return the weights that Muon is for: weights of convolutions and linear layers before the last layers.

    `last_layers` has the prefixes of the names of the last layers' parameters.

    Norms, slopes, biases and positions are no matrices, and the last layers, as Jordan et al. recommend, are left to
    the other optimizer. So are depthwise and grouped convolutions, whose groups share no channels.
    """
    return {
        weight
        for name, layer in module.named_modules()
        if not f"{name}.".startswith(last_layers)
        and (isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1))
        # Not layer.weight: a parametrization computes it at every access; that of the spectral norm changes buffers.
        for key, weight in layer.named_parameters(recurse=False)
        if key == "weight"
    }


def split_groups(
    groups: list[ParameterGroup], chosen: set[Tensor]
) -> tuple[list[ParameterGroup], list[ParameterGroup]]:
    """Split the parameter groups into groups of the chosen parameters and groups of the others; none is empty."""
    both: tuple[list[ParameterGroup], list[ParameterGroup]] = [], []
    # A group keeps its rate and its factor in both halves.
    for group in groups:
        for half, is_chosen in zip(both, (True, False), strict=True):
            parameters = [parameter for parameter in group["params"] if (parameter in chosen) == is_chosen]
            if parameters:
                half.append(group | {"params": parameters})
    return both
