"""Names of the metrics of metrics.jsonl, grouped for programs that draw one chart per name."""

from __future__ import annotations

_GROUPS = {
    "loss": "loss",
    "distill_loss": "loss",
    "loss_spike": "loss",
    "grad_norm": "loss",
    "lr": "lr",
    "images_per_s": "speed",
    "wait_s": "speed",
    "left_s": "speed",
    "peak_memory_gib": "speed",
}
"""Group of each metric of a training step that belongs to one."""
_OTHER = "run"
"""Group of the other metrics, such as the epoch and the number of skipped images."""


def grouped_name(name: str) -> str:
    """Return the name of a metric with its group in front: "loss/loss", "speed/wait_s", "eval/lfw/accuracy"."""
    if "/" in name:  # the metric of a verification set
        return f"eval/{name}"
    return f"{_GROUPS.get(name, _OTHER)}/{name}"
