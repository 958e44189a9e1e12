"""Figures of matplotlib as inline SVG, in the colors of the page."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from facetrain.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

_SVG_STYLE = re.compile(r'<style type="text/css">.*?</style>', re.S)
_STYLE_ATTRIBUTE = re.compile(r' style="([^"]*)"')
_COLORS = {"#000000": "currentColor", "#ffffff": "none"}
"""matplotlib's colors of text and background -> those of the page, which is dark for some readers."""


def new_figure(width: float, height: float) -> tuple[Figure, Any]:
    """Return a figure of a size in inches, and its axes."""
    # Figure, not pyplot.figure: pyplot keeps every figure in memory until it is closed, and may need a display.
    from matplotlib.figure import Figure

    # Constrained, so that a legend beside the curves takes room from the axes and covers no points.
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def svg(figure: Figure, salt: str) -> Markup:
    """Return a figure as inline SVG. `salt` must differ between the figures of a page; it may be any text."""
    import matplotlib

    text = io.StringIO()
    # A fixed salt makes the ids in the SVG the same in every run, and different for each figure of the page.
    with matplotlib.rc_context({"svg.hashsalt": printable(salt)}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return Markup(_without_styles(text.getvalue()[text.getvalue().index("<svg") :]))


def curve_label(name: str) -> str:
    """Return a name as the label of a curve."""
    # matplotlib leaves out labels that begin with `_`, and warns on the terminal of characters that its font lacks.
    return printable(f" {name}" if name.startswith("_") else name)


def show_as_text(legend: Legend) -> None:
    """Let no label of a legend be read as a formula, which `$` begins."""
    for text in legend.get_texts():
        text.set_parse_math(False)


def _without_styles(drawing: str) -> str:
    """Return an SVG of matplotlib with attributes in place of styles, which the page's policy blocks."""
    # matplotlib sets the first two for all elements, and leaves out a black fill; the root's attributes are inherited.
    root = '<svg stroke-linejoin="round" stroke-linecap="butt" fill="currentColor" '
    return _STYLE_ATTRIBUTE.sub(_attributes, _SVG_STYLE.sub("", drawing.replace("<svg ", root, 1)))


def _attributes(style: re.Match[str]) -> str:
    declarations = (part.partition(":") for part in style[1].split(";") if part.strip())
    return "".join(
        f' {name.strip()}="{_COLORS.get(value.strip(), value.strip())}"' for name, _, value in declarations
    )
