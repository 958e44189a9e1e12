"""Small evaluation sets in the layouts of IJB and TinyFace, with faces that differ in mean color."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np

from facetrain.embeddings.embedder import ImageEmbedder
from facetrain.face_landmarks import ARCFACE_TEMPLATE
from facetrain.verify.metrics.result import Result
from facetrain.verify.protocol_options import EvaluationOptions
from facetrain.verify.protocols import evaluate_set
from facetrain.verify.sets.open_sets import open_set
from tests.support.faces import embedder, face


def evaluated(
    name: str, folder: Path, *, gallery: ImageEmbedder | None = None, **options: Any
) -> dict[str, Result]:
    """Evaluate the mean colors of a set, by default with few draws; return its results by their names."""
    target = open_set(name, folder)
    return evaluate_set(target, embedder(), EvaluationOptions(bootstrap=60, **options), gallery=gallery)


def write_ijb(folder: Path, *, prefix: str = "ijbc", people: int = 8, seed: int = 0) -> Path:
    """Write an IJB set: two galleries of half of the people each, probes of all, and every pair of both."""
    random = np.random.default_rng(seed)
    meta, crops = folder / "meta", folder / "loose_crop"
    meta.mkdir(parents=True)
    crops.mkdir()
    template_of, faces, points = [], [], []
    for template in range(3 * people):
        template_of.append(template % people)
        for image_index in range(int(random.integers(1, 5))):
            name = f"{len(faces) + 1}.png"
            (crops / name).write_bytes(_loose_crop(template % people, len(faces), random, points))
            faces.append(f"{name} {100 + template} {image_index // 2}")
            points[-1] = f"{name} {points[-1]} {random.uniform(0.5, 1):.5f}"
    (meta / f"{prefix}_face_tid_mid.txt").write_text("\n".join(faces) + "\n")
    (meta / f"{prefix}_name_5pts_score.txt").write_text("\n".join(points) + "\n")
    enrolled, probes = range(people), range(people, 3 * people)
    pairs = [f"{100 + a} {100 + b} {int(template_of[a] == template_of[b])}" for a in enrolled for b in probes]
    (meta / f"{prefix}_template_pair_label.txt").write_text("\n".join(random.permutation(pairs)) + "\n")
    for gallery, name in enumerate(("G1", "G2")):
        _write_subjects(
            meta / f"{prefix}_1N_gallery_{name}.csv", [t for t in enrolled if t % 2 == gallery], template_of
        )
    _write_subjects(meta / f"{prefix}_1N_probe_mixed.csv", list(probes), template_of)
    return folder


def _write_subjects(path: Path, templates: list[int], template_of: list[int]) -> None:
    # Like the official lists: one line per image, and more columns.
    lines = [f"{100 + t},{7000 + template_of[t]},img/{n}.jpg,{n}" for t in templates for n in range(2)]
    path.write_text("\n".join(["TEMPLATE_ID,SUBJECT_ID,FILENAME,SIGHTING_ID", *lines]) + "\n")


def _loose_crop(person: int, variation: int, random: np.random.Generator, points: list[str]) -> bytes:
    """Return an image of noise with a face at a random place, and append its landmarks to `points`."""
    scale, shift = random.uniform(0.5, 0.8), random.uniform(5, 30, 2)
    image = random.integers(0, 256, (150, 140, 3), dtype=np.uint8)
    side = round(112 * scale)
    left, top = np.round(shift).astype(int)
    patch = cv2.imdecode(np.frombuffer(face(person, variation, side), np.uint8), cv2.IMREAD_COLOR)
    image[top : top + side, left : left + side] = patch
    seen = ARCFACE_TEMPLATE * (side / 112) + [left, top]
    points.append(" ".join(f"{value:.4f}" for value in seen.ravel()))
    return bytes(cv2.imencode(".png", image)[1])


def write_tinyface(folder: Path, *, people: int = 6, distractors: int = 30) -> Path:
    """Write TinyFace's folders; each file name begins with the subject number."""
    for person in range(people):
        for part, variation in (("Gallery_Match", 0), ("Gallery_Match", 1), ("Probe", 2), ("Probe", 3)):
            _write(folder / part / f"{person + 1}_{variation}.png", face(person, variation))
    for distractor in range(distractors):
        _write(folder / "Gallery_Distractor" / f"{distractor}.png", face(1000 + distractor))
    return folder


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
