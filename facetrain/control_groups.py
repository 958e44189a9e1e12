"""Control groups (cgroups) of this process: those of its container, or of its job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def own_groups(controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folder of each group of this process that may limit a controller's resource, and 1 or 2, its version.

    From its own group up to the root: a limit holds for all groups below. The folder of a group may be absent.
    """
    lines: list[str] = []
    with suppress(OSError):
        lines = _OWN.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _ROOT / controller if controllers else _ROOT  # version 1 has a tree for each controller
        folder = root / path.lstrip("/")
        # A container sees the path on its host, and only its own group, as the root.
        for group in (folder, *folder.parents):
            if group.is_relative_to(root):
                yield group, 1 if controllers else 2
