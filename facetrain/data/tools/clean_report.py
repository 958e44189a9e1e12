"""Report file of `facetrain data clean`: decisions on label faults that can be read, edited and applied later."""

# N images

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.dataset import FaceDataset, identity_name, image_name
from facetrain.data.tools.clean import CleanReport
from facetrain.data.tools.label_faults import (
    DUPLICATE_IDENTITY,
    FAULT_KINDS,
    MIXED_IDENTITY,
    LabelFault,
    certain_faults,
)
from facetrain.errors import DataError
from facetrain.files import error_reason, os_errors_as, parse_json, printable

FORMAT = "facetrain data clean 1"
_FINGERPRINT_IMAGES = 256


def fingerprint(source: FaceDataset) -> str:
    """Return the sha256 of the labels and of 256 evenly spaced images."""
    digest = hashlib.sha256(np.asarray(source.labels, np.int64).tobytes())
    count = source.num_images
    for number in sorted({index * count // _FINGERPRINT_IMAGES for index in range(_FINGERPRINT_IMAGES)}):
        digest.update(source.read(number))
    return f"sha256:{digest.hexdigest()}"


def describe_report(source: FaceDataset, report: CleanReport, model: Path) -> dict[str, Any]:
    """Return the content of a report file, with the names of identities and images."""
    applied = set(certain_faults(report.faults))
    return {
        "format": FORMAT,
        "model": str(model),
        "images": source.num_images,
        "fingerprint": fingerprint(source),
        "eer": report.separation.eer,
        "expected_false": report.expected_false,
        "decisions": [
            _describe(source, number, fault, fault in applied)
            for number, fault in enumerate(report.faults, 1)
        ],
    }


def format_report(content: dict[str, Any]) -> str:
    """Return the JSON text of a report, with one decision per line for editors."""
    lines = [json.dumps(one, ensure_ascii=False) for one in content["decisions"]]
    head = json.dumps(content | {"decisions": []}, indent=1, ensure_ascii=False)
    body = "[\n  " + ",\n  ".join(lines) + "\n ]" if lines else "[]"
    return head.removesuffix("[]\n}") + body + "\n}\n"


def read_report(path: Path, source: FaceDataset) -> list[LabelFault]:
    """Return the decisions of a report file that are to be applied to the dataset that it was made of.

    Raises:
        DataError: the file cannot be read, is not a report, or belongs to another dataset.
    """
    try:
        with os_errors_as(DataError, path):
            content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(
            f"{path}: not JSON ({error_reason(error)}); correct it, or write it again with --report"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{path}: not a report of `facetrain data clean --report FILE`")
    if content.get("fingerprint") != fingerprint(source):
        raise DataError(
            f"{path}: was made of another dataset (its images or labels differ); give the dataset that "
            "`facetrain data clean` read"
        )
    decisions = content.get("decisions")
    if not isinstance(decisions, list):
        raise DataError(f"{path}: `decisions` is not a list")
    # Groups of mixed identities get labels after those of the dataset, at most one per decision.
    last_label = source.num_classes + len(decisions) - 1
    faults = []
    for number, one in enumerate(decisions, 1):
        where = f"{path}: decision {number} in the list"
        if not isinstance(one, dict) or not isinstance(one.get("apply"), bool):
            raise DataError(f"{where}: `apply` must be true or false")
        if one["apply"]:
            faults.append(_parse(one, where, source.num_images - 1, last_label))
    return faults


def _describe(source: FaceDataset, number: int, fault: LabelFault, apply: bool) -> dict[str, Any]:
    return {
        "number": number,
        "apply": apply,
        "kind": fault.kind,
        "identity": fault.identity,
        "identity_name": identity_name(source, fault.identity),
        "other": fault.other,
        "other_name": identity_name(source, fault.other) if fault.other >= 0 else None,
        "images": list(fault.images),
        "names": [image_name(source, image) for image in fault.images],
        "target": fault.target,
        "similarity": round(fault.similarity, 4),
    }


def _parse(one: dict[str, Any], where: str, last_image: int, last_label: int) -> LabelFault:
    kind, rows = one.get("kind"), one.get("images")
    if not isinstance(kind, str) or kind not in FAULT_KINDS:
        raise DataError(f"{where}: kind {printable(str(kind))}; allowed are {', '.join(FAULT_KINDS)}")
    if not isinstance(rows, list) or not all(_is_number(row, 0, last_image) for row in rows):
        raise DataError(f"{where}: `images` must be a list of numbers from 0 to {last_image:,}")
    # Two identities are merged, and a group becomes an identity: neither can be −1.
    lowest = {"identity": 0, "other": 0 if kind == DUPLICATE_IDENTITY else -1}
    lowest["target"] = 0 if kind in (MIXED_IDENTITY, DUPLICATE_IDENTITY) else -1
    for key, least in lowest.items():
        if not _is_number(one.get(key), least, last_label):
            raise DataError(f"{where}: `{key}` must be a number from {least} to {last_label:,}")
    return LabelFault(kind, one["identity"], one["other"], float("nan"), tuple(rows), one["target"])


def _is_number(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
