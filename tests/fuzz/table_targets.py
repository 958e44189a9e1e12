"""Fuzz targets of tables and archives beside the datasets: scores, embeddings, names, subjects, landmarks, weights."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from facetrain.backbone.base import Backbone
from facetrain.checkpoint.identity import read_run_id
from facetrain.checkpoint.manifest import FORMAT, MANIFEST, checksum, read_manifest
from facetrain.data.column_cache import Columns, load_columns, save_columns
from facetrain.data.formats.bin_tables import read_subjects
from facetrain.data.formats.record_names import IDENTITIES_FILE, NAMES_FILE, RecordNames
from facetrain.data.formats.webdataset import open_tar
from facetrain.data.tools.landmarks import read_landmarks
from facetrain.data.tools.pair_lists import read_pairs
from facetrain.embeddings.embedding_files import Embeddings, load_embeddings, open_embeddings, save_embeddings
from facetrain.errors import CheckpointError, DataError, ModelError, PairsError, RunError, UsageError
from facetrain.models import model_file
from facetrain.models.published_weights import convert_published
from facetrain.models.weight_files import read_weights
from facetrain.run.folder.lock import LOCK_FILE, RunLock
from facetrain.run.folder.run_state import read_state
from facetrain.telemetry.jsonl import read_jsonl
from facetrain.verify.calibration import stored_thresholds
from facetrain.verify.score_files import read_scores, score_pair_list
from facetrain.verify.sets.ijb import open_ijb
from facetrain.verify.sets.search_sets import read_noise_list
from facetrain.verify.sets.slice_table import read_slice_table
from tests.fuzz.framing import SEPARATOR, catalog_of, members_of, tar_with_checksums, zip_of
from tests.fuzz.outcome import describe, outcome
from tests.support.datasets import encoded_image

_EMBEDDINGS = Embeddings(np.eye(3, 4, dtype=np.float32), ["a", "b", "c"], np.array([0, 1, -1]))
_SAME = np.array([True, False])
_SCORES = b"pair,score,genuine,subject_1,subject_2,quality,age\na,0.5,1,x,x,0.1,3\nb,-1e-3,false,x,y,2,14\n"
_SUBJECTS = b"subject\nann\nann\nbob\ncarl\n"
_NAMES = b'key,name\n1,ann/a.jpg\n2,"b,""c"".jpg"\n3,d.jpg\n\n\nidentity,name\n0,ann\n1,"bob\njr"\n'
_LANDMARKS = b"a.jpg,1,2,3,4,5,6,7,8,9,10\nb.jpg,1.5,2e1,3,4,5,6,7,8,9,10\n"
_THRESHOLD = {
    "fmr": 1e-3, "cosine": 0.3, "fmr_interval": [0.0, 0.1], "fnmr": 0.1, "fnmr_interval": [0.0, 0.2], "data": "x",
    "impostors": 1000, "subjects": 50,
}  # fmt: skip
_HOLDER = {
    "token": "a" * 16, "host": "other", "machine": "other 1", "pid": 1, "pid_start": "5", "since": "now",
    "launchers": ["x"], "beat": "000000000003",
}  # fmt: skip
_MANIFEST = {
    "step": 3, "world_size": 1, "num_classes": 10,
    "files": [{"name": "rows_00000_of_00001.safetensors", "size": 3, "sha256": "0" * 64, "start": 0, "stop": 10}],
    "meta": {"run_id": "0" * 16}, "metrics": {"loss": 1.0},
}  # fmt: skip
_STATE = {"state": "running", "starts": [{"step": 0, "ranks": 1}], "host": "x", "pid": 4, "total_steps": 3}
_SETTINGS = {"pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}, "conf": {"color_space": "BGR"}}
_IJB_LISTS = (
    "face_tid_mid.txt",
    "name_5pts_score.txt",
    "template_pair_label.txt",
    "1N_gallery_G1.csv",
    "1N_probe_mixed.csv",
)
_IJB = (
    b"1.jpg 1 1\n2.jpg 2 2\n\n\n1.jpg 1 2 3 4 5 6 7 8 9 10 0.9\n2.jpg 1 2 3 4 5 6 7 8 9 10 0.8\n\n\n"
    b"1 2 0\n1 1 1\n\n\nTEMPLATE_ID,SUBJECT_ID\n1,7\n\n\nTEMPLATE_ID,SUBJECT_ID\n2,7\n"
)


def table_targets(folder: Path) -> dict[str, Callable[[bytes], str]]:
    """Return the targets, which write their files to a folder."""
    readers: dict[str, tuple[type[Exception] | tuple[type[Exception], ...], str, Callable[[Path], object]]] = {
        "scores": (DataError, "a.csv", read_scores),
        "slices": (DataError, "b.csv", lambda path: read_slice_table(path, _SAME[1:])),
        "embeddings_npz": (DataError, "a.npz", load_embeddings),
        "embeddings_parquet": (DataError, "b.parquet", load_embeddings),
        "stored_npz": (DataError, "s.npz", _read_blocks),
        "stored_parquet": (DataError, "s.parquet", _read_blocks),
        "model_settings": (ModelError, "settings/config.json", _read_settings),
        "pair_list": (DataError, "list.csv", lambda path: score_pair_list(_EMBEDDINGS, path, path)),
        "bin_subjects": (PairsError, "a.subjects.csv", lambda path: read_subjects(path.with_name("a.bin"), _SAME)),
        "landmarks_csv": (DataError, "landmarks.csv", read_landmarks),
        "landmarks_json": (DataError, "landmarks.json", read_landmarks),
        "listed_pairs": (PairsError, "pairs.txt", lambda path: read_pairs(path, folder)),
        "noise_list": (PairsError, "noise.txt", read_noise_list),
        "tar_shard": (DataError, "tar/a.tar", _read_tar),
        "run_id": (CheckpointError, "run_id.txt", lambda path: read_run_id(path.parent)),
        "run_state": ((), "state/state.json", lambda path: read_state(path.parent)),
        "metrics": ((), "metrics.jsonl", read_jsonl),
        "manifest": (CheckpointError, f"step_00000003/{MANIFEST}", lambda path: read_manifest(path.parent)),
        "thresholds": (ModelError, "thresholds.json", _read_thresholds),
        "weights_safetensors": (ModelError, "a.safetensors", read_weights),
        "weights_pt": (ModelError, "a.pt", read_weights),
        "model_description": (ModelError, "b.safetensors", _open_model),
    }  # fmt: skip
    targets: dict[str, Callable[[bytes], str]] = {}
    for name, (documented, file, read) in readers.items():
        path = folder / file
        path.parent.mkdir(exist_ok=True)
        targets[name] = partial(_read, path, str(path), documented, read)
    _safetensors_seed(folder)
    weights = read_weights(folder / "seed.safetensors")[0]
    builders = {name: _build_once(getattr(model_file, name)) for name in ("build_on_meta", "build_backbone")}
    targets["model_description"] = partial(
        _described, targets["model_description"], folder / "b.safetensors", weights, builders
    )
    (folder / "lock").mkdir()
    (folder / "cache").mkdir()
    targets["cached_columns"] = partial(_cached_columns, folder / "cache" / "a.catalog")
    (folder / "ijb" / "meta").mkdir(parents=True)
    lists = [str(folder / "ijb" / "meta" / f"ijbc_{name}") for name in _IJB_LISTS]
    # These have checksums or lengths around what is mutated.
    framed = {
        "manifest": _signed,
        "tar_shard": _tar,
        "embeddings_npz": _npz,
        "stored_npz": _npz,
        "weights_pt": partial(_torch_archive, members_of(_torch_seed(folder))),
        "cached_columns": _catalog,
    }
    for name, frame in framed.items():
        targets[name] = partial(_read_framed, frame, targets[name])
    return targets | {
        "run_lock": partial(_try_lock, folder / "lock"),
        "record_names": partial(_record_names, folder),
        "ijb": partial(_ijb, folder / "ijb", lists),
    }


def write_input(path: str, data: bytes) -> None:
    """Write a file; without pathlib and buffers, which take longer than many readers."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(file, data)
    os.close(file)


def _read(
    path: Path,
    name: str,
    documented: type[Exception] | tuple[type[Exception], ...],
    read: Callable[[Path], object],
    data: bytes,
) -> str:
    """Write the bytes to a file and read it; `name` is the path as text."""
    write_input(name, data)
    return outcome(documented, partial(read, path))


def _read_framed(frame: Callable[[bytes], bytes], target: Callable[[bytes], str], data: bytes) -> str:
    return target(frame(data))


def _signed(data: bytes) -> bytes:
    """Give a manifest its right checksum."""
    try:
        body = json.loads(data)
        body.pop("sha256"), body.pop("format")
        return json.dumps({"format": FORMAT, "sha256": checksum(body)} | body).encode()
    except (ValueError, AttributeError, KeyError, RecursionError):
        return data


def _tar(data: bytes) -> bytes:
    """Correct the checksums of an archive; after the letter f, take any bytes."""
    return data[1:] if data[:1] == b"f" else tar_with_checksums(data[1:])


def _npz(data: bytes) -> bytes:
    """Pack arrays of numpy, which are separated by a line; or take an archive as it is."""
    if data[:2] == b"PK":
        return data
    return zip_of(dict(zip(("embedding.npy", "name.npy", "label.npy"), data.split(SEPARATOR), strict=False)))


def _torch_archive(members: dict[str, bytes], data: bytes) -> bytes:
    """Pack a pickle with the other members of an archive of torch.save; or take an archive as it is."""
    if data[:2] == b"PK":
        return data
    return zip_of({name: data if name.endswith("data.pkl") else old for name, old in members.items()})


def _read_blocks(path: Path) -> None:
    stored = open_embeddings(path)
    assert sum(len(rows) for _, rows in stored.blocks()) == stored.count
    list(stored.name), list(stored.label)


def _read_settings(path: Path) -> None:
    """Read the settings beside the weights of timm, and beside those of CVLface."""
    for name in ("cls_token", "input_layer.0.weight"):
        convert_published({name: torch.zeros(1, 3, 1, 1)}, path.with_name("a.pt"))


def _open_model(path: Path) -> None:
    model_file.open_model(path, torch.device("cpu"))


def _described(
    raw: Callable[[bytes], str],
    path: Path,
    weights: dict[str, Tensor],
    builders: dict[str, Callable[..., Backbone]],
    data: bytes,
) -> str:
    """Open a model with these weights and a description; after the letter f, a file of any bytes."""
    if data[:1] == b"f":
        return raw(data[1:])
    metadata = {"facetrain": data.decode(errors="replace")}
    with patch.multiple(model_file, read_weights=lambda path: (weights, metadata), **builders):
        return outcome(ModelError, partial(_open_model, path))


def _build_once(build: Callable[..., Backbone]) -> Callable[..., Backbone]:
    """Keep the last networks: most descriptions have one of a few, and to build it takes most of an execution."""

    @lru_cache(256)
    def cached(arguments: str) -> Backbone:
        name, options = json.loads(arguments)
        return build(name, **options)

    return lambda name, **options: cached(json.dumps([name, options]))


def _catalog(data: bytes) -> bytes:
    """Join a header and arrays, which are separated by a line; or take any bytes."""
    header, separator, arrays = data.partition(SEPARATOR)
    return catalog_of(header, arrays) if separator else data


def _read_tar(path: Path) -> None:
    remove_catalogs(str(path.parent))
    dataset = open_tar(path.parent)
    for index in range(min(dataset.num_images, 3)):
        dataset.read(index)


def remove_catalogs(folder: str) -> None:
    """Remove the catalogs of a dataset: two inputs of one size can have one modification time."""
    for name in os.listdir(folder):
        if name.endswith(".catalog"):
            os.unlink(f"{folder}/{name}")


def _cached_columns(path: Path, data: bytes) -> str:
    """Load cached columns; a damaged file is ignored, so the outcome is what was found."""
    write_input(str(path), data)
    columns = load_columns(path, [])
    if columns is None:
        return ""
    for array in columns.arrays.values():
        assert array.dtype.kind in "iufb"
        # Read it: a page after the end of the file would end the process.
        assert len(array.tobytes()) == array.nbytes
    return " ".join(sorted({array.dtype.str for array in columns.arrays.values()}))


def _try_lock(folder: Path, data: bytes) -> str:
    """Try to lock a folder that has a lock file of these bytes; return why the lock waits, or its error."""
    write_input(f"{folder}/{LOCK_FILE}", data)
    lock = RunLock(folder, ["x"])
    try:
        waits = lock.try_acquire() or ""
        # Not the message: it has the name of the host, and each mutated name would be kept as new.
        return "unreadable" if "cannot be read" in waits else "watching" if waits else ""
    except (UsageError, RunError) as error:
        return describe(error)
    finally:
        lock.release()


def _read_thresholds(path: Path) -> None:
    try:
        metadata = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return
    stored_thresholds({model_file.THRESHOLDS_KEY: metadata}, path)


def _record_names(folder: Path, data: bytes) -> str:
    """Read both tables of names; they are separated by two empty lines."""
    images, _, identities = data.partition(b"\n\n\n")
    write_input(f"{folder}/{NAMES_FILE}", images)
    write_input(f"{folder}/{IDENTITIES_FILE}", identities)
    names = RecordNames(folder)
    reads: list[Callable[[], object]] = [partial(names.image, key) for key in (1, 2, 3)]
    return " ".join(outcome(DataError, read) for read in [*reads, lambda: names.identities])


def _ijb(folder: Path, lists: list[str], data: bytes) -> str:
    """Read the lists of IJB; they are separated by two empty lines."""
    parts = data.split(b"\n\n\n") + [b""] * len(lists)
    for path, part in zip(lists, parts, strict=False):
        write_input(path, part)
    return outcome(PairsError, lambda: open_ijb(folder, "ijbc"))


def table_seeds(folder: Path) -> dict[str, list[bytes]]:
    """Return valid inputs of each target, to be mutated."""
    save_embeddings(folder / "known.npz", _EMBEDDINGS)
    known = (folder / "known.npz").read_bytes()
    unpacked = io.BytesIO()
    np.savez_compressed(
        unpacked, embedding=_EMBEDDINGS.embedding, name=np.array(["a", "b", "c"]), label=_EMBEDDINGS.label
    )
    (folder / "ann_bob").mkdir(exist_ok=True)
    arrays = members_of(known).values()
    weights = _torch_seed(folder)
    pickled = next(value for name, value in members_of(weights).items() if name.endswith("data.pkl"))
    save_columns(
        folder / "seed.catalog", [], Columns.of(label=np.arange(5), size=np.ones(5, np.float32), prefix=3)
    )
    catalog = (folder / "seed.catalog").read_bytes()
    described = _safetensors_seed(folder)
    metadata = json.loads(described[8 : 8 + int.from_bytes(described[:8], "little")])["__metadata__"]
    return {
        "scores": [_SCORES, _SCORES.replace(b"score", b"distance"), "\ufeffscore,genuine\n1,0\n".encode()],
        "slices": [b"age,subject,quality\n3,x,1\n4,y,2\n", b"age,pose\n3,left\n"],
        "embeddings_npz": [known, unpacked.getvalue(), SEPARATOR.join(arrays)],
        "embeddings_parquet": _parquet_seeds(folder),
        "stored_npz": [known, SEPARATOR.join(arrays)],
        "stored_parquet": _parquet_seeds(folder),
        "model_settings": [json.dumps(_SETTINGS).encode()],
        "pair_list": [b"first,second,genuine\na,b,0\nb,c,1\n"],
        "bin_subjects": [_SUBJECTS],
        "record_names": [_NAMES],
        "landmarks_csv": [_LANDMARKS],
        "landmarks_json": [b'{"a.jpg": [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]}'],
        "listed_pairs": [b"10 300\nann 1 2\nann 1 bob 3\n", b"ann/1.jpg ann/2.jpg 1\n", b"a.jpg 0\nb.jpg 0\n"],
        "noise_list": [b"# noise\na.jpg\n1\tb.jpg\n"],
        "tar_shard": [b"m" + _tar_seed(tarfile.GNU_FORMAT), b"f" + _tar_seed(tarfile.PAX_FORMAT)],
        "cached_columns": [catalog, catalog[:4096].strip() + SEPARATOR + catalog[4096:]],
        "run_id": [b"0123456789abcdef\n"],
        "run_lock": [json.dumps(_HOLDER).encode()],
        "run_state": [json.dumps(_STATE).encode()],
        "metrics": [b'{"step": 1, "loss": 2.5}\n{"step": 2, "loss": "nan"}\n'],
        "manifest": [json.dumps({"format": FORMAT, "sha256": ""} | _MANIFEST).encode()],
        "thresholds": [json.dumps([_THRESHOLD, _THRESHOLD | {"fnmr": None, "fnmr_interval": None}]).encode()],
        "weights_safetensors": [described],
        "weights_pt": [weights, pickled],
        "model_description": [metadata["facetrain"].encode(), b"f" + described],
        "ijb": [_IJB],
    }  # fmt: skip


def _parquet_seeds(folder: Path) -> list[bytes]:
    try:
        save_embeddings(folder / "known.parquet", _EMBEDDINGS)
    except DataError:  # pyarrow is not installed
        return [b"PAR1"]
    return [(folder / "known.parquet").read_bytes()]


def _torch_seed(folder: Path) -> bytes:
    torch.save({"w": torch.ones(2, 2), "b": torch.zeros(1)}, folder / "seed.pt")
    return (folder / "seed.pt").read_bytes()


def _tar_seed(form: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, content in (
            ("a/" + "x" * 120 + ".jpg", encoded_image(0, 4)),
            ("b.jpg", b"y"),
            ("b.cls", b"3"),
            ("c.png", b"z"),
            ("c.json", b'{"label": "k"}'),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()[: archive.offset]  # without the padding


def _safetensors_seed(folder: Path) -> bytes:
    from safetensors.torch import save_file

    from facetrain.backbone.zoo import build_backbone

    options = {"layers": [1, 1, 1, 1], "widths": [2, 2, 2, 2], "embedding_size": 4, "image_size": 32}
    network = build_backbone("iresnet", **options)
    described = {"backbone": {"name": "iresnet"} | options, model_file.THRESHOLDS_KEY: [_THRESHOLD]}
    save_file(
        network.state_dict(), folder / "seed.safetensors", metadata={"facetrain": json.dumps(described)}
    )
    return (folder / "seed.safetensors").read_bytes()
