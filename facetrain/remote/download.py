"""Local copies of remote files: a cache that many processes share.

    CACHE/downloads/KEY/             one address; KEY is a digest of it
      VERSION/NAME                   the file or folder as it was when it had this ETag, checksum or commit
      VERSION.partial/               what has arrived of a version
      VERSION.json, newest.json      `Copy` of a version, and of the version that was wanted last
      lock                           held by the process that downloads

A version never changes once it has its name, so that a run keeps its files while another process gets newer ones. A
copy has the checksums of its files: a file whose size, times or inode are others than at the download is read again,
and one that was changed or damaged is downloaded again.

huggingface_hub's own cache is not used, also for hf://: it takes a file that differs from the checksum and the size
that the repository states. fsspec's downloads compare neither, and do not continue.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from facetrain.distributed.user_environment import is_offline, user_cache_folder
from facetrain.errors import DataError, RunError, UsageError
from facetrain.files import (
    locked,
    os_errors_as,
    parse_json,
    private_folder,
    sha256_of,
    stamp_of,
    write_atomically,
)
from facetrain.progress import ProgressCallback, ignore_progress
from facetrain.remote.address import is_remote, public, scheme, without_secrets, without_version
from facetrain.remote.catalog import catalog
from facetrain.remote.listing import RemoteFile, list_files, with_commit
from facetrain.remote.ranges import download_ranges

_COMMIT = re.compile(r"@[0-9a-f]{40}$")
_CHECKSUM = re.compile(r"#sha256=([0-9a-f]{64})$")


@dataclass(frozen=True)
class Copy:
    """Local copy of an address. Nothing in it is secret."""

    address: str
    """Address with what identifies this version: a commit of the Hub, or `#sha256=` for a single file."""
    place: str
    """Path of the file or folder in the folder of all downloads."""
    files: dict[str, tuple[str, list[int]]]
    """SHA-256 and `stamp_of` of each file, by its path below `place`; the name of a single file is empty."""


@dataclass(frozen=True)
class _Request:
    """An address that is wanted, and what is known of it beforehand."""

    url: str
    sha256: str | None
    terms: str
    file: str | None
    """Name for the local file; None: as in the address."""
    progress: ProgressCallback
    say: Callable[[str], None]


def is_name(text: str) -> bool:
    """Return whether a text is an address, or the name of a file in the catalog and no existing path."""
    # Most texts are paths: the catalog is not read for them.
    return is_remote(text) or (text.isidentifier() and not Path(text).exists() and text in catalog())


def local_path(name: str | os.PathLike[str]) -> Path:
    """Return the local path of a path, an address or a name of the catalog; download what is not in the cache.

    Raises:
        FacetrainError: as `fetch`.
    """
    text = os.fspath(name)
    return fetch(text)[0] if is_name(text) else Path(text)


def pinned(name: str) -> str:
    """Return an address with its version, by which a later command gets the same file; download it to know it.

    Raises:
        FacetrainError: as `fetch`.
    """
    return name if _COMMIT.search(name) or _CHECKSUM.search(name) else fetch(name)[1]


def address_of(name: str) -> str:
    """Return the address of a name of the catalog, without its version; another text as it is."""
    entry = None if is_remote(name) else catalog().get(name)
    return (entry.address if entry else None) or name


def is_download(path: Path) -> bool:
    """Return whether a path is in the cache, where a changed file would count as damaged."""
    with suppress(OSError):  # a user without a home folder has no downloads
        return path.absolute().is_relative_to(user_cache_folder() / "downloads")
    return False


def with_addresses(text: str) -> str:
    """Return a message in which the paths of downloads are their addresses, as a user gave them."""
    try:
        folder = user_cache_folder() / "downloads"
    except OSError:  # a user without a home folder has no downloads
        return text
    place = re.escape(f"{folder}/") + "([0-9a-f]{16})/([0-9a-f]{16})/"
    for key, version in re.findall(place, text):
        if copy := _read_record(folder / key, version):
            text = text.replace(str(folder / copy.place), without_version(copy.address))
    return text


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def fetch(
    name: str,
    progress: ProgressCallback = ignore_progress,
    say: Callable[[str], None] = _print,
) -> tuple[Path, str]:
    """Download an address or a name of the catalog; return the local path, and the address with its version.

    Args:
        name: an address, or a name of the catalog.
        progress: called with the bytes that have arrived, and all bytes.
        say: called with a line for people: the terms of what is downloaded, and why the command waits.

    Raises:
        UsageError: the address cannot be used, or the catalog has no address for the name.
        DataError: the download failed, its checksum is wrong, or others can write to the cache.
        RunError: the disk is full.
    """
    entry = None if is_remote(name) else catalog().get(name)
    address = entry.require_address() if entry else name
    url, sha256 = _split_checksum(address)
    terms, file = (entry.terms, entry.file) if entry else ("", None)
    with os_errors_as(DataError, Path("the cache"), "set XDG_CACHE_HOME to another folder"):
        cache = private_folder(user_cache_folder() / "downloads")
        copy = _cached(_Request(url, sha256, terms, file, progress, say), cache)
    return cache / copy.place, copy.address


def _split_checksum(address: str) -> tuple[str, str | None]:
    """Return an address without its checksum, and the checksum in lowercase; None if it has none."""
    url, mark, checksum = address.partition("#sha256=")
    if mark and not re.fullmatch(r"[0-9a-fA-F]{64}", checksum):
        raise UsageError(f"{public(url)}: #sha256= needs the 64 hexadecimal digits of a SHA-256")
    return url, checksum.lower() if mark else None


def _cached(request: _Request, cache: Path) -> Copy:
    """Return the copy of an address in the cache, which is downloaded if need be."""
    url = request.url
    folder = private_folder(cache / hashlib.sha256(url.encode()).hexdigest()[:16])
    waits = f"{public(url)}: another process downloads it; waiting"
    is_fixed = request.sha256 or _COMMIT.search(url)
    # Before the lock, which a cache that may only be read does not take.
    if (is_fixed or is_offline()) and (known := _known_copy(folder, request.sha256)):
        return known
    with locked(folder / "lock", before_wait=lambda: request.say(waits)):
        if (is_fixed or is_offline()) and (known := _known_copy(folder, request.sha256)):
            return known
        if is_offline():
            raise DataError(
                f"{public(url)}: not in the cache, or damaged there, and downloads are switched off; unset "
                "FACETRAIN_OFFLINE and HF_HUB_OFFLINE, or give a local path"
            )
        if scheme(url) == "hf" and not is_fixed:
            exact, terms = with_commit(url)
            copy = _cached(replace(request, url=exact, terms=request.terms or terms), cache)
        else:
            copy = _download(request, folder)
        return _write_record(folder, "newest", copy)


def _download(request: _Request, folder: Path) -> Copy:
    """Bring the present version of an address into its folder, if it is not there yet."""
    url = request.url
    files = list_files(url)
    has_tokens = all(file.token for file in files)
    version = _digest([[file.name, file.size, file.token] for file in files])
    # Without tokens, only the size would say that nothing has changed.
    if has_tokens and request.sha256 is None and (copy := _sound_copy(folder, version)):
        return copy
    size = sum(file.size for file in files)
    terms = request.terms or "unknown, see its publisher"
    request.say(f"{public(url)}: {size / 1e6:,.2f} MB; terms: {terms}")
    scratch = folder / f"{version}.partial"
    for rest in folder.glob("*.partial"):
        # Without tokens, nothing says that the rest would be of the same version.
        if rest != scratch or not has_tokens:
            shutil.rmtree(rest, ignore_errors=True)
    _require_space(folder, size, url)
    root = request.file or files[0].file or PurePosixPath(urlsplit(without_version(url)).path).name or "files"
    checksums = _download_files(request, files, scratch / root, size)
    if scheme(url) != "hf" and list_files(url) != files:  # a commit of the Hub never changes
        shutil.rmtree(scratch)
        raise DataError(f"{public(url)}: was changed during the download; try again")
    if not has_tokens:  # the bytes alone say which version this is
        version = _digest(checksums)
        if copy := _sound_copy(folder, version):
            shutil.rmtree(scratch)
            return copy
    shutil.rmtree(folder / version, ignore_errors=True)  # without its record, or damaged
    os.replace(scratch, folder / version)
    is_single = len(files) == 1 and not files[0].name and scheme(url) != "hf"
    pin = f"#sha256={checksums['']}" if is_single else f"#sha256={request.sha256}" if request.sha256 else ""
    place = f"{folder.name}/{version}/{root}"
    stamps = {
        name: (sha256, stamp_of((folder.parent / place / name).stat())) for name, sha256 in checksums.items()
    }
    return _write_record(folder, version, Copy(without_secrets(url) + pin, place, stamps))


def _digest(parts: object) -> str:
    """Return the name of a version, from what distinguishes it."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _download_files(request: _Request, files: list[RemoteFile], root: Path, size: int) -> dict[str, str]:
    """Download files below a folder; return their SHA-256 by their names."""
    arrived = 0

    def report(count: int) -> None:
        nonlocal arrived
        arrived += count
        request.progress(arrived, size)

    checksums = {}
    for file in files:
        target = root / file.name if file.name else root
        target.parent.mkdir(parents=True, exist_ok=True)
        checksums[file.name] = download_ranges(request.url, file.path, file.size, target, report=report)
        _check(target, file, request.url, checksums[file.name], request.sha256)
    return checksums


def _check(target: Path, file: RemoteFile, url: str, sha256: str, wanted: str | None) -> None:
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


def _known_copy(folder: Path, sha256: str | None) -> Copy | None:
    """Return the copy with a checksum; without one, the copy that was wanted last."""
    if sha256 is None:
        return _sound_copy(folder, "newest")
    copies = (_sound_copy(folder, path.stem) for path in folder.glob("*.json"))
    return next((copy for copy in copies if copy and copy.address.endswith(f"#sha256={sha256}")), None)


def _sound_copy(folder: Path, name: str) -> Copy | None:
    """Return a copy whose files have the bytes that were downloaded; None if one is missing, changed or damaged."""
    copy = _read_record(folder, name)
    if copy is None:
        return None
    place, files = folder.parent / copy.place, dict(copy.files)
    try:
        for file, (sha256, stamp) in copy.files.items():
            now = stamp_of((place / file).stat())
            if now != stamp:
                if sha256_of(place / file) != sha256:
                    return None
                files[file] = sha256, now
    except OSError:
        return None
    if files != copy.files:
        with suppress(OSError):  # the files have been read once more, and will be again
            _write_record(folder, name, replace(copy, files=files))
    return replace(copy, files=files)


def _read_record(folder: Path, name: str) -> Copy | None:
    """Return the record of a copy; None if there is none, or it leads out of the cache."""
    try:
        record = parse_json((folder / f"{name}.json").read_text("utf-8"))
        files = {file: (str(sha256), list(stamp)) for file, (sha256, stamp) in record["files"].items()}
        copy = Copy(str(record["address"]), str(record["place"]), files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    # A damaged or foreign record must not name other files of this machine. The newest copy of an address of the Hub is
    # in the folder of its commit.
    paths = [PurePosixPath(copy.place, file) for file in copy.files]
    is_inside = not any(path.is_absolute() or ".." in path.parts for path in paths)
    return copy if paths and is_inside else None


def _write_record(folder: Path, name: str, copy: Copy) -> Copy:
    write_atomically(folder / f"{name}.json", json.dumps(asdict(copy)))
    return copy


def _require_space(folder: Path, size: int, url: str) -> None:
    partial_size = sum(path.stat().st_size for path in folder.glob("*.partial/**/*") if path.is_file())
    free = shutil.disk_usage(folder).free
    if size - partial_size > free:
        raise RunError(
            f"{public(url)}: needs {size / 1e6:,.1f} MB, and {folder} has {free / 1e6:,.1f} MB left; free some, or "
            "set XDG_CACHE_HOME to another folder"
        )
