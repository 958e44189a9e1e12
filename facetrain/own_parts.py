"""Parts of one's own: code that a config names by its place, MODULE:NAME.

A place runs only if it was allowed in this process: by `allow`, for what the user's own config names, or by
`allow_all`, for the option `--allow-code`. So a config or a model of other people cannot name code that runs.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from facetrain.errors import ConfigError

PLACE_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
_allowed: set[str] = set()
_allows_all = False
_imports: dict[str, tuple[object, str]] = {}
"""The modules of the parts that were loaded, by name: the spec of their import, of which a reload makes another one,
and the SHA-256 of their source file then."""
_digests: dict[str, str] = {}
"""SHA-256 of the source file that defines a part, as it was imported, by the place of the part."""


def is_place(name: str) -> bool:
    """Return whether a name in a config is the place of code, MODULE:NAME."""
    return re.fullmatch(PLACE_PATTERN, name) is not None


def allow(places: Iterable[str]) -> None:
    """Let these places run in this process."""
    _allowed.update(places)


def allow_all() -> None:
    """Let every place run in this process: the user trusts the config or the model that names it."""
    global _allows_all
    _allows_all = True


@contextmanager
def allowing_all(is_allowed: bool) -> Iterator[None]:
    """Let every place run in this process inside of the block, as `allow_all`; otherwise change nothing."""
    global _allows_all
    before, _allows_all = _allows_all, _allows_all or is_allowed
    try:
        yield
    finally:
        _allows_all = before


def allow_option(is_needed: bool) -> str:
    """Return the option of a command that runs parts, with a space before it; empty for one that runs none."""
    return " --allow-code" if is_needed else ""


def require_allowed(place: str, named_by: str) -> None:
    """Check that a place may run.

    Raises:
        ConfigError: it was not allowed. The message begins with `named_by`, the key or the file that names it.
    """
    if not _allows_all and place not in _allowed:
        raise ConfigError(
            f"{named_by}: names the code {place}, which does not run for a config or a model of others; if you trust "
            "it, add --allow-code, or allow_code=True in Python"
        )


def load_part(place: str, named_by: str) -> Any:
    """Import the module of a place, and return its function or class.

    Modules are found as Python finds them, and then in the current folder.

    Args:
        place: MODULE:NAME.
        named_by: key or file that names it, for errors.

    Raises:
        ConfigError: the place was not allowed, or is not that of a function or a class.
    """
    require_allowed(place, named_by)
    name, _, attribute = place.partition(":")
    if name == "__main__":
        raise ConfigError(
            f"{named_by}: {place}: no other process can import {name}; write the code into a module, such as "
            "my_faces.py"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # last: a file of the folder does not replace an installed module
    package = name.partition(".")[0]
    try:
        part = getattr(import_module(name), attribute, None)
    except (Exception, SystemExit) as error:  # the code may raise anything, and end the program
        line, reason = line_of(error, package), " ".join(str(error).split())
        # With a line of its code, what is missing is another module, which the code imports.
        is_missing = isinstance(error, ModuleNotFoundError) and not line
        raise ConfigError(
            f"{named_by}: {place} cannot be imported ({line}{': ' if line else ''}{type(error).__name__}: {reason})"
            + (f"; start facetrain in the folder that has {package}, or set PYTHONPATH" if is_missing else "")
        ) from error
    if not callable(part):
        raise ConfigError(f"{named_by}: {place}: {_file_of(name) or name} has no such function or class")
    modules = _modules_of(part, place)
    for module in modules:
        spec = getattr(sys.modules.get(module), "__spec__", None)
        if module not in _imports or _imports[module][0] is not spec:
            _imports[module] = spec, _file_digest(module)
    _digests[place] = _imports[modules[0]][1]
    return part


def is_of_other_code(part: object) -> bool:
    """Return whether the class of an object is none of facetrain's."""
    return type(part).__module__.partition(".")[0] != "facetrain"


def _modules_of(part: Any, place: str) -> tuple[str, str]:
    """Return the names of the module that defines a part, and of the one that its place names, which may import it."""
    named = place.partition(":")[0]
    # Another object, such as a `functools.partial`, has the module of its type, and a method of a C type has none.
    has_own = isinstance(part, type) or inspect.isroutine(part)
    return (getattr(part, "__module__", None) if has_own else None) or named, named


def _file_of(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)


def _file_digest(module: str) -> str:
    """Return the SHA-256 of the file of a module; empty without one."""
    file = _file_of(module)
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    except OSError:
        return ""


def line_of(error: BaseException, package: str | None = None) -> str:
    """Return file and line of the part from which an exception comes; empty if it comes from none.

    `package` is that of a part whose import has raised it.
    """
    places = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if (name := frame.f_globals.get("__name__", "")) in _imports or name.partition(".")[0] == package
    ]
    return places[-1] if places else ""


def describe_result(value: Any) -> str:
    """Return what a part has returned, in words for a message: its type, and of a tensor shape and dtype."""
    name, shape = type(value).__name__, getattr(value, "shape", None)
    return name if shape is None else f"a {name.lower()} of shape {tuple(shape)} and {value.dtype}"


def source_digest(place: str) -> str:
    """Return the SHA-256 of the source file of a part that this process has loaded; empty for others."""
    return _digests.get(place, "")


def require_unchanged(place: str, named_by: str) -> None:
    """Check that the files of a part are as this process imported them: a notebook would run its old code.

    Raises:
        ConfigError: one has changed; otherwise as `load_part`.
    """
    part = load_part(place, named_by)
    for module in _modules_of(part, place):
        if _imports[module][1] != _file_digest(module):
            raise ConfigError(
                f"{named_by}: {sys.modules[module].__file__} has changed since it was imported; restart the program or "
                f"the kernel of the notebook, or call importlib.reload({module})"
            )


def name_of(part: Callable[..., Any]) -> str:
    """Return the name of a function or a class, or that of an object's class: an object's text may have lines."""
    return getattr(part, "__name__", type(part).__name__)
