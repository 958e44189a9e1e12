"""Command-line option `--device`, shared by all commands that run a network."""

from __future__ import annotations

from typing import Annotated

import typer

from facetrain.errors import UsageError

DEVICES = ("auto", "cpu", "cuda")


def _check_device(name: str) -> str:
    if name not in DEVICES:
        raise UsageError(f"--device {name}: unknown device; choose one of {', '.join(DEVICES)}")
    if name == "cuda":
        resolve_device(name)
    return name


DEVICE_OPTION = typer.Option(
    callback=_check_device,
    help="Device that runs the network: cpu, cuda, or auto, which takes a GPU if there is one.",
)
Device = Annotated[str, DEVICE_OPTION]


def resolve_device(name: str) -> str:
    """Return `cpu` or `cuda` for the value of `--device`; `auto` gives `cuda` if a GPU is available.

    Raises:
        UsageError: `cuda` is given, and there is no GPU.
    """
    if name == "cpu":
        return name
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise UsageError("--device cuda: this machine has no GPU; use --device cpu, or a machine with a GPU")
    return "cpu"
