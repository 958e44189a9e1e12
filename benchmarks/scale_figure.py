"""Cost of a run by identities and ranks, from counted bytes and operations: the tables and the figure of docs/scale.md.

    python -m benchmarks.scale_figure docs/scale.svg

Nothing is measured: each time is a number of bytes or operations, divided by a rate of `Rates`.
"""

# B local batch   G gathered batch   D embedding   C identities   W ranks

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.head_traffic import passed_bytes

EMBEDDING_SIZE, LOCAL_BATCH, IMAGES_PER_IDENTITY = 512, 128, 20.6
IDENTITIES, RANKS = (1e6, 3e6, 1e7, 3e7, 1e8), (8, 64, 512)
CENTER_BYTES_MOVED, LOGIT_BYTES_MOVED = 41, 6
"""Of a step with float32 tables, per number of a center and per logit (docs/log/log.md)."""
TABLE_BYTES = 8
"""Center and momentum in float32, per number."""
CATALOG_BYTES = 12
"""Per image."""
BACKBONE_PARAMETERS = 65.2e6
"""Of an r100."""


@dataclass(frozen=True)
class Rates:
    """Rates of a machine with eight H100, per GPU unless stated."""

    products: float = 0.5 * 989e12
    """Operations per second: half of the vendor's rate."""
    memory: float = 0.8 * 3.35e12
    """Bytes per second: 80 % of the vendor's rate."""
    within_host: float = 300e9
    """Bytes per second between GPUs of one machine."""
    between_hosts: float = 50e9
    """Bytes per second between machines: a link of 400 Gbit/s for each GPU."""
    disk: float = 2e9
    """Bytes per second that a machine of eight GPUs writes."""
    backbone_s: float = 45e-3
    """A step of an r100 without a head."""

    def network(self, ranks: int) -> float:
        """Return the bytes per second of the slowest link."""
        return self.within_host if ranks <= 8 else self.between_hosts


def head_operations(identities: float, sample_rate: float = 1.0) -> float:
    """Return the operations of a rank's four products: 2·G·(C/W)·D each, and G = W·B. The ranks cancel."""
    return 8 * LOCAL_BATCH * identities * sample_rate * EMBEDDING_SIZE


def head_bytes(identities: float, ranks: int, sample_rate: float = 1.0) -> float:
    """Return the bytes that a rank's head reads and writes in device memory."""
    classes = identities / ranks * sample_rate
    return classes * (CENTER_BYTES_MOVED * EMBEDDING_SIZE + LOGIT_BYTES_MOVED * LOCAL_BATCH * ranks)


def head_s(identities: float, ranks: int, rates: Rates, sample_rate: float = 1.0) -> float:
    """Return the time of the head without the exchange."""
    return (
        head_operations(identities, sample_rate) / rates.products
        + head_bytes(identities, ranks, sample_rate) / rates.memory
    )


def exchange_s(ranks: int, rates: Rates) -> float:
    """Return the time in which a rank receives the others' rows, and sends the gradient of theirs."""
    rows = (ranks - 1) * LOCAL_BATCH * (4 * EMBEDDING_SIZE + 8)
    passed = passed_bytes(ranks, LOCAL_BATCH, EMBEDDING_SIZE)
    gradients = passed["reduce_scatter"] * (ranks - 1) / ranks
    return (rows + gradients) / rates.network(ranks)


def backbone_exchange_s(ranks: int, rates: Rates) -> float:
    """Return the time of the backbone's gradients in a ring, most of which the backward pass hides."""
    return 2 * 4 * BACKBONE_PARAMETERS * (ranks - 1) / ranks / rates.network(ranks)


def table_bytes(identities: float, ranks: int) -> float:
    """Return the bytes of a rank's centers and momentum; all ranks together write as many to a checkpoint."""
    return identities / ranks * EMBEDDING_SIZE * TABLE_BYTES


def checkpoint_s(identities: float, ranks: int, rates: Rates) -> float:
    """Return the time in which a machine writes the tables of its eight ranks, beside the training."""
    return 8 * table_bytes(identities, ranks) / rates.disk


def catalog_bytes(identities: float) -> float:
    """Return the bytes of the catalog of the images, which all processes of a machine share."""
    return identities * IMAGES_PER_IDENTITY * CATALOG_BYTES


def tables(rates: Rates) -> str:
    """Return the tables of the page: costs by identities, and by ranks."""
    rows = [
        "| identities | head, all classes: 8; 64; 512 ranks | a tenth sampled, 8 ranks | tables of a rank: 8; 64; 512 "
        "ranks | checkpoint | catalog |",
        "|---|---|---|---|---|---|",
    ]
    for identities in IDENTITIES:
        heads = "; ".join(f"{1e3 * head_s(identities, ranks, rates):.3g}" for ranks in RANKS)
        held = "; ".join(f"{table_bytes(identities, ranks) / 1e9:.2g}" for ranks in RANKS)
        sampled = 1e3 * head_s(identities, 8, rates, 0.1)
        checkpoint = table_bytes(identities, 1) / 1e9
        rows.append(
            f"| {identities / 1e6:.0f} M | {heads} ms | {sampled:.2g} ms | {held} GB | {checkpoint:.3g} GB | "
            f"{catalog_bytes(identities) / 1e9:.2g} GB |"
        )
    rows += ["", "| ranks | rows and their gradients | backbone's gradients |", "|---|---|---|"]
    for ranks in (8, 16, 64, 128, 256, 512):
        times = (1e3 * seconds(ranks, rates) for seconds in (exchange_s, backbone_exchange_s))
        rows.append(f"| {ranks} | " + " | ".join(f"{time:.2g} ms" for time in times) + " |")
    return "\n".join(rows)


def draw(path: Path, rates: Rates) -> None:
    """Write the figure as SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.4), layout="constrained")
    (head, exchange), (memory, saving) = figure.subplots(2, 2)
    for ranks, color in zip(RANKS, ("C0", "C1", "C2"), strict=True):
        for rate, style, name in ((1.0, "-", "all classes"), (0.1, "--", "a tenth")):
            times = [1e3 * head_s(identities, ranks, rates, rate) for identities in IDENTITIES]
            head.plot(IDENTITIES, times, style, color=color, label=f"{ranks} ranks, {name}")
        held = [table_bytes(identities, ranks) / 1e9 for identities in IDENTITIES]
        memory.plot(IDENTITIES, held, color=color, label=f"tables of a rank, {ranks} ranks")
        written = [checkpoint_s(identities, ranks, rates) for identities in IDENTITIES]
        saving.plot(IDENTITIES, written, color=color, label=f"{ranks} ranks")
    head.axhline(1e3 * rates.backbone_s, color="gray", linestyle=":", label="backbone (r100)")
    counts = [2**power for power in range(3, 10)]
    for seconds, name in (
        (exchange_s, "head: rows, gradients"),
        (backbone_exchange_s, "backbone's gradients"),
    ):
        exchange.plot(counts, [1e3 * seconds(count, rates) for count in counts], "o-", label=name)
    catalog = [catalog_bytes(identities) / 1e9 for identities in IDENTITIES]
    memory.plot(IDENTITIES, catalog, color="black", linestyle="--", label="catalog of a machine")
    memory.axhline(40, color="gray", linestyle=":", label="half of 80 GB")
    labels = (
        (head, "identities", "head of a step, ms"),
        (exchange, "ranks", "exchange of a step, ms"),
        (memory, "identities", "memory, GB"),
        (saving, "identities", "write of a checkpoint, s"),
    )
    for axes, across, up in labels:
        axes.set(xscale="log", yscale="log", xlabel=across, ylabel=up)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    with matplotlib.rc_context({"svg.hashsalt": "scale", "svg.fonttype": "none"}):
        figure.savefig(path, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))


def main(figure: Annotated[Path | None, typer.Argument(help="SVG file to draw.")] = None) -> None:
    """Print the tables, and draw the figure."""
    if figure is not None:
        draw(figure, Rates())
    print(tables(Rates()))


if __name__ == "__main__":
    typer.run(main)
