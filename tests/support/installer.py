"""The installer of packages on this machine."""

from __future__ import annotations

import shutil
import sys
from importlib.machinery import PathFinder

import pytest

from tests.support.command import ROOT


def uv() -> str | None:
    """Return the path of uv, or None."""
    # scripts/setup installs it into build/uv where the machine has none.
    return shutil.which("uv") or shutil.which("uv", path=ROOT / "build/uv/bin")


def pip() -> list[str]:
    """Return a command that takes the arguments of pip; skip the calling test if there is none."""
    if path := uv():
        return [path, "pip"]
    # importlib.util.find_spec would run setuptools' hook, which then gives this process the standard library's
    # distutils, and torch's compiler fails on Python 3.11.
    if PathFinder.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    pytest.skip("needs uv or pip")
