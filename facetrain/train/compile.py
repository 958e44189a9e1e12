"""Regions of a network as compiled code, where that can be made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.distributed import collectives
from facetrain.distributed.process_setup import keep_compiled_code
from facetrain.telemetry.log import logger

_MOST_VARIANTS = 64
"""Of one method's code: each combination of shapes and attributes is one. An IResNet's blocks are of eight."""
_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {"fallback_random": True}
"""Dropout draws what it would draw without the compiler."""


def compile_regions(backbone: Backbone) -> None:
    """Have each region of a backbone run as compiled code while it trains, and as it is elsewhere.

    Regions of the same kind and shapes share their code, so that a network of a hundred layers is compiled as fast
    as one of eighteen; the code is kept for the next run. The first step of each region compiles it.
    """
    import torch._dynamo.config

    keep_compiled_code()
    torch._dynamo.config.recompile_limit = _MOST_VARIANTS
    for module, method in backbone.regions():
        setattr(module, method, _Region(module, getattr(module, method)))


class _Region:
    """A method of a module, compiled where it trains; as it is where the compiler fails, which is said once."""

    def __init__(self, module: nn.Module, method: Callable[[Tensor], Tensor]) -> None:
        self._module, self._plain = module, method
        self._compiled: Callable[[Tensor], Tensor] | None = torch.compile(
            method, dynamic=False, options=_OPTIONS
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Map (B, …) to (B, …)."""
        # Verification has batches of its own, for which nothing is compiled.
        if self._compiled is None or not (self._module.training and torch.is_grad_enabled()):
            return self._plain(x)
        try:
            return self._compiled(x)
        except _compiler_errors() as error:
            self._compiled = None
            first = str(error).strip().splitlines()[0]
            _say_once(f"{type(error).__name__}: {first}")
            return self._plain(x)


def _compiler_errors() -> tuple[type[Exception], ...]:
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return TorchDynamoException, InductorError


@cache
def _say_once(what: str) -> None:
    line = f"train.compile: the network runs as it is, for the compiler failed ({what})"
    logger.warning(line)
    if collectives.rank() == 0:
        print(line, file=sys.stderr)
