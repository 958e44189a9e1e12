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


def require_accepted(url: str, license: str) -> None:
    """Check that the Hub would take a model into the repository of an address, with a license for its card.

    Raises:
        UsageError: the address is not a repository of a model, there is no token, or the Hub does not know the license.
        RunError: the Hub does not answer.
    """
    hub, _ = _repository(url)
    try:
        with_retries(url, hub.ModelCard(_front_matter(license)).validate, RunError)
    except ValueError as error:
        raise UsageError(
            f"--license {license}: the Hugging Face Hub does not know it; give other, or one of its identifiers, see "
            "https://huggingface.co/docs/hub/repositories-licenses"
        ) from error


def push(url: str, files: Sequence[Path], card: str, *, license: str, private: bool) -> str:
    """Upload files and a model card in one commit; return the address of the commit.

    Call `require_accepted` before: a card that the Hub refuses would leave an empty repository.

    Args:
        url: `hf://ORG/NAME`; the repository is created if there is none.
        files: the files, which keep their names.
        card: text of the card, Markdown.
        license: license for the Hub, which the card states too.
        private: whether a new repository is private.

    Raises:
        UsageError: the address is not a repository of a model, or there is no token.
        RunError: the upload failed; the repository then has none of the files, or all of an earlier upload.
    """
    hub, name = _repository(url)
    api = hub.HfApi()
    add = hub.CommitOperationAdd
    readme = _front_matter(license) + card
    changes = [add(path.name, str(path)) for path in files] + [add("README.md", readme.encode())]
    with_retries(url, partial(api.create_repo, name, private=private, exist_ok=True), RunError)
    upload = partial(api.create_commit, name, changes, commit_message="Upload a model of facetrain")
    commit: Any = with_retries(url, upload, RunError)
    return f"hf://{name}@{commit.oid}"


def _repository(url: str) -> tuple[Any, str]:
    """Return huggingface_hub, and ORG/NAME of an address."""
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


def _front_matter(license: str) -> str:
    """Return the properties of a model for the Hub, which begin its card."""
    properties = {"license": license, "library_name": "facetrain", "tags": ["face-recognition"]}
    return f"---\n{yaml.safe_dump(properties, allow_unicode=True)}---\n\n"
