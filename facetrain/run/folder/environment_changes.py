"""Differences between the environments of two starts of a run that change its numbers."""

from __future__ import annotations

from typing import Any


def environment_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what differs, a line each; what was not recorded before does not differ.

    Both are as `environment.describe_environment` returns them; `before` comes from a file, and may have any values.
    """
    return [
        line
        for line in (_of_device(before, now), _of_threads(before, now), _of_packages(before, now))
        if line
    ]


def _of_device(before: dict[str, Any], now: dict[str, Any]) -> str:
    has_changed = [before.get(name, now[name]) != now[name] for name in ("device", "kernels")]
    if not any(has_changed):
        return ""
    places = [f"{each.get('device', now['device'])}{_kernels(each)}" for each in (before, now)]
    return f"the run computed on {places[0]} before, and does on {places[1]} now; numbers may differ in the last digits"


def _kernels(environment: dict[str, Any]) -> str:
    if "kernels" not in environment:
        return ""
    return f" {'with' if environment['kernels'] else 'without'} kernels for the head"


def _of_threads(before: dict[str, Any], now: dict[str, Any]) -> str:
    recorded, threads = before.get("threads"), now["threads"]
    if recorded in (None, threads):
        return ""
    return (
        f"this process computes with {threads} threads, and the run did with {recorded} before: on a CPU its "
        f"numbers may differ in the last digits; set OMP_NUM_THREADS={recorded} to continue bit for bit"
    )


def _of_packages(before: dict[str, Any], now: dict[str, Any]) -> str:
    recorded = before.get("packages")
    versions = [
        f"{name} {recorded[name]} → {version}"
        for name, version in now["packages"].items()
        if isinstance(recorded, dict) and recorded.get(name, version) != version
    ]
    if not versions:
        return ""
    return (
        f"the versions of packages have changed: {', '.join(versions)}; numbers may differ in the last digits"
    )
