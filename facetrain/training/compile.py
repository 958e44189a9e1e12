"""Compilation of a network's regions with `torch.compile`."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.distributed import collectives
from facetrain.distributed.process_setup import keep_compiled_code
from facetrain.telemetry.log import logger, warn

_RECOMPILE_LIMIT = 64
"""Compiled variants of one method. Each combination of shapes and attributes is one; torch allows 8, and an IResNet's
blocks have exactly that many."""
_REPLAYED = "reduce-overhead"


class CompiledRegions:
    """Regions of a backbone, replaced by compiled code for training.

    Regions of the same kind and shapes share their code, so a network of a hundred layers compiles as fast as one of
    eighteen. The first step of each region compiles it; a cache on disk keeps the code for the next run. In evaluation
    mode, and if the compiler fails on one rank, the regions run uncompiled.
    """

    def __init__(self, backbone: Backbone, mode: str = "on") -> None:
        """Replace the regions' methods. With the mode `reduce-overhead`, a GPU replays them from CUDA graphs."""
        import torch.compiler.config

        keep_compiled_code()
        torch.compiler.config.recompile_limit = _RECOMPILE_LIMIT
        self._is_replayed, self._passes = mode == _REPLAYED, 0
        self._regions = list[_Region]()
        for module, method in backbone.regions():
            region = _Region(module, getattr(module, method), is_replayed=self._is_replayed)
            # On the object, not on its class: a second network in the process, such as a teacher, stays as it is.
            setattr(module, method, region)
            self._regions.append(region)

    def begin_pass(self) -> None:
        """Begin the forward pass of a training step: replayed graphs may overwrite the results of the step before.

        Collective in the second pass: if the compiler has failed on a rank in the first one, all run uncompiled. They
        would wait for that rank in every step.
        """
        if self._is_replayed:
            torch.compiler.cudagraph_mark_step_begin()
        self._passes += 1
        if self._passes != 2:
            return
        own = next((region.failure for region in self._regions if region.failure), "")
        if failure := next(filter(None, collectives.gather_json(own)), ""):
            _report_once(failure)
            for region in self._regions:
                region.failure = failure


class _Region:
    """Method of a module, compiled for training."""

    def __init__(self, module: nn.Module, method: Callable[..., Tensor], *, is_replayed: bool) -> None:
        self._module, self._uncompiled = module, method
        # What the mode reduce-overhead sets; torch.compile takes either a mode or options.
        self._compiled: Callable[..., Tensor] = torch.compile(
            method, dynamic=False, options={"triton.cudagraphs": is_replayed}
        )
        self.failure = ""
        """Line that says why the region runs uncompiled."""

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Map (B, …), and the further inputs of the method, to (B, …)."""
        # Verification has other batch sizes and uses the network for seconds: compiling would take longer.
        used = self._module.training and torch.is_grad_enabled()
        if self.failure or not used:
            return self._uncompiled(*inputs)
        try:
            return self._compiled(*inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # among them all errors of torch's compiler
            output = self._uncompiled(*inputs)  # raises the same error if the network is at fault
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            place = f"the compiler failed on {socket.gethostname()}"
            self.failure = f"train.compile: {place}, and the network runs uncompiled ({reason})"
            _report_once(self.failure)
            return output


@cache
def _report_once(failure: str) -> None:
    report = warn if collectives.rank() == 0 else logger.warning
    report(failure)
