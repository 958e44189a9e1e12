"""The option --device."""

from __future__ import annotations

from typing import Annotated

import typer

from facetrain.errors import UsageError


def _known(name: str) -> str:
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {name}: there are auto, cpu and cuda")
    return name


Device = Annotated[
    str, typer.Option(callback=_known, help="cpu or cuda; auto takes a GPU where there is one.")
]


def chosen_device(name: str) -> str:
    """Return cpu or cuda."""
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
