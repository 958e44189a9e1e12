"""Margin that is one function of the target cosines, and perhaps of the norms of the embeddings."""

# G gathered batch

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from facetrain.errors import UsageError
from facetrain.head.margins.base import Margin
from facetrain.head.margins.registry import MARGINS
from facetrain.own_parts import is_of_other_code, line_of, name_of
from facetrain.settings import imported

MarginLike = str | Callable[..., Any] | Margin
"""Margin by its name; as a function of the target cosines (G,), or of these and the norms (G,); as a subclass of
`Margin`; or as an object of one."""


class FunctionMargin(Margin):
    """Margin whose target cosines a function returns: f(cos_G), or f(cos_G, norm_G) for one with a second argument.

    A second argument with a default is an option, and gets no norms. The function may be a module with buffers, which
    are then saved with the head and follow it.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        options: Mapping[str, Any],
        *,
        module: nn.Module | None = None,
        **common: Any,
    ) -> None:
        """Take the function, its keyword arguments, the module that it calls, and the numbers that all margins have.

        Raises:
            TypeError: the function takes other arguments.
        """
        super().__init__(**common)
        self.name = name_of(function)
        self._function = partial(function, **options)
        self._module = function if isinstance(function, nn.Module) else module
        positional = [each for each in _positional(function) if each.name not in options]
        if len(positional) > 1 and positional[1].default is None:
            raise TypeError(
                f"{positional[1]} may mean norms or an option: remove the default to get the norms of the embeddings, "
                "or place a * before it"
            )
        self.needs_norms = sum(each.default is each.empty for each in positional) > 1
        # Or the first step would find it.
        _signature(function).bind(*["cosines", "norms"][: 1 + self.needs_norms], **options)

    def train(self, mode: bool) -> None:
        """Let a module train, or evaluate."""
        if self._module is not None:
            self._module.train(mode)

    def state(self) -> dict[str, Tensor]:
        """Return the buffers of a module."""
        return {} if self._module is None else dict(self._module.named_buffers())

    def target(self, cos_G: Tensor, norm_G: Tensor | None) -> Tensor:
        if self._module is not None and any(each.device != cos_G.device for each in self.state().values()):
            self._module.to(cos_G.device)
        return self._function(cos_G, norm_G) if self.needs_norms else self._function(cos_G)


class ForeignMargin(FunctionMargin):
    """Function that may use `torch.arccos`, whose derivative is infinite at cosines of ±1: it gets none so near.

    It may also compute statistics of the batch, or buffers from them, which must be the same on all ranks.
    """

    needs_all_target_cosines = True

    def target(self, cos_G: Tensor, norm_G: Tensor | None) -> Tensor:
        largest = 1 - torch.finfo(cos_G.dtype).eps
        # Moved without a change of the derivative.
        return super().target(cos_G + (cos_G.clamp(-largest, largest) - cos_G).detach(), norm_G)


def make_margin(
    margin: MarginLike,
    *,
    scale: float = 64.0,
    filter_threshold: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> Margin:
    """Return a margin as an object.

    Args:
        margin: see `MarginLike`. A loss of arcface_torch, which is a module of (logits, labels), is accepted too; it
            has its own scale and filter.
        scale: factor on the cosines.
        filter_threshold: cosine above which a negative's logit is set to 0; 0: no filter.
        seed: key of margins that draw random numbers.
        options: keyword arguments of the function or the class.

    Raises:
        UsageError: there is no margin of this name, or it does not take these options.
    """
    common: dict[str, Any] = {"scale": scale, "filter_threshold": filter_threshold, "seed": seed}
    if isinstance(margin, str):
        if margin not in MARGINS:
            raise UsageError(f"margin {margin!r} is unknown; use one of {', '.join(MARGINS)}, or a function")
        found = imported(MARGINS[margin])
        return _made(found, options, common, FunctionMargin)
    return own_margin(margin, options, common)


def own_margin(
    part: Callable[..., Any] | Margin, options: Mapping[str, Any], common: Mapping[str, Any]
) -> Margin:
    """Return a margin of the user's own with its `options`; `common` has the numbers of all margins.

    Raises:
        UsageError: it does not take these options, or is a module with parameters that are to be trained.
    """
    if isinstance(part, Margin):
        return part
    if isinstance(part, nn.Module) and any(each.requires_grad for each in part.parameters()):
        raise UsageError(
            f"the margin {name_of(part)} has parameters, which would get no gradient: the head differentiates a margin "
            "by the cosines and the norms alone; make them buffers or numbers"
        )
    if isinstance(part, nn.Module) and [each.name for each in _positional(part)][1:] == ["labels"]:
        if not hasattr(part, "s"):
            raise UsageError(
                f"the margin {name_of(part)} takes logits and labels; give it the scale of the logits as `s`"
            )
        common = {"scale": part.s, "filter_threshold": getattr(part, "interclass_filtering_threshold", 0.0)}
        return ForeignMargin(_TargetCosine(part), {}, module=part, **common)
    return _made(part, options, common, ForeignMargin)


def is_own(margin: Margin) -> bool:
    """Return whether the formula of a margin is the user's own."""
    return isinstance(margin, ForeignMargin) or is_of_other_code(margin)


def _made(
    part: Callable[..., Any],
    options: Mapping[str, Any],
    common: Mapping[str, Any],
    of_function: type[FunctionMargin],
) -> Margin:
    if isinstance(part, type) and not issubclass(part, Margin):
        raise UsageError(
            f"the margin {name_of(part)} is a class, but not a subclass of {Margin.__module__}.Margin"
        )
    try:
        return part(**common, **options) if isinstance(part, type) else of_function(part, options, **common)
    except (TypeError, ValueError) as error:  # a builtin has no signature
        if isinstance(error, TypeError) and line_of(error):  # its own code has raised it
            raise
        raise UsageError(f"the margin {name_of(part)}: {error}; see head.margin.options") from error


class _TargetCosine:
    """Loss like arcface_torch's, which changes the target's entry of (logits, labels), as a function of the cosines."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self.__name__ = type(loss).__name__

    def __call__(self, cos_G: Tensor) -> Tensor:
        # A matrix of the target class alone. A copy, because the loss may write into it.
        label_G1 = torch.zeros(len(cos_G), 1, dtype=torch.int64, device=cos_G.device)
        logit_G1: Tensor = self._loss(cos_G[:, None].clone(), label_G1)
        return logit_G1[:, 0] / self._loss.s


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the arguments that a caller may give by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each for each in _signature(function).parameters.values() if each.kind in kinds]


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    # `__call__` of a module takes any arguments.
    return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
