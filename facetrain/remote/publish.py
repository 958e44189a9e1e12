"""Upload of models to repositories of the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from facetrain.errors import RunError, UsageError, missing_package
from facetrain.remote.address import public
from facetrain.remote.filesystem import with_retries

_REPOSITORY = re.compile(r"hf://([^/@#?]+/[^/@#?]+)/?")


def require_repository(url: str) -> tuple[Any, str]:
    """Return huggingface_hub and ORG/NAME, after a check that it can write to the repository of an address.

    Raises:
        UsageError: the address is not a repository of a model, or there is no token.
    """
    repository = _REPOSITORY.fullmatch(url)
    if repository is None:
        raise UsageError(f"--push {public(url)}: give the repository of a model, hf://ORG/NAME")
    try:
        import huggingface_hub
    except ImportError as error:
        raise UsageError(f"--push {public(url)}: {missing_package(error, 'remote')}") from error
    if huggingface_hub.get_token() is None:
        raise UsageError(f"--push {public(url)}: has no token; set HF_TOKEN, or run `hf auth login`")
    return huggingface_hub, repository[1]


def push(url: str, files: Sequence[Path], card: str, *, license: str, private: bool) -> str:
    """Upload files and a model card in one commit; return the address of the commit.

    Args:
        url: `hf://ORG/NAME`; the repository is created if there is none.
        files: the files, which keep their names.
        card: text of the card, Markdown.
        license: license for the Hub, which the card states too.
        private: whether a new repository is private.

    Raises:
        UsageError: as `require_repository`.
        RunError: the upload failed; the repository then has none of the files, or all of an earlier upload.
    """
    hub, name = require_repository(url)
    properties = {"license": license, "library_name": "facetrain", "tags": ["face-recognition"]}
    readme = f"---\n{yaml.safe_dump(properties, allow_unicode=True)}---\n\n{card}"
    api = hub.HfApi()
    add = hub.CommitOperationAdd
    changes = [add(path.name, str(path)) for path in files] + [add("README.md", readme.encode())]
    with_retries(url, partial(api.create_repo, name, private=private, exist_ok=True), RunError)
    upload = partial(api.create_commit, name, changes, commit_message="Upload a model of facetrain")
    commit: Any = with_retries(url, upload, RunError)
    return f"hf://{name}@{commit.oid}"
