"""The option --device of what measures."""

from __future__ import annotations

from typing import Annotated

import typer

from facetrain.errors import UsageError

Device = Annotated[str, typer.Option(help="cpu or cuda; auto takes a GPU where there is one.")]


def chosen_device(name: str) -> str:
    """Return cpu or cuda.

    Raises:
        UsageError: it is none of auto, cpu and cuda.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {name}: there are auto, cpu and cuda")
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
