"""Paths of the members of archives."""

from __future__ import annotations


def member_path(name: str) -> str:
    """Return the path of a member without the parts that name the same folder, as in ./ann/1.jpg."""
    if "./" not in name and "//" not in name and not name.startswith("/"):
        return name
    *folders, file = name.split("/")
    return "/".join([*(part for part in folders if part not in ("", ".")), file])
