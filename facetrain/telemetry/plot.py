"""A run's loss and accuracy as a picture."""

from __future__ import annotations

from pathlib import Path

from facetrain.telemetry.jsonl import read_jsonl


def plot_curves(metrics: Path, output: Path) -> bool:
    """Draw a metrics.jsonl as a PNG; return whether it could be done: it needs matplotlib (facetrain[plot])."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("agg")
    from matplotlib import pyplot

    records = read_jsonl(metrics)
    losses = [(record["step"], record["loss"]) for record in records if isinstance(record.get("loss"), float)]
    names = sorted({name for record in records for name in record if name.endswith("/accuracy")})
    figure, left = pyplot.subplots(figsize=(7, 3.6), dpi=120)
    if losses:
        left.plot(*zip(*losses, strict=True), color="tab:gray", label="loss")
    left.set_xlabel("step")
    left.set_ylabel("loss")
    right = left.twinx()
    for name in names:
        course = [(record["step"], 100 * record[name]) for record in records if name in record]
        right.plot(*zip(*course, strict=True), marker="o", label=f"{name.removesuffix('/accuracy')} accuracy")
    right.set_ylabel("verification accuracy (%)")
    right.set_ylim(45, 101)
    figure.legend(loc="center right", bbox_to_anchor=(0.9, 0.5))
    figure.tight_layout()
    figure.savefig(output)
    pyplot.close(figure)
    return True
