"""Parts of self-contained HTML pages: frame, tables, and figures as inline SVG."""

from __future__ import annotations

import hashlib
import html
import io
import re
from base64 import b64encode
from collections.abc import Iterable
from typing import TYPE_CHECKING

from facetrain.files import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root{color-scheme:light dark;--text:#222;--faint:#666;--line:#ddd}
@media(prefers-color-scheme:dark){:root{--text:#ddd;--faint:#aaa;--line:#444}body{background:#181818}}
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:var(--text)}
h1{font-size:1.5rem}h2{border-top:2px solid var(--line);padding-top:1rem;margin-top:2.5rem}
table{border-collapse:collapse;margin:.8rem 0}td,th{padding:.2rem .9rem .2rem 0;text-align:right}
td:first-child,th:first-child{text-align:left}tr{border-bottom:1px solid var(--line)}
.table{overflow-x:auto}.details td{text-align:left;overflow-wrap:anywhere}h1{overflow-wrap:anywhere}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(430px,100%),1fr));gap:1rem}
.figures svg{width:100%;height:auto;border-radius:6px}.none{color:var(--faint);text-align:left}
.sheet img{max-width:100%;height:auto;border-radius:6px}
.pairs{display:flex;flex-wrap:wrap;gap:.8rem}figure{margin:0}figure img{width:84px;height:84px}
.lines{overflow-wrap:anywhere;padding-left:1.2rem}
figcaption{font-size:.8rem;color:var(--faint);text-align:center}
.details td:first-child{overflow-wrap:normal;vertical-align:top}
@media(max-width:600px){body{margin:1rem auto}td,th{padding-right:.5rem}}
@media print{body{font-size:9pt;max-width:none;margin:0}.table{overflow:visible}td,th{padding-right:.5rem}
.figures{grid-template-columns:1fr 1fr}tr,figure,svg{break-inside:avoid}h2,h3{break-after:avoid}}
"""


# No script, no network, no plug-in. Inline styles are allowed for the block above only, by its hash (CSP Level 3,
# section 2.3.1): a name that a page failed to escape could not run code or load an image from elsewhere.
_POLICY = (
    "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
    f"style-src 'sha256-{b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'"
)
_SVG_STYLE = re.compile(r'<style type="text/css">.*?</style>', re.S)
_STYLE_ATTRIBUTE = re.compile(r' style="([^"]*)"')


def escape(text: str) -> str:
    """Return a text for HTML: without markup, and without characters that control a terminal or the direction."""
    return html.escape(printable(text))


def html_page(title: str, body: Iterable[str], *, refresh_s: int | None = None) -> str:
    """Return a page with a title, which is also its first heading, and a body that is HTML already.

    A browser reads the page again every `refresh_s` seconds; None: never.
    """
    refresh = "" if refresh_s is None else f'<meta http-equiv="refresh" content="{refresh_s}">'
    frame = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{refresh}',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
    )
    return "\n".join([*frame, *body, "</body></html>"])


def details_table(details: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and texts, which are escaped."""
    return '<table class="details">' + "".join(row(*line) for line in details) + "</table>"


def data_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table with a line of headings; it scrolls where the screen is narrow. All cells are escaped."""
    headings = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(row(*cells) for cells in rows)
    return f'<div class="table"><table><tr>{headings}</tr>{body}</table></div>'


def image(jpeg: bytes, text: str = "") -> str:
    """Return an image of the page; `text` is for readers who cannot see it."""
    return f'<img alt="{escape(text)}" src="data:image/jpeg;base64,{b64encode(jpeg).decode()}">'


def svg(figure: Figure, salt: str) -> str:
    """Return a figure as inline SVG. `salt` must differ between the figures of a page."""
    import matplotlib

    text = io.StringIO()
    # A fixed salt makes the ids in the SVG the same in every run, and different for each figure of the page.
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _without_styles(text.getvalue()[text.getvalue().index("<svg") :])


def _without_styles(drawing: str) -> str:
    """Return an SVG of matplotlib with attributes in place of styles, which the page's policy blocks."""
    # matplotlib sets these two for all elements; as attributes of the root they are inherited.
    drawing = drawing.replace("<svg ", '<svg stroke-linejoin="round" stroke-linecap="butt" ', 1)
    return _STYLE_ATTRIBUTE.sub(_attributes, _SVG_STYLE.sub("", drawing))


def _attributes(style: re.Match[str]) -> str:
    declarations = (part.partition(":") for part in style[1].split(";") if part.strip())
    return "".join(f' {name.strip()}="{value.strip()}"' for name, _, value in declarations)


def row(*cells: str) -> str:
    """Return a row of a table; the cells are escaped."""
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
