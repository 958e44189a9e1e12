"""Local copies of remote files: a cache that many processes share.

    CACHE/downloads/KEY/             one address; KEY is a digest of it
      VERSION/NAME                   the file or folder as it was when it had this ETag, checksum or commit
      VERSION.partial/               what has arrived of a version
      VERSION.json, newest.json      `Copy` of a version, and of the version that was wanted last
      lock                           held by the process that downloads

A version never changes once it has its name, so that a run keeps its files while another process gets newer ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from facetrain.distributed.process_lifetime import is_own_rank
from facetrain.distributed.process_setup import is_offline, user_cache_folder
from facetrain.errors import DataError, FacetrainError, UsageError
from facetrain.files import listed, locked, make_folder, os_errors_as, parse_json, sync_file, write_atomically
from facetrain.progress import ProgressCallback, ignore_progress
from facetrain.remote.address import is_remote, scheme, without_secrets, without_version
from facetrain.remote.catalog import find_entry
from facetrain.remote.filesystem import open_filesystem, public, with_retries

_CHUNK = 16 << 20
_COMMIT = re.compile(r"@[0-9a-f]{40}$")
_CHECKSUM = re.compile(r"#sha256=([0-9a-f]{64})$")
_HUB_REPOSITORY = re.compile(r"((?:datasets/|spaces/)?[^/@]+/[^/@]+)(?:@([^/]+))?")
_VERSION_KEYS = ("ETag", "etag", "blob_id", "Last-Modified", "LastModified", "updated")
"""Properties that distinguish the versions of a file, in the words of the libraries."""
_MODEL_SUFFIXES = (".safetensors", ".onnx", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Copy:
    """Local copy of an address. Nothing in it is secret."""

    address: str
    """Address with what identifies this version: a commit of the Hub, or `#sha256=` for a single file."""
    place: str
    """Path of the file or folder in the folder of all downloads."""


@dataclass(frozen=True)
class _Request:
    """An address that is wanted, and what is known of it beforehand."""

    url: str
    sha256: str | None = None
    terms: str = ""
    file: str | None = None
    """Name for the local file; None: as in the address."""
    progress: ProgressCallback = ignore_progress
    say: Callable[[str], None] = lambda line: None


@dataclass(frozen=True)
class _File:
    path: str
    """Path in the file system."""
    name: str
    """Path below the address; empty for the address itself."""
    size: int
    token: str
    sha256: str | None
    git_blob: str | None
    file: str | None = None
    """Name for the local file, if the address does not end with it."""


def is_name(text: str) -> bool:
    """Return whether a text is an address, or the name of a file in the catalog and no existing path."""
    # Most texts are paths: the catalog is not read for them.
    return is_remote(text) or (
        text.isidentifier() and not Path(text).exists() and find_entry(text) is not None
    )


def local_path(name: str | os.PathLike[str]) -> Path:
    """Return the local path of a path, an address or a name of the catalog; download what is not in the cache.

    Raises:
        FacetrainError: as `fetch`.
    """
    return fetch(str(name))[0] if is_name(str(name)) else Path(name)


def pinned(name: str) -> str:
    """Return an address with its version, by which a later command gets the same file; download it to know it.

    Raises:
        FacetrainError: as `fetch`.
    """
    return name if _COMMIT.search(name) or _CHECKSUM.search(name) else fetch(name)[1]


def with_addresses(text: str) -> str:
    """Return a message in which the paths of downloads are their addresses, as a user gave them."""
    folder = user_cache_folder() / "downloads"
    place = re.escape(f"{folder}/") + "([0-9a-f]{16})/([0-9a-f]{16})/"
    for key, version in re.findall(place, text):
        if copy := _read_copy(folder / key, version):
            text = text.replace(str(folder / copy.place), without_version(copy.address))
    return text


def fetch(
    name: str,
    progress: ProgressCallback = ignore_progress,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Path, str]:
    """Download an address or a name of the catalog; return the local path, and the address with its version.

    Args:
        name: an address, or a name of the catalog.
        progress: called with the bytes that have arrived, and all bytes.
        say: called with a line for people: the terms of what is downloaded, and why the command waits.

    Raises:
        UsageError: the address cannot be used, or the catalog has no address for the name.
        DataError: the download failed, its checksum is wrong, or the disk is full.
    """
    entry = None if is_remote(name) else find_entry(name)
    address = entry.require_address() if entry else name
    found = _CHECKSUM.search(address)
    url, sha256 = _CHECKSUM.sub("", address), found[1] if found else None
    terms, file = (entry.terms, entry.file) if entry else ("", None)
    with os_errors_as(DataError, Path("the cache"), "set XDG_CACHE_HOME to another folder"):
        cache = user_cache_folder() / "downloads"
        copy = _cached(_Request(url, sha256, terms, file, progress, say), cache)
    return cache / copy.place, copy.address


def _cached(request: _Request, cache: Path) -> Copy:
    """Return the copy of an address in the cache, which is downloaded if need be."""
    url = request.url
    folder = cache / hashlib.sha256(url.encode()).hexdigest()[:16]
    make_folder(folder)
    waits = f"{public(url)}: another process downloads it; waiting"
    with locked(folder / "lock", before_wait=lambda: request.say(waits)):
        known = _known_copy(folder, request.sha256)
        is_fixed = request.sha256 or _COMMIT.search(url)
        if known and (is_fixed or is_offline() or is_own_rank()):
            return known
        if is_offline():
            raise DataError(
                f"{public(url)}: not in the cache, and downloads are switched off; unset FACETRAIN_OFFLINE and "
                "HF_HUB_OFFLINE, or give a local path"
            )
        if scheme(url) == "hf" and not is_fixed:
            exact, terms = _with_commit(url)
            copy = _cached(replace(request, url=exact, terms=request.terms or terms), cache)
        else:
            copy = _download(request, folder)
        return _write_copy(folder, "newest", copy)


def _download(request: _Request, folder: Path) -> Copy:
    """Bring the present version of an address into its folder, if it is not there yet."""
    url = request.url
    files = _list_files(url)
    tokens = json.dumps([[file.name, file.size, file.token] for file in files])
    version = hashlib.sha256(tokens.encode()).hexdigest()[:16]
    copy = _read_copy(folder, version)
    if copy and request.sha256 is None:
        return copy
    size = sum(file.size for file in files)
    terms = request.terms or "unknown, see its publisher"
    request.say(f"{public(url)}: {size / 1e6:,.2f} MB; terms: {terms}")
    scratch = folder / f"{version}.partial"
    for rest in folder.glob("*.partial"):
        # Without tokens, nothing says that the rest would be of the same version.
        if rest != scratch or not all(file.token for file in files):
            shutil.rmtree(rest, ignore_errors=True)
    _require_space(folder, size, url)
    root = request.file or files[0].file or PurePosixPath(urlsplit(without_version(url)).path).name or "files"
    arrived, sha256 = 0, ""

    def report(count: int) -> None:
        nonlocal arrived
        arrived += count
        request.progress(arrived, size)

    for file in files:
        target = scratch / root / file.name if file.name else scratch / root
        make_folder(target.parent)
        sha256 = download_ranges(url, file.path, file.size, target, report=report)
        _check(target, file, url, sha256, request.sha256)
    if scheme(url) != "hf" and _list_files(url) != files:  # a commit of the Hub never changes
        shutil.rmtree(scratch)
        raise DataError(f"{public(url)}: was changed during the download; try again")
    shutil.rmtree(folder / version, ignore_errors=True)  # without its record
    os.replace(scratch, folder / version)
    is_single = len(files) == 1 and not files[0].name and scheme(url) != "hf"
    pin = f"#sha256={sha256}" if is_single or request.sha256 else ""
    copy = Copy(without_secrets(url) + pin, f"{folder.name}/{version}/{root}")
    return _write_copy(folder, version, copy)


def download_ranges(
    url: str,
    path: str,
    size: int,
    target: Path,
    *,
    kind: type[FacetrainError] = DataError,
    report: Callable[[int], None] = lambda count: None,
) -> str:
    """Append to what a local file already has of a remote one, until it is complete; return its SHA-256.

    Args:
        url: address for messages, in whose file system the file is.
        path: path in the file system.
        size: bytes of the file.
        target: the local file.
        kind: type of the errors.
        report: called with the number of bytes that were there, and of each part that arrives.

    Raises:
        FacetrainError: of type `kind`; the local file then has what has arrived.
    """
    filesystem, _ = open_filesystem(url)
    options = {"cache_type": "none"} if scheme(url) == "hf" else {}
    with target.open("ab+") as output:
        output.seek(0)
        digest, done = hashlib.file_digest(output, "sha256"), output.tell()
        report(done)
        while done < size:
            end = min(done + _CHUNK, size)
            data = with_retries(url, partial(filesystem.cat_file, path, start=done, end=end, **options), kind)
            if len(data) == size:
                data = data[done:]  # the server ignores ranges
            if not data:
                raise kind(f"{public(url)}: has {done:,} bytes instead of {size:,}; try again")
            output.write(data)
            digest.update(data)
            done += len(data)
            report(len(data))
        output.flush()
        sync_file(output.fileno(), target)
    return digest.hexdigest()


def _check(target: Path, file: _File, url: str, sha256: str, wanted: str | None) -> None:
    """Compare a file with its checksums; remove it if it has others."""
    expected = wanted or file.sha256
    is_wrong = expected is not None and sha256 != expected
    if file.git_blob and not file.sha256 and not is_wrong:
        content = target.read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        is_wrong = blob != file.git_blob
    if is_wrong:
        target.unlink()
        raise DataError(
            f"{public(url)}: its checksum is not the expected one; the file was changed or damaged, and is not used"
        )


def _list_files(url: str) -> list[_File]:
    """Return the files of an address, those of a folder in the order of their names."""
    filesystem, path = open_filesystem(url)
    info = with_retries(url, lambda: filesystem.info(path))
    if info["type"] != "directory":
        return [_file(info, path, "")]
    # Web servers have no folders that could be listed.
    found = with_retries(url, lambda: filesystem.find(path, detail=True))
    files = [_file(found[each], each, _name_below(each, path, url)) for each in sorted(found)]
    if scheme(url) == "hf" and not _HUB_REPOSITORY.sub("", path, count=1):
        files = _model_of_repository(files, url)
    if {"config.yaml", "model.safetensors"} <= {file.name for file in files}:
        files = [file for file in files if "/" not in file.name]  # a run: its model, but not its checkpoints
    if not files:
        raise DataError(f"{public(url)}: has no files")
    return files


def _model_of_repository(files: list[_File], url: str) -> list[_File]:
    """Return the file of a model repository, with the description beside it; all files of other repositories."""
    if url.startswith("hf://datasets/"):
        return files
    models = [file for file in files if "/" not in file.name and file.name.endswith(_MODEL_SUFFIXES)]
    chosen = [file for file in models if file.name == "model.safetensors"] or models
    described = [file for file in files if file.name in ("model.safetensors", "config.json")]
    if len(described) == 2:  # of CVLface and timm
        return described
    if len(chosen) != 1:
        names = listed(file.name for file in files)
        raise UsageError(f"{public(url)}: which file is the model? Give {public(url)}/FILE, one of {names}")
    return [replace(chosen[0], name="", file=chosen[0].name)]


def _name_below(path: str, folder: str, url: str) -> str:
    """Return the path of a file below a folder.

    Raises:
        DataError: the name would lead out of the folder.
    """
    name = path.removeprefix(folder.rstrip("/") + "/")
    if ".." in PurePosixPath(name).parts or name.startswith("/"):
        raise DataError(
            f"{public(url)}: has a file with the name {listed([name])}, which leads out of the folder"
        )
    return name


def version_token(info: dict[str, Any]) -> str:
    """Return the property of fsspec that identifies this version of a file; empty if there is none."""
    return next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")


def _file(info: dict[str, Any], path: str, name: str) -> _File:
    if info.get("size") is None:
        raise DataError(
            f"{public(path)}: the server does not say how large the file is; download it by other means"
        )
    return _File(
        path=path,
        name=name,
        size=info["size"],
        token=version_token(info),
        sha256=(info.get("lfs") or {}).get("sha256"),
        git_blob=info.get("blob_id"),
    )


def _with_commit(url: str) -> tuple[str, str]:
    """Return an address of the Hub with the commit of its revision, and the license that the repository states."""
    from huggingface_hub import HfApi

    _, path = open_filesystem(url)
    found = _HUB_REPOSITORY.match(path)
    if found is None:
        raise UsageError(f"{public(url)}: use the form hf://org/repo[/file][@revision]")
    kind, _, name = found[1].rpartition("/")[0].rpartition("/")
    repository = f"{name}/{found[1].rpartition('/')[2]}"
    revision = found[2].replace("%2F", "/") if found[2] else None
    info = with_retries(
        url, lambda: HfApi().repo_info(repository, repo_type=kind.rstrip("s") or None, revision=revision)
    )
    license = getattr(info.card_data, "license", None)
    rest = path[found.end() :]
    return f"hf://{found[1]}{rest}@{info.sha}", f"{license}, see the page of {repository}" if license else ""


def _write_copy(folder: Path, name: str, copy: Copy) -> Copy:
    write_atomically(folder / f"{name}.json", json.dumps(asdict(copy)))
    return copy


def _known_copy(folder: Path, sha256: str | None) -> Copy | None:
    """Return the copy with a checksum; without one, the copy that was wanted last."""
    if sha256 is None:
        return _read_copy(folder, "newest")
    copies = (_read_copy(folder, path.stem) for path in folder.glob("*.json"))
    return next((copy for copy in copies if copy and copy.address.endswith(sha256)), None)


def _read_copy(folder: Path, name: str) -> Copy | None:
    try:
        copy = Copy(**parse_json((folder / f"{name}.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return copy if (folder.parent / copy.place).exists() else None


def _require_space(folder: Path, size: int, url: str) -> None:
    partial_size = sum(path.stat().st_size for path in folder.glob("*.partial/**/*") if path.is_file())
    free = shutil.disk_usage(folder).free
    if size - partial_size > free:
        raise DataError(
            f"{public(url)}: needs {size / 1e6:,.1f} MB, and {folder} has {free / 1e6:,.1f} MB left; free some, or "
            "set XDG_CACHE_HOME to another folder"
        )
