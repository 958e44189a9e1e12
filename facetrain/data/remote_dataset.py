"""Training data in an object store: folders on this machine that describe the objects of a dataset.

    CACHE/datasets/VERSION/s3/BUCKET/KEY/train.rec    address, version and size of an object that is read by ranges
    CACHE/datasets/VERSION/s3/BUCKET/KEY/train.idx    copy of a small object

VERSION is a digest of all objects, so that a folder never changes, and the catalogs in it are of this version.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facetrain.data.beside_dataset import DESCRIBING_FILES, DESCRIBING_SUFFIXES
from facetrain.data.dataset import FaceDataset
from facetrain.data.object_blocks import READ_BY_RANGES, ObjectPath, StoredObject, stored_object
from facetrain.data.settings import CACHE_BYTES
from facetrain.distributed.user_environment import user_cache_folder
from facetrain.errors import DataError
from facetrain.files import os_errors_as, private_folder, replacing
from facetrain.remote import download
from facetrain.remote.address import is_read_in_place, public, scheme
from facetrain.remote.download import local_path
from facetrain.remote.filesystem import open_filesystem, with_retries
from facetrain.remote.listing import version_token

_CHUNK_BYTES = 1 << 24
_IN_DESCRIPTION = r"/datasets/[0-9a-f]{16}(?=/(s3|gs)/)"
"""Part of a path in a folder that describes a dataset, between the cache folder and the scheme."""
_caches: set[Path] = set()
"""Cache folders that this process has used: messages have paths in them."""


@dataclass(frozen=True)
class ObjectCache:
    """Cache of the parts of remote datasets that were read last."""

    folder: Path | None = None
    """Folder; None: the user's cache folder."""
    bytes: int = CACHE_BYTES
    """Largest size."""


DEFAULT_CACHE = ObjectCache()


def dataset_path(address: str, cache: ObjectCache = DEFAULT_CACHE) -> Path:
    """Return the local path of a dataset, for `open_dataset`: of an object store, a folder that describes it.

    Args:
        address: a path, an address, or a name of the catalog.
        cache: for datasets in an object store.

    Raises:
        FacetrainError: there is no such dataset, the store does not answer, or the cache folder cannot be written.
    """
    if not is_read_in_place(address):
        return local_path(address)
    with os_errors_as(DataError, cache.folder or Path("cache"), "set data.cache to another folder"):
        folder = cache.folder.absolute() if cache.folder else user_cache_folder() / "objects"
        _caches.add(folder)
        for name in ("blocks", "locks", "datasets"):
            private_folder(folder / name)
        with replacing(folder / "limit") as scratch:  # the ranks of a machine write it at the same time
            scratch.write_text(str(cache.bytes))
        return _described(address.rstrip("/"), folder)


def with_addresses(text: str) -> str:
    """Return a message in which the paths of remote datasets are their addresses: of those below, and of downloads."""
    for folder in _caches:
        # The folder literally: where a path with spaces begins in a text cannot be seen.
        text = re.sub(re.escape(str(folder)) + _IN_DESCRIPTION + "/../", r"\1://", text)
    return download.with_addresses(text)


def fetched_again(path: Path) -> Path | None:
    """Forget what the cache has of a remote dataset; return the path of its present version, None if it is not remote.

    Raises:
        DataError: the dataset is not there any more, or the store does not answer.
    """
    found = re.fullmatch(f"(.*){_IN_DESCRIPTION}/../(.*)", str(path), re.DOTALL)
    if not isinstance(path, ObjectPath) or not found:
        return None
    for part in path.iterdir() if path.is_dir() else [path]:
        if stored := stored_object(part):
            stored.forget(0, stored.size)
    forget_description(path)
    return _described(f"{found[2]}://{found[3]}", Path(found[1]))


def forget_description(path: Path) -> None:
    """Remove the folder that describes a remote dataset: its copies of small objects, too, may have been damaged."""
    if isinstance(path, ObjectPath) and (found := re.match(".*" + _IN_DESCRIPTION, str(path), re.DOTALL)):
        shutil.rmtree(found[0], ignore_errors=True)


def object_versions(source: FaceDataset) -> list[list[str | int]]:
    """Return address, version and size of the objects of a dataset; empty if it is on a disk."""
    return [[each.url, each.version, each.size] for each in _objects(source)]


def remarks_on_reading(source: FaceDataset, *, cache_bytes: int, shuffle: str) -> Iterator[str]:
    """Yield what makes the reading of a remote dataset slow, with this cache and order of the images."""
    size = sum(each.size for each in _objects(source))
    if size > cache_bytes and shuffle == "full":
        yield (
            f"data.shuffle: full sends a request for almost every image, because the remote dataset has {size:,} bytes "
            f"and data.cache_bytes is {cache_bytes:,}; use data.shuffle: blocks"
        )


def _objects(source: FaceDataset) -> list[StoredObject]:
    found = (stored_object(path) for path in source.files)
    return [each for each in found if each is not None]


def _described(url: str, cache: Path) -> Path:
    """Return the folder, or the file in it, that describes the present version of a dataset."""
    filesystem, path = open_filesystem(url)
    is_folder = with_retries(url, lambda: filesystem.info(path), most_bytes=0)["type"] == "directory"
    root, name = (path, "") if is_folder else path.rpartition("/")[::2]
    found: list[dict[str, Any]] = with_retries(url, lambda: filesystem.ls(root, detail=True))
    infos = {info["name"].rpartition("/")[2]: info for info in found if info["type"] != "directory"}
    chosen = _of_dataset(set(infos), name, url)
    objects = {
        each: {
            "url": f"{scheme(url)}://{infos[each]['name']}",
            "version": version_token(infos[each]),
            "size": infos[each]["size"],
            "cache": str(cache),
        }
        for each in sorted(chosen)
    }
    version = hashlib.sha256(json.dumps(objects).encode()).hexdigest()[:16]
    folder = cache / "datasets" / version
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as scratch:
            described = Path(scratch, version)
            _describe(objects, described / scheme(url) / root)
            try:
                os.rename(described, folder)
            except OSError:
                if not folder.exists():  # another process was faster
                    raise
    return ObjectPath(folder, scheme(url), root, name)


def _of_dataset(names: set[str], name: str, url: str) -> set[str]:
    """Return which objects of a folder belong to the dataset `name`, or to that of the whole folder."""
    images = {each for each in names if each.lower().endswith(READ_BY_RANGES) and name in ("", each)}
    if not images:
        raise DataError(
            f"{public(url)}: not a dataset that is read in place (train.rec, *.tar, *.parquet); download it, or "
            "write it in one of these formats by `facetrain data convert`"
        )
    indices = {each[: -len(".rec")] + ".idx" for each in images if each.endswith(".rec")}
    if missing := indices - names:
        raise DataError(f"{public(url)}: has no {min(missing)}; copy the index of the .rec there")
    copied = {each for each in names if each in DESCRIBING_FILES or each.endswith(DESCRIBING_SUFFIXES)}
    return images | indices | copied


def _describe(objects: dict[str, dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, values in objects.items():
        if name.lower().endswith(READ_BY_RANGES):
            (folder / name).write_text(json.dumps(values), encoding="utf-8")
            continue
        stored = StoredObject(**values)
        stored.forget(0, stored.size)  # an earlier folder was removed because of what it held
        with (folder / name).open("wb") as file:
            for start in range(0, stored.size, _CHUNK_BYTES):
                file.write(stored.bytes_at(start, _CHUNK_BYTES))
