"""Report file of `facetrain data clean`: decisions on wrong labels that can be read, edited and applied later."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.dataset import FaceDataset, evenly_spread
from facetrain.data.tools.wrong_labels import CleanReport, WrongLabel
from facetrain.errors import DataError
from facetrain.files import error_reason, os_errors_as, parse_json

FORMAT = "facetrain data clean 2"
_FINGERPRINT_IMAGES = 256


def fingerprint(source: FaceDataset) -> str:
    """Return the sha256 of the labels and of 256 evenly spaced images."""
    digest = hashlib.sha256(np.asarray(source.labels, np.int64).tobytes())
    for number in evenly_spread(source.num_images, _FINGERPRINT_IMAGES):
        digest.update(source.read(number))
    return f"sha256:{digest.hexdigest()}"


def describe_report(source: FaceDataset, report: CleanReport, model: Path) -> dict[str, Any]:
    """Return the content of a report file, with the names of identities and images."""
    return {
        "format": FORMAT,
        "model": str(model),
        "images": source.num_images,
        "fingerprint": fingerprint(source),
        "eer": report.separation.eer,
        "expected_false": report.threshold.expected_false,
        "decisions": [_describe(source, number, one) for number, one in enumerate(report.wrong, 1)],
    }


def _describe(source: FaceDataset, number: int, one: WrongLabel) -> dict[str, Any]:
    return {
        "number": number,
        "apply": True,
        "image": one.image,
        "name": source.image_name(one.image),
        "identity": one.identity,
        "identity_name": source.identity_name(one.identity),
        "target": one.target,
        "target_name": source.identity_name(one.target) if one.target >= 0 else None,
        "similarity": round(one.similarity, 4),
    }


def format_report(content: dict[str, Any]) -> str:
    """Return the JSON text of a report, with one decision per line for editors."""
    lines = [json.dumps(one, ensure_ascii=False) for one in content["decisions"]]
    head = json.dumps(content | {"decisions": []}, indent=1, ensure_ascii=False)
    body = "[\n  " + ",\n  ".join(lines) + "\n ]" if lines else "[]"
    return head.removesuffix("[]\n}") + body + "\n}\n"


def read_report(path: Path, source: FaceDataset) -> list[WrongLabel]:
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
    decisions = content.get("decisions") if isinstance(content, dict) else None
    if not isinstance(decisions, list) or content.get("format") != FORMAT:
        raise DataError(f"{path}: not a report of `facetrain data clean --report FILE`")
    if content.get("fingerprint") != fingerprint(source):
        raise DataError(
            f"{path}: was made of another dataset (its images or labels differ); give the dataset that "
            "`facetrain data clean` read"
        )
    parsed = [
        _parse(one, f"{path}: decision {number} in the list", source)
        for number, one in enumerate(decisions, 1)
    ]
    return [one for one in parsed if one is not None]


def _parse(one: Any, where: str, source: FaceDataset) -> WrongLabel | None:
    """Return a decision; None if it is not to be applied."""
    if not isinstance(one, dict) or not isinstance(one.get("apply"), bool):
        raise DataError(f"{where}: `apply` must be true or false")
    if not one["apply"]:
        return None
    image = _number(one, "image", where, 0, source.num_images - 1)
    target = _number(one, "target", where, -1, source.num_classes - 1)
    return WrongLabel(image, int(source.labels[image]), target, float("nan"))


def _number(one: dict[str, Any], key: str, where: str, least: int, most: int) -> int:
    value = one.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise DataError(f"{where}: `{key}` must be a number from {least} to {most:,}")
    return value
