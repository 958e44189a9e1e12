"""Fuzz targets: every reader of files from others. Each takes any bytes and returns the outcome of reading them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from facetrain.backbone.base import Backbone
from facetrain.backbone.zoo import build_backbone
from facetrain.checkpoint.manifest import MANIFEST, read_manifest
from facetrain.config.arcface_torch import convert
from facetrain.config.loading import load_config
from facetrain.data.beside_dataset import CARD_FILE, IDENTITIES_FILE, NAMES_FILE
from facetrain.data.dataset_card import read_cards
from facetrain.data.formats.bin import read_bin
from facetrain.data.formats.bin_tables import read_subjects
from facetrain.data.formats.landmark_file import landmarks_path, read_landmarks_beside
from facetrain.data.formats.msgpack_list import list_items
from facetrain.data.formats.record_index import build_catalog
from facetrain.data.formats.record_names import RecordNames
from facetrain.data.formats.recordio import RecordReader, decode_record
from facetrain.data.images.decode import decode_rgb
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.clean_report import read_report
from facetrain.data.tools.landmark_table import read_landmark_table
from facetrain.data.tools.pair_sources import read_pairs
from facetrain.embeddings.embedding_files import open_embeddings
from facetrain.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ImageError,
    ModelError,
    PairsError,
    RecordError,
)
from facetrain.models import embedding_model, read_model
from facetrain.models.initialize_from import initialize_backbone
from facetrain.models.model_file import THRESHOLDS_KEY
from facetrain.models.mxnet_network import open_mxnet
from facetrain.models.published_weights import convert_published, stated_statistics
from facetrain.models.weight_files import WeightFile, read_weights
from facetrain.verify.calibration import stored_thresholds
from facetrain.verify.score_files import read_scores
from facetrain.verify.sets.ijb import open_ijb
from facetrain.verify.sets.slice_table import read_slice_table
from tests.fuzz import framing, seeds
from tests.fuzz.outcome import outcome
from tests.fuzz.target import FOLDER, Target, remove_catalogs, write_input
from tests.support.datasets import write_records
from tests.support.embeddings import load_rows

_SAME = np.array([True, False])
_IJB_LISTS = (
    "face_tid_mid.txt", "name_5pts_score.txt", "template_pair_label.txt", "1N_gallery_G1.csv", "1N_probe_mixed.csv",
)  # fmt: skip


def _read_records(path: Path) -> None:
    """Read a record file sequentially."""
    reader = RecordReader(path)
    try:
        for offset in reader.scan_offsets():
            decode_record(reader.read_at(offset), "x")
    finally:
        reader.close()


def _read_dataset(path: Path) -> None:
    """Open a dataset, and read its first images with their names."""
    remove_catalogs(path if path.is_dir() else path.parent)
    dataset = open_dataset(path)
    for number in range(min(dataset.num_images, 4)):
        dataset.location(number), dataset.image_name(number)
        dataset.identity_name(int(dataset.labels[number]))
        dataset.read(number)


def _open_mixture(path: Path) -> str:
    """Open a mixture of datasets, whose list of identities is a list of images as well."""
    listed = path.with_name("list.lst")
    write_input(str(listed), path.with_name("keep.txt").read_bytes())
    if not (FOLDER / "one").exists():
        write_records(FOLDER / "one", [0, 0, 1], size=4)
    return " ".join(outcome(DataError, partial(open_dataset, each)) for each in (path, listed))


def _open_mxnet(graph: Path) -> str:
    """Open a network in MXNet's files, and start from it."""
    backbone = build_backbone("iresnet", **seeds.NARROW)
    opened = outcome(ModelError, lambda: open_mxnet(graph))
    return f"{opened} {outcome(ModelError, lambda: initialize_backbone(backbone, graph, _faces))}"


def _faces() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32)


def _read_blocks(path: Path) -> None:
    stored = open_embeddings(path)
    assert sum(len(rows) for _, rows in stored.blocks()) == stored.count
    list(stored.name), list(stored.label)


def _read_settings(path: Path) -> None:
    """Read the settings beside the weights of timm, and beside those of CVLface."""
    stated_statistics(path.with_name("a.pt"))
    convert_published({"input_layer.0.weight": torch.zeros(1, 3, 1, 1)}, path.with_name("a.pt"))


def _open_described(path: Path) -> None:
    """Open a model with a description and right weights; after the letter f, a file of any bytes."""
    data = path.read_bytes()
    if data[:1] == b"f":
        write_input(str(path), data[1:])
        embedding_model.open_model(path, torch.device("cpu"))
        return
    file = WeightFile(_seed_weights(), {"facetrain": data.decode(errors="replace")})
    files = patch.object(read_model, "read_weights", lambda path, own_names: file)
    with files, patch.multiple(embedding_model, **_builders()):
        embedding_model.open_model(path, torch.device("cpu"))


@lru_cache
def _seed_weights() -> dict[str, torch.Tensor]:
    path = FOLDER / "described.safetensors"
    path.write_bytes(seeds.described_model())
    return read_weights(path)[0]


@lru_cache
def _builders() -> dict[str, Callable[..., Backbone]]:
    return {name: _build_once(getattr(embedding_model, name)) for name in ("build_on_meta", "build_backbone")}


def _build_once(build: Callable[..., Backbone]) -> Callable[..., Backbone]:
    """Keep the last networks: most descriptions have one of a few, and to build it takes most of an execution."""

    @lru_cache(256)
    def cached(arguments: str) -> Backbone:
        name, options = json.loads(arguments)
        return build(name, **options)

    return lambda name, **options: cached(json.dumps([name, options]))


def _read_thresholds(path: Path) -> None:
    try:
        metadata = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return
    stored_thresholds({THRESHOLDS_KEY: metadata}, path)


def _read_names(path: Path) -> str:
    names = RecordNames(path.parent, 3, range(1, 2))
    reads: list[Callable[[], object]] = [partial(names.image, key) for key in (1, 2, 3)]
    return " ".join(outcome(DataError, read) for read in [*reads, lambda: [*names.identities()][:1]])


def _read_report(path: Path) -> None:
    read_report(path, seeds.cleaned_dataset())


TARGETS = {
    "recordio": Target(RecordError, ["a.rec"], _read_records, seeds.records),
    "catalog": Target(
        RecordError, ["c/train.idx", "c/train.rec"],
        lambda path: build_catalog(path.with_suffix(".rec"), path), seeds.indexed_records,
    ),
    "image": Target(ImageError, ["a.img"], lambda path: decode_rgb(path.read_bytes(), location="x"), seeds.images),
    "bin_set": Target(PairsError, ["a.bin"], read_bin, seeds.bin_sets),
    "config": Target(ConfigError, ["run.yaml"], load_config, seeds.configs),
    "peer_config": Target(ConfigError, ["peer.py"], convert, lambda: [seeds.PEER]),
    "mixture": Target(DataError, ["mix.yaml", "keep.txt"], _open_mixture, seeds.mixtures, separator=b"\n\n"),
    "mxnet_network": Target(ModelError, ["m-symbol.json", "m-0000.params"], _open_mxnet, seeds.mxnet),
    "msgpack_list": Target(
        ValueError, ["a.msgpack"], lambda path: list(list_items(memoryview(path.read_bytes()))), seeds.msgpack_lists
    ),
    "tar_shard": Target(
        DataError, ["tar/a.tar"], _read_dataset, seeds.tars, framing.tar_with_checksums, opened="tar"
    ),
    "scores": Target(DataError, ["a.csv"], read_scores, seeds.scores),
    "slices": Target(DataError, ["b.csv"], lambda path: read_slice_table(path, _SAME[1:]), seeds.slices),
    "embeddings_npz": Target(DataError, ["a.npz"], load_rows, seeds.npz, framing.npz_of_arrays),
    "embeddings_parquet": Target(DataError, ["b.parquet"], load_rows, seeds.parquet),
    "stored_npz": Target(DataError, ["s.npz"], _read_blocks, seeds.npz, framing.npz_of_arrays),
    "stored_parquet": Target(DataError, ["s.parquet"], _read_blocks, seeds.parquet),
    "bin_subjects": Target(
        PairsError, ["a.subjects.csv"], lambda path: read_subjects(path.with_name("a.bin"), _SAME),
        lambda: [b"subject\nann\nann\nbob\ncarl\n"],
    ),
    "record_names": Target(DataError, [NAMES_FILE, IDENTITIES_FILE], _read_names, seeds.names),
    "landmarks_csv": Target(DataError, ["landmarks.csv"], read_landmark_table, lambda: [seeds.LANDMARKS]),
    "landmark_file": Target(
        DataError, [landmarks_path(Path("x.bin")).name],
        lambda path: read_landmarks_beside(FOLDER / "x.bin", 2), seeds.landmark_files,
    ),
    "listed_pairs": Target(
        PairsError, ["ann_bob/pairs.txt"], lambda path: read_pairs(path, path.parent), seeds.pair_lists
    ),
    "ijb": Target(
        PairsError, [*(f"ijb/meta/ijbc_{name}" for name in _IJB_LISTS), "ijb/loose_crop/1.jpg", "ijb/loose_crop/2.jpg"],
        lambda path: open_ijb(path, "ijbc"), lambda: [seeds.IJB], opened="ijb",
    ),
    "dataset_card": Target(
        DataError, [f"carded/{CARD_FILE}"], lambda path: read_cards(path.parent), lambda: seeds.CARDS
    ),
    "clean_report": Target(DataError, ["report.json"], _read_report, seeds.clean_reports),
    "manifest": Target(
        CheckpointError, [f"step_00000003/{MANIFEST}"], lambda path: read_manifest(path.parent),
        lambda: [seeds.CHECKPOINT], framing.signed_manifest,
    ),
    "thresholds": Target(ModelError, ["thresholds.json"], _read_thresholds, lambda: [seeds.THRESHOLDS]),
    "model_settings": Target(ModelError, ["settings/config.json"], _read_settings, lambda: [seeds.SETTINGS]),
    "weights_safetensors": Target(ModelError, ["a.safetensors"], read_weights, lambda: [seeds.described_model()]),
    "weights_pt": Target(ModelError, ["a.pt"], read_weights, seeds.torch_files, seeds.torch_archive),
    "model_description": Target(ModelError, ["b.safetensors"], _open_described, seeds.descriptions),
}  # fmt: skip
for _target in TARGETS.values():
    for _file in _target.files:
        (FOLDER / _file).parent.mkdir(parents=True, exist_ok=True)
