"""Files of an address: of a single file, of a folder, or of the model in a repository of the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from facetrain.errors import DataError, UsageError
from facetrain.remote.address import HUB_REPOSITORY, public, scheme
from facetrain.remote.filesystem import open_filesystem, with_retries
from facetrain.text import listed

_VERSION_KEYS = ("ETag", "generation", "etag", "blob_id", "Last-Modified", "LastModified", "updated")
"""Properties that distinguish the versions of a file, in the words of the libraries. Google's etag changes with the
metadata of an object, such as a hold; its generation with the content."""
_MODEL_SUFFIXES = (".safetensors", ".onnx", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class RemoteFile:
    """File below an address, as its server announces it."""

    path: str
    """Path in the file system."""
    name: str
    """Path below the address; empty for the address itself."""
    size: int
    token: str
    """What identifies its version; empty if nothing does."""
    sha256: str | None
    git_blob: str | None
    file: str | None = None
    """Name for the local file, if the address does not end with it."""


def list_files(url: str) -> list[RemoteFile]:
    """Return the files of an address, those of a folder in the order of their names.

    Raises:
        FacetrainError: there are none, or the server does not answer.
    """
    filesystem, path = open_filesystem(url)
    info = with_retries(url, lambda: filesystem.info(path), most_bytes=0)
    if info["type"] != "directory":
        return [_file(info, path, "")]
    # Web servers have no folders that could be listed.
    found = with_retries(url, lambda: filesystem.find(path, detail=True))
    # A key with a slash at its end is a folder: the console of S3 makes one for every folder that it creates.
    paths = sorted(each for each in found if not each.endswith("/"))
    files = [_file(found[each], each, _name_below(each, path, url)) for each in paths]
    if scheme(url) == "hf" and not HUB_REPOSITORY.sub("", path, count=1):
        files = _model_of_repository(files, url)
    if {"config.yaml", "model.safetensors"} <= {file.name for file in files}:
        files = [file for file in files if "/" not in file.name]  # a run: its model, but not its checkpoints
    if not files:
        raise DataError(f"{public(url)}: has no files")
    return files


def list_names(url: str) -> set[str]:
    """Return the names of the files and folders in a folder of an object store.

    Raises:
        FacetrainError: there is no such folder, or the store does not answer.
    """
    filesystem, path = open_filesystem(url)
    found: list[str] = with_retries(url, lambda: filesystem.ls(path, detail=False))
    return {each.rstrip("/").rpartition("/")[2] for each in found}


def _model_of_repository(files: list[RemoteFile], url: str) -> list[RemoteFile]:
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


def _file(info: dict[str, Any], path: str, name: str) -> RemoteFile:
    if info.get("size") is None:
        raise DataError(
            f"{public(path)}: the server does not say how large the file is; download it by other means"
        )
    return RemoteFile(
        path=path,
        name=name,
        size=info["size"],
        token=version_token(info),
        sha256=(info.get("lfs") or {}).get("sha256"),
        git_blob=info.get("blob_id"),
    )


def with_commit(url: str) -> tuple[str, str]:
    """Return an address of the Hub with the commit of its revision, and the license that the repository states."""
    _, path = open_filesystem(url)  # also says if huggingface_hub is missing
    from huggingface_hub import HfApi

    found = HUB_REPOSITORY.match(path)
    assert found is not None, "checked by open_filesystem"
    kind, _, name = found[1].rpartition("/")[0].rpartition("/")
    repository = f"{name}/{found[1].rpartition('/')[2]}"
    revision = found[2].replace("%2F", "/") if found[2] else None
    info = with_retries(
        url, lambda: HfApi().repo_info(repository, repo_type=kind.rstrip("s") or None, revision=revision)
    )
    license = getattr(info.card_data, "license", None)
    rest = path[found.end() :]
    return f"hf://{found[1]}{rest}@{info.sha}", f"{license}, see the page of {repository}" if license else ""
