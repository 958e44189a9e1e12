"""The commands of docs/own_photos.md, run in their order on synthetic faces in larger photos."""

import csv
import json
import re
import shlex

import cv2
import numpy as np
import pytest

from facetrain.cli.app import app
from facetrain.data.images.decode import decode_rgb
from facetrain.data.open_dataset import open_dataset
from facetrain.data.synthetic.dataset_writer import write_synthetic
from facetrain.data.synthetic.options import SyntheticFaces
from tests.support.command import ROOT
from tests.support.detector import write_detector
from tests.support.exif import turned_jpeg

PAGE = ROOT / "docs" / "own_photos.md"
PEOPLE, EACH = 50, 4
SMALLER = {
    "model: {backbone: mbf}": "model: {backbone: iresnet, layers: [1, 1, 1, 1], widths: [8, 8, 16, 16], "
    "embedding_size: 32}",
    "epochs: 20": "epochs: 1",
}
"""Replacements in the config of the page: a network and an epoch that take seconds."""


def commands():
    """Return the arguments of each command of the page's long way; `facetrain finetune` has its test."""
    lines = re.findall(r"^    facetrain (?!finetune)(.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [shlex.split(line) for line in lines]


def write_photos(folder, faces):
    """Write photos of 192 × 192 pixels with a face and the white block that the test detector finds."""
    source = open_dataset(faces)
    suffixes = (".jpg", ".webp", ".ppm", ".PNG")
    for number, label in enumerate(source.labels.tolist()):
        image = np.full((192, 192, 3), 60, np.uint8)
        # The block of 32 pixels is at (80, 64) to (112, 96); the detector centers a face of 112 pixels on it.
        image[24:136, 56:168] = decode_rgb(source.read(number), location="x")
        image[64:96, 96:128] = 255
        name = {0: "ann", 1: "bob", 2: "Zoë Smith"}.get(label, f"person {label}")
        (folder / name).mkdir(parents=True, exist_ok=True)
        suffix = suffixes[number % EACH % len(suffixes)]
        path = folder / name / f"{number % EACH + 1}{suffix}"
        if suffix == ".jpg":
            path.write_bytes(turned_jpeg(np.rot90(image).copy(), 6))
        else:
            path.write_bytes(cv2.imencode(suffix.lower(), image[..., ::-1])[1])


@pytest.mark.slow
def test_the_page_leads_from_photos_to_an_exported_model(tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnx")
    faces = SyntheticFaces(identities=PEOPLE, images_per_identity=EACH, eval_identities=20, eval_pairs=20)
    write_synthetic(tmp_path / "drawn", faces, workers=2)
    write_photos(tmp_path / "photos", tmp_path / "drawn")
    (tmp_path / "photos" / "ann" / "notes.txt").write_text("at the beach")
    (tmp_path / "photos" / "ann" / "empty.jpg").write_bytes(b"")
    (tmp_path / "photos" / "bob" / "wall.png").write_bytes(cv2.imencode(".png", np.zeros((90, 90, 3)))[1])
    write_detector(tmp_path / "yunet.onnx")
    config = re.search(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    for old, new in SMALLER.items():
        assert old in config
        config = config.replace(old, new)
    (tmp_path / "photos.yaml").write_text(config)
    output = {}
    monkeypatch.chdir(tmp_path)
    for arguments in commands():
        # 600 pairs and 20 % of the people are for real datasets; this one has 50 people.
        smaller = {"0.2": "0.5", "600": "40", "yunet": "yunet.onnx"}
        arguments = [smaller.get(one, one) for one in arguments]
        with pytest.raises(SystemExit) as ended:  # in this process: a new one takes seconds to import torch
            app(arguments)
        printed = capsys.readouterr()
        assert not ended.value.code, f"facetrain {shlex.join(arguments)}\n{printed.out}{printed.err}"
        output[" ".join(arguments[: 2 if arguments[0] == "data" else 1])] = printed.out
    assert {"train", "export", "compare", "search", "data pack", "data clean"} <= set(output)
    with (tmp_path / "data" / "photos" / "skipped.csv").open(encoding="utf-8") as file:
        kinds = {row["file"]: row["kind"] for row in csv.DictReader(file)}
    assert kinds == {"ann/notes.txt": "suffix", "ann/empty.jpg": "unreadable", "bob/wall.png": "no_face"}
    assert open_dataset(tmp_path / "data" / "photos").num_images == PEOPLE * EACH
    assert output["search"].splitlines()[1].split("  ")[-1] == "ann/1.jpg", output["search"]
    assert (tmp_path / "faces" / "Zoë Smith" / "1.jpg").exists()
    assert json.loads((tmp_path / "faults.json").read_text())["eer"] >= 0
