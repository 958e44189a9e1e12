"""Names of the metrics of metrics.jsonl, grouped for programs that draw one chart per name."""

from __future__ import annotations

_GROUPS = {
    "loss": ("loss", "distill_loss", "grad_norm"),
    "lr": ("lr",),
    "speed": ("images_per_s", "wait_s", "left_s", "peak_memory_gib"),
}
"""Metrics of a training step by group. The group of the others, such as the epoch, is `run`."""


def grouped_name(name: str) -> str:
    """Return the name of a metric with its group in front: "loss/loss", "speed/wait_s", "eval/lfw/accuracy"."""
    if "/" in name:  # the metric of a verification set
        return f"eval/{name}"
    group = next((group for group, names in _GROUPS.items() if name in names), "run")
    return f"{group}/{name}"
