"""Fuzz targets of verification sets, their landmarks, and the cards and reports beside datasets."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from facetrain.data.dataset import FaceDataset
from facetrain.data.dataset_card import CARD_FILE, read_card
from facetrain.data.formats.landmark_file import landmarks_path, read_landmarks_beside
from facetrain.data.formats.pair_archives import read_pair_archive
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.clean_report import FORMAT, fingerprint, read_report
from facetrain.errors import DataError, PairsError
from tests.fuzz.framing import SEPARATOR
from tests.fuzz.outcome import outcome
from tests.fuzz.table_targets import write_input
from tests.support.datasets import encoded_image, write_records

_CARD = b"""name: faces
origin: https://example.org
license: CC BY-NC 4.0
consent: yes
people: 10
images: 100
kind: real
digest: sha256:00
"""


def verification_targets(folder: Path) -> dict[str, Callable[[bytes], str]]:
    """Return the targets, which write their files to a folder."""
    for name in ("pairs_arrow", "pairs_npy", "pairs_memory/memfile", "carded", "reported"):
        (folder / name).mkdir(parents=True)
    (folder / "pairs_arrow" / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    write_records(folder / "reported", [0, 0, 1], size=4)
    return {
        "arrow_pairs": partial(_pairs, folder / "pairs_arrow", ["a.arrow"]),
        "parquet_pairs": partial(_pairs, folder / "pairs.parquet", [""]),
        "npy_pairs": partial(_pairs, folder / "pairs_npy", ["issame.txt", "pairs_npy.npy"]),
        "memory_file_pairs": partial(
            _pairs,
            folder / "pairs_memory",
            ["memfile/mem_file.dat.conf", "../pairs_memory_list.npy", "memfile/mem_file.dat"],
        ),
        "landmark_file": partial(_landmarks, folder / "x.bin"),
        "dataset_card": partial(_card, folder / "carded"),
        "clean_report": partial(_report, folder / "reported", open_dataset(folder / "reported")),
    }


def _pairs(path: Path, files: list[str], data: bytes) -> str:
    """Read a set of files, whose contents are separated by a line."""
    for file, content in zip(files, data.split(SEPARATOR, len(files) - 1), strict=False):
        write_input(str(path / file) if file else str(path), content)
    return outcome(PairsError, lambda: read_pair_archive(path))


def _landmarks(path: Path, data: bytes) -> str:
    write_input(str(landmarks_path(path)), data)
    return outcome(DataError, lambda: read_landmarks_beside(path, 2))


def _card(folder: Path, data: bytes) -> str:
    write_input(f"{folder}/{CARD_FILE}", data)
    return outcome(DataError, lambda: read_card(folder))


def _report(folder: Path, source: FaceDataset, data: bytes) -> str:
    write_input(f"{folder}/report.json", data)
    return outcome(DataError, lambda: read_report(folder / "report.json", source))


def verification_seeds(folder: Path) -> dict[str, list[bytes]]:
    """Return valid inputs of each target, to be mutated."""
    import pyarrow as pa
    import pyarrow.parquet

    image = encoded_image(0, 4)
    tables = [
        pa.table({"image1": [image] * 2, "image2": [{"bytes": image, "path": "a"}] * 2, "target": [0, 1]}),
        pa.table({"image": [image] * 2, "is_same": [True, True], "index": [1, 0]}),
        pa.table(
            {"image": [image] * 2, "is_same": [True, True], "index": pa.array([1, 0], pa.timestamp("us"))}
        ),
    ]
    arrows, parquets = [], []
    for table in tables:
        arrow, parquet = io.BytesIO(), io.BytesIO()
        with pa.ipc.new_stream(arrow, table.schema) as stream:
            stream.write_table(table)
        pyarrow.parquet.write_table(table, parquet, compression=None)
        arrows.append(arrow.getvalue())
        parquets.append(parquet.getvalue())
    write_records(folder / "report", [0, 0, 1], size=4)
    decision = {
        "kind": "wrong_label",
        "identity": 0,
        "other": 1,
        "images": [0],
        "target": 1,
        "similarity": 0.5,
    }
    report = {
        "format": FORMAT, "images": 3, "fingerprint": fingerprint(open_dataset(folder / "report")),
        "decisions": [{"number": 1, "apply": True} | decision],
    }  # fmt: skip
    pixels = np.zeros((2, 3, 2, 2))
    return {
        "arrow_pairs": arrows,
        "parquet_pairs": parquets,
        "npy_pairs": [b"1.0e+00\n" + SEPARATOR + _npy(pixels.astype(np.uint8))],
        "memory_file_pairs": [
            SEPARATOR.join(
                [
                    b'{"shape": [2, 3, 2, 2], "dtype": "float32"}',
                    _npy(np.array([True])),
                    pixels.astype("<f4").tobytes(),
                ]
            )
        ],
        "landmark_file": [_npy(np.full((2, 5, 2), 0.5, np.float32))],
        "dataset_card": [_CARD, b"- name: a\n- name: b\n"],
        "clean_report": [json.dumps(report).encode()],
    }


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()
