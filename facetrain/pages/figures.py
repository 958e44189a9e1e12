"""Figures of matplotlib as inline SVG, in the colors of the page."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SVG_STYLE = re.compile(r'<style type="text/css">.*?</style>', re.S)
_STYLE_ATTRIBUTE = re.compile(r' style="([^"]*)"')
_COLORS = {"#000000": "currentColor", "#ffffff": "none"}
"""matplotlib's colors of text and background -> those of the page, which is dark for some readers."""


def svg(figure: Figure, salt: str) -> Markup:
    """Return a figure as inline SVG. `salt` must differ between the figures of a page."""
    import matplotlib

    text = io.StringIO()
    # A fixed salt makes the ids in the SVG the same in every run, and different for each figure of the page.
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return Markup(_without_styles(text.getvalue()[text.getvalue().index("<svg") :]))


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
