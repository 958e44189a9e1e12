"""Files whose checksums and lengths are right around a mutated content: wrong ones would hide all code behind them."""

from __future__ import annotations

import io
import json
import zipfile

from facetrain.checkpoint.manifest import FORMAT, checksum

SEPARATOR = b"\n--\n"
"""Line between the parts of an input that becomes several files."""
_BLOCK = 512
_CHECKSUM = slice(148, 156)


def tar_with_checksums(data: bytes) -> bytes:
    """Give each header of a tar archive its right checksum; after the letter f, take any bytes."""
    archive = bytearray(data[1:])
    for start in range(0, 0 if data[:1] == b"f" else len(archive) - _BLOCK + 1, _BLOCK):
        if archive[start + 257 : start + 262] == b"ustar":
            header = archive[start : start + _BLOCK]
            header[_CHECKSUM] = b" " * 8
            archive[start + 148 : start + 156] = b"%06o\0 " % sum(header)
    return bytes(archive)


def zip_of(members: dict[str, bytes]) -> bytes:
    """Return an archive of stored members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def members_of(archive: bytes) -> dict[str, bytes]:
    """Return the members of a zip archive by name."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def npz_of_arrays(data: bytes) -> bytes:
    """Pack arrays of NumPy, which are separated by a line; or take an archive as it is."""
    if data[:2] == b"PK":
        return data
    names = ("embedding.npy", "name.npy", "label.npy", "quality.npy")
    return zip_of(dict(zip(names, data.split(SEPARATOR), strict=False)))


def signed_manifest(data: bytes) -> bytes:
    """Give a manifest its right checksum."""
    try:
        body = json.loads(data)
        body.pop("sha256"), body.pop("format")
        return json.dumps({"format": FORMAT, "sha256": checksum(body)} | body).encode()
    except (ValueError, AttributeError, KeyError, RecursionError):
        return data
