"""Addresses of remote files, and their texts without secrets.

| address | place |
|---|---|
| `hf://org/repo[/file][@revision]`, `hf://datasets/org/repo…` | Hugging Face Hub |
| `https://host/path`; `http://` for hosts of this machine only | web server |
| `s3://bucket/key` | S3, or the store at AWS_ENDPOINT_URL |
| `gs://bucket/key` | Google Cloud Storage |

Every other text is a local path. A text with `://` must not become a `Path`, which drops one of the slashes.
"""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

from facetrain.errors import UsageError
from facetrain.text import printable

SCHEMES = ("hf", "https", "s3", "gs")
HUB_REPOSITORY = re.compile(r"((?:datasets/|spaces/)?[^/@]+/[^/@]+)(?:@([^/]+))?")
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_IN_TEXT = re.compile(rf"{_ADDRESS.pattern}(?:(?!'{_ADDRESS.pattern})[^\s\"<>])*(?<![,:;)'])")
"""Address in a text, without the punctuation after it. An apostrophe may be a part of it, or a quote around it or the
next one."""


def is_remote(text: str) -> bool:
    """Return whether a text is an address and not a local path; `require_supported` says whether it can be used."""
    return _ADDRESS.match(text) is not None


def without_secrets(text: str) -> str:
    """Return a text whose addresses have no user, password, query and fragment: for files, logs and messages."""
    return _IN_TEXT.sub(lambda found: _public_part(found[0]), text)


def public(text: str) -> str:
    """Return an address or a text with addresses for messages: without secrets and without control characters."""
    return printable(without_secrets(text))


def has_secrets(url: str) -> bool:
    """Return whether an address has a user, a password or a query, which may be the signature of a request."""
    return is_remote(url) and _public_part(url) != url.partition("#")[0]


def is_read_in_place(text: str) -> bool:
    """Return whether a training set at this address is read by ranges where it is, and not downloaded first."""
    return scheme(text) in ("s3", "gs")


def require_supported(url: str) -> None:
    """Check the scheme and the host of an address, and that one of the Hub has a repository.

    Raises:
        UsageError: the scheme is unknown, the host or the repository is missing, `http` is used for a host that is not
            this machine, or there are credentials for a store, which takes none from an address.
    """
    shown = public(url)
    parts = _split(url)
    if parts is None:
        hint = "; write / in a key as %2F, and @ in a path as %40" if "@" in url else ""
        raise UsageError(f"{shown}: not a valid address{hint}")
    if parts.scheme == "http":
        if parts.hostname not in _THIS_MACHINE:
            raise UsageError(f"{shown}: http is not encrypted; use https, or http to a host of this machine")
    elif parts.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise UsageError(f"{shown}: unknown kind of address; the known ones are {known}")
    elif parts.scheme != "https" and "@" in parts.netloc:
        raise UsageError(f"{shown}: has credentials; give them by the environment (docs/remote.md)")
    if not parts.hostname:
        raise UsageError(f"{shown}: names no host, bucket or repository")
    if parts.scheme == "hf" and not HUB_REPOSITORY.match(parts.netloc + parts.path):
        raise UsageError(f"{shown}: use the form hf://org/repo[/file][@revision]")


def without_version(text: str) -> str:
    """Return an address without the revision at its end and without a checksum; another text as it is."""
    if not is_remote(text):
        return text
    name = text.partition("#")[0]
    path, at, revision = name.rpartition("@")
    return path if at and scheme(text) == "hf" and "/" not in revision else name


def scheme(url: str) -> str:
    """Return the part of an address before `://`, in small letters."""
    return url.partition("://")[0].lower()


def _split(url: str) -> SplitResult | None:
    """Return the parts of an address; None if it is malformed, such as one with `/` in a password."""
    try:
        parts = urlsplit(url)
        # The port of `https://user:pass/word@host` would be `pass`, and that of `https://user:12/34@host` is 12.
        # Of `https://user:/word@host` there is none, and still its colon.
        has_port = parts.port is not None or parts.netloc.endswith(":")
        return None if has_port and "@" in parts.path else parts
    except ValueError:
        return None


def _public_part(url: str) -> str:
    parts = _split(url)
    if parts is None:
        return url.partition("://")[0] + "://..."
    return f"{url.partition('://')[0]}://{parts.netloc.rpartition('@')[2]}{parts.path}"
