"""Heads and margins built from keyword options, with the default settings for the others."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from facetrain.distributed.world import World
from facetrain.head.build import HeadRun, build_head, build_margin
from facetrain.head.margins.base import Margin
from facetrain.head.partial_fc import PartialFC
from facetrain.head.settings import HeadSettings, MarginSettings
from facetrain.optim.settings import OptimSettings
from tests.support.fake_gpu import GPU


def margin_settings(type: str = "arcface", **given: Any) -> MarginSettings:
    """Return the settings of a margin; `given` are further keys of `head.margin`, not validated."""
    return MarginSettings().model_copy(update=given | {"type": type})


def combined(**given: Any) -> MarginSettings:
    """Return the settings of cos(m1·θ + m2) − m3 with m1 = 1, m2 = m3 = 0, unless `given`."""
    return margin_settings("combined", **{"m2": 0.0, "m3": 0.0} | given)


def make_margin(type: str = "arcface", *, seed: int = 0, **given: Any) -> Margin:
    """Build a margin from `margin_settings`."""
    return build_margin(margin_settings(type, **given), seed=seed)


def head_settings(**given: Any) -> HeadSettings:
    """Return the settings of a head, not validated: oracles have dtypes, such as float64, that no config has."""
    names = {key: str(value).removeprefix("torch.") for key, value in given.items() if key.endswith("_dtype")}
    return HeadSettings().model_copy(update=given | names)


def head_arguments(
    *,
    optimizer: str = "sgd",
    momentum: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    **options: Any,
) -> dict[str, Any]:
    """Return the arguments of `build_head`; `options` are its own, or fields of `HeadSettings` or `HeadRun`."""
    given = {key: options.pop(key) for key in HeadSettings.model_fields.keys() & options.keys()}
    run = {field.name: options.pop(field.name) for field in fields(HeadRun) if field.name in options}
    return {
        "settings": head_settings(**given),
        "optim": OptimSettings(name=optimizer, momentum=momentum, betas=betas, weight_decay=weight_decay),  # type: ignore[arg-type]
        "run": HeadRun(**run),
        "world": World(rank, 0, world_size, world_size, torch.device(device)),
        **options,
    }


def make_head(**options: Any) -> PartialFC:
    """Build a head from the options of `head_arguments`."""
    return build_head(**head_arguments(**options))


def make_net(embedding_size: int) -> nn.Module:
    """Build a network of one layer in float64, with the same weights in every call and on every rank."""
    torch.manual_seed(0)
    return nn.Linear(5, embedding_size).double()


def head_step(head: PartialFC, number: int, *, batch: int = 16) -> tuple[Tensor, Tensor]:
    """Run a forward and backward pass on a fake GPU, and the update; return loss and gradient of the embeddings."""
    head.begin_step(number, lr=0.1)
    expected = torch.arange(batch) * 7919 % head.num_classes
    head.expect_labels(expected)
    embedding = torch.randn(batch, head.embedding_size, device=GPU, requires_grad=True)
    loss = head(embedding, expected.pin_memory().to(GPU, non_blocking=True))
    loss.backward()
    if not head.update_in_backward:
        head.step(torch.full((), 2.0, device=GPU), torch.full((), 0.0, device=GPU))
    assert embedding.grad is not None
    return loss, embedding.grad
