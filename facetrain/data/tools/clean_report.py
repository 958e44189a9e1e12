"""Report file of `facetrain data clean`: decisions on label faults that can be read, edited and applied later."""

# N images

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Sequence
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
    applied_by_default,
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


def describe_report(
    source: FaceDataset, report: CleanReport, model: Path, *, merge: bool = False
) -> dict[str, Any]:
    """Return the content of a report file, with the names of identities and images.

    Pairs of identities that show one person have `apply` only with `merge`, and no expected number of mistakes.
    """
    applied = set(applied_by_default(report.faults, merge=merge))
    return {
        "format": FORMAT,
        "model": str(model),
        "images": source.num_images,
        "fingerprint": fingerprint(source),
        "eer": report.separation.eer,
        "expected_false": report.expected_false,
        "thresholds": {
            kind: {
                "score": _finite(one.threshold),
                "expected_false": None if kind == DUPLICATE_IDENTITY else one.expected_false,
            }
            for kind, one in report.thresholds.items()
        },
        "decisions": describe_decisions(source, report.faults, applied),
    }


def describe_decisions(
    source: FaceDataset, faults: Sequence[LabelFault], applied: Container[LabelFault]
) -> list[dict[str, Any]]:
    """Return the decisions of a report file, with the names of identities and images."""
    return [
        _describe(source, fault.number or position, fault, fault in applied)
        for position, fault in enumerate(faults, 1)
    ]


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
    if content.get("images") != source.num_images or content.get("fingerprint") != fingerprint(source):
        raise DataError(
            f"{path}: was made of another dataset (its images or labels differ); give the dataset that "
            "`facetrain data clean` read"
        )
    decisions = content.get("decisions")
    if not isinstance(decisions, list):
        raise DataError(f"{path}: `decisions` is not a list")
    # Groups of mixed identities get labels after those of the dataset, at most one per decision.
    labels = range(source.num_classes + len(decisions))
    parsed = [_parse(one, index, path, source.num_images, labels) for index, one in enumerate(decisions, 1)]
    groups = {fault.target for fault in parsed if fault is not None and fault.kind == MIXED_IDENTITY}
    for index, fault in enumerate(parsed, 1):
        for key in ("identity", "other") if fault is not None else ():
            value = getattr(fault, key)
            if value >= source.num_classes and value not in groups:
                raise DataError(
                    f"{path}: decision {index} in the list: `{key}` is {value}, neither an identity of the dataset nor "
                    f"the group of a {MIXED_IDENTITY} that is applied; correct it, or set `apply` to false"
                )
    return [fault for fault in parsed if fault is not None]


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


def _parse(one: Any, index: int, path: Path, images: int, labels: range) -> LabelFault | None:
    """Return a decision; None if its `apply` is false."""
    if not isinstance(one, dict) or not isinstance(one.get("apply"), bool):
        raise DataError(f"{path}: decision {index} in the list: `apply` must be true or false")
    if not one["apply"]:
        return None
    where = f"{path}: decision {index} in the list"
    kind, rows = one.get("kind"), one.get("images")
    if not isinstance(kind, str) or kind not in FAULT_KINDS:
        raise DataError(f"{where}: kind {printable(str(kind))}; allowed are {', '.join(FAULT_KINDS)}")
    if not isinstance(rows, list) or not all(_is_number(row) and 0 <= row < images for row in rows):
        raise DataError(f"{where}: `images` must be a list of numbers from 0 to {images - 1:,}")
    # Two identities are merged, and a group becomes an identity: neither can be −1.
    lowest = {"identity": 0, "other": 0 if kind == DUPLICATE_IDENTITY else -1}
    lowest["target"] = 0 if kind in (MIXED_IDENTITY, DUPLICATE_IDENTITY) else -1
    for key, least in lowest.items():
        value = one.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < labels.stop:
            raise DataError(f"{where}: `{key}` must be a number from {least} to {labels.stop - 1:,}")
    similarity = one.get("similarity")
    if not isinstance(similarity, int | float) or not abs(similarity) <= 1:
        similarity = float("nan")  # it is only shown, as is the number
    number = one["number"] if _is_number(one.get("number")) else index
    return LabelFault(
        kind, one["identity"], one["other"], rows[0] if rows else -1,
        float(similarity), tuple(rows), one["target"], number,
    )  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
