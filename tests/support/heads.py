"""Heads and margins built from keyword options, with the config schema's defaults for the others."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from facetrain.head import sharded_softmax
from facetrain.head.head_settings import HeadSettings
from facetrain.head.margin_head import MarginHead
from facetrain.head.margins import Margin, MarginSettings, build_margin
from facetrain.head.settings import HeadConfig, MarginConfig
from facetrain.optim.settings import OptimSettings
from facetrain.run.build.head import head_settings, optimizer_settings
from tests.support.fake_cuda import GPU, Context


def make_margin(type: str = "arcface", *, seed: int = 0, **given: Any) -> Margin:
    """Build a margin by its name in the config; `given` are further keys of `head.margin`, not validated."""
    values = MarginConfig().model_dump() | given | {"type": type}
    return build_margin(MarginSettings(**values), seed=seed)


def head_arguments(
    *,
    optimizer: str = "sgd",
    momentum: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    """Return the arguments of a `MarginHead`; `options` are its own or fields of `HeadSettings`."""
    names = {field.name for field in fields(HeadSettings)} & options.keys()
    settings = replace(head_settings(HeadConfig()), **{name: options.pop(name) for name in names})
    optim = OptimSettings(name=optimizer, momentum=momentum, betas=betas, weight_decay=weight_decay)  # type: ignore[arg-type]
    return {"settings": settings, "optimizer": optimizer_settings(optim), **options}


def make_head(**options: Any) -> MarginHead:
    """Build a head from the options of `head_arguments`."""
    return MarginHead(**head_arguments(**options))


def head_step(head: MarginHead, number: int, patch: Any, *, batch: int = 16) -> tuple[Tensor, Tensor]:
    """Run one forward and backward pass on a fake GPU, and the update; return loss and gradient of the embeddings."""
    context = Context()
    function = sharded_softmax._CrossEntropy
    patch.setattr(function, "apply", lambda *arguments: function.forward(context, *arguments))
    head.begin_step(number)
    with _disable_current_modes():  # labels with content, by which the host selects the classes of a sample
        expected = torch.arange(batch) * 7919 % head.num_classes
    head.expect_labels(expected)
    embedding = torch.empty(batch, head.embedding_size, device=GPU)
    label = torch.empty(batch, dtype=torch.int64, device=GPU)
    loss = head(embedding, label)
    gradient = function.backward(context, torch.empty((), device=GPU))[0]
    if not head.update_in_backward:
        head.step(torch.full((), 2.0, device=GPU), torch.full((), 0.0, device=GPU))
    return loss, gradient
