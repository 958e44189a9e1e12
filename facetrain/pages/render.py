"""Rendering of a template to a page that needs no network and runs no script."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from facetrain.text import printable

_PACKAGE = Path(__file__).resolve().parents[1]


def render(template: str, **values: Any) -> str:
    """Return a page. All values are escaped, except those of `markupsafe.Markup`.

    Args:
        template: path of the template below the package, such as `run/report/report.html.j2`. It extends
            `pages/base.html.j2`, which names the blocks and values of the frame.
        values: what the template names; one that is missing is an error.
    """
    return _environment().get_template(template).render(values)


def jpeg_image(jpeg: bytes, text: str = "") -> Markup:
    """Return an image of the page; `text` is for readers who cannot see it."""
    return Markup('<img alt="{}" src="data:image/jpeg;base64,{}">').format(
        printable(text), b64encode(jpeg).decode()
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_PACKAGE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (_PACKAGE / "pages" / "style.css").read_text(encoding="utf-8")
    environment.globals |= {"style": Markup(style), "policy": _policy(style)}
    return environment


def _finalize(value: Any) -> Any:
    """Escape characters that control a terminal or the direction of the text: names come from other people."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _policy(style: str) -> Markup:
    """Return a content security policy: no script, no network, no plug-in, and no style but one block, by its hash.

    A name that a page failed to escape could not run code or load an image from elsewhere (CSP Level 3, section 2.3.1).
    """
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return Markup(
        f"default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; style-src 'sha256-{digest}'"
    )
