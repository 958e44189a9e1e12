"""Compilation of a network's regions with `torch.compile`."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.distributed.process_setup import keep_compiled_code
from facetrain.distributed.spawn import GROUP_SIGNALS, signals_blocked
from facetrain.errors import RunError
from facetrain.files import error_reason

_RECOMPILE_LIMIT = 64
"""Compiled variants of one method. Each combination of shapes and attributes is one; torch allows 8, and an IResNet's
blocks have exactly that many."""
REPLAYED = "reduce-overhead"


@contextmanager
def compiler_settings_kept(mode: str) -> Iterator[None]:
    """Give torch's compiler the settings of the caller back after the block. `mode` is a value of `train.compile`."""
    if mode == "off":  # the compiler is not imported, which takes a second
        yield
        return
    import torch.compiler.config

    before = torch.compiler.config.recompile_limit
    try:
        yield
    finally:
        torch.compiler.config.recompile_limit = before


def compile_regions(backbone: Backbone, mode: str) -> None:
    """Replace the regions of a backbone by compiled code for training; with the mode `REPLAYED`, by CUDA graphs of it.

    Regions of the same kind and shapes share their code, so a network of a hundred layers compiles as fast as one of
    eighteen. The first step of each region compiles it; a cache on disk keeps the code for the next run. In evaluation
    mode the regions run uncompiled.
    """
    import torch.compiler.config

    keep_compiled_code()
    torch.compiler.config.recompile_limit = _RECOMPILE_LIMIT
    for module, method in backbone.regions():
        region = _Region(module, getattr(module, method), is_replayed=mode == REPLAYED)
        # On the object, not on its class: a second network in the process, such as a teacher, stays as it is.
        setattr(module, method, region)


class _Region:
    """Method of a module, compiled for training."""

    def __init__(self, module: nn.Module, method: Callable[..., Tensor], *, is_replayed: bool) -> None:
        self._module, self._uncompiled = module, method
        # What the mode reduce-overhead sets; torch.compile takes either a mode or options.
        self._compiled: Callable[..., Tensor] = torch.compile(
            method, dynamic=False, options={"triton.cudagraphs": is_replayed}
        )
        self._was_called = False

    def __call__(self, *inputs: Tensor, **keys: Tensor) -> Tensor:
        """Map (B, …), and the further inputs of the method, to (B, …).

        Raises:
            RunError: the compiler fails on this machine.
        """
        # Verification has other batch sizes and uses the network for seconds: compiling would take longer.
        if not (self._module.training and torch.is_grad_enabled()):
            return self._uncompiled(*inputs, **keys)
        # The first call starts torch's compiler, which ignores no signal to the process group but Ctrl-C.
        ignoring = nullcontext() if self._was_called else signals_blocked(*GROUP_SIGNALS)
        self._was_called = True
        try:
            with ignoring:
                return self._compiled(*inputs, **keys)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # among them all errors of torch's compiler
            self._uncompiled(*inputs, **keys)  # raises the same error if the network is at fault
            reason = f"{type(error).__name__}: {error_reason(error)}"
            raise RunError(
                f"train.compile: the compiler failed on {socket.gethostname()} ({reason}); install a C++ compiler, or "
                "set train.compile to off"
            ) from error
