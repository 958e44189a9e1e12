"""Construction of the backbones by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from facetrain.backbone.base import Backbone
from facetrain.backbone.own_network import build_own
from facetrain.backbone.registry import BACKBONES, TIMM_PREFIX, architecture
from facetrain.errors import ModelError
from facetrain.own_parts import is_place, load_part
from facetrain.settings import imported

_DEFAULT_TYPE = RLock()
"""Held while torch's default type is another one, which all threads share."""
_OPTIONS = ("embedding_size", "image_size", "dropout", "checkpoint_activations")
"""Options of every backbone."""


def takes_landmarks(name: str) -> bool:
    """Return whether a backbone takes landmarks with each image, see `Backbone.takes_landmarks`."""
    part = load_part(name, "model.backbone") if is_place(name) else imported(architecture(name).place)
    return bool(getattr(part, "takes_landmarks", False))


@contextmanager
def _float32_by_default() -> Iterator[None]:
    """Let new tensors be float32 within the block: a program may have set another default type."""
    with _DEFAULT_TYPE:
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


@_float32_by_default()
def build_backbone(
    name: str,
    *,
    layers: Sequence[int] | None = None,
    widths: Sequence[int] | None = None,
    stem_stride: int | None = None,
    own: dict[str, Any] | None = None,
    **options: Any,
) -> Backbone:
    """Build a backbone with random weights, on the CPU and in float32.

    `layers` and `widths` are the blocks and the channels of the four stages. `iresnet` needs both, and can take
    `stem_stride`, the stride of its first convolution; a MobileFaceNet can take `layers`, in place of the published
    numbers. `own` are keyword arguments of timm/NAME, or of a part of the
    user, MODULE:NAME. The options are embedding_size, image_size, dropout and checkpoint_activations.

    Raises:
        ModelError: no backbone has that name, or it does not have an option.
        ConfigError: the user's part may not run, or cannot be built.
    """
    if unknown := options.keys() - _OPTIONS:
        raise ModelError(f"model.backbone: {name} has no option {min(unknown)}; use {', '.join(_OPTIONS)}")
    if is_place(name):
        return build_own(load_part(name, "model.backbone"), own or {}, **options)
    if name not in BACKBONES and not name.startswith(TIMM_PREFIX):
        close = difflib.get_close_matches(name, BACKBONES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(BACKBONES)}"
        raise ModelError(f"model.backbone: {name!r} is not a backbone; {hint}")
    if problem := architecture(name).shape_problem(layers, widths, stem_stride):
        raise ModelError(f"model.backbone: {name}: {problem}")
    place, arguments, *_ = architecture(name)
    given = {"layers": layers, "widths": widths, "stem_stride": stem_stride, "own": own or None}
    given = {key: value for key, value in given.items() if value is not None}
    network: Backbone = imported(place)(**arguments | given, **options)
    return network


def build_on_meta(name: str, **options: Any) -> Backbone:
    """Build a backbone without memory for its weights, for their names and shapes; see `build_backbone`.

    Raises:
        ModelError, ConfigError: as `build_backbone`.
    """
    if is_place(name):  # its code may read values, such as those of torch.linspace: with memory for a moment
        with torch.random.fork_rng([]):
            return build_backbone(name, **options).to("meta")
    with torch.device("meta"), _WithoutInitialization():
        return build_backbone(name, **options)


class _WithoutInitialization(TorchFunctionMode):
    """Skip the functions of `torch.nn.init`.

    On the meta device there are no values to set, but `Tensor.normal_` imports torch.compile's tracer there, which
    takes more than a second.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the tensor that should be initialized; call all other functions."""
        kwargs = kwargs or {}
        # `kaiming_normal_` does not announce itself to modes, but the method that it calls does.
        if getattr(function, "__module__", None) == "torch.nn.init" or function == torch.Tensor.normal_:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)
