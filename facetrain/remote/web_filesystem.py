"""Web servers as a file system of fsspec, whose answers have the bytes that were asked for, or are errors.

fsspec's own file system takes any body for the answer to a range, and follows a redirect to any address.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from urllib.parse import urljoin

from aiohttp import ClientResponse, ClientSession, TraceConfig, TraceRequestRedirectParams
from fsspec.implementations.http import HTTPFileSystem

from facetrain.errors import DataError
from facetrain.remote.address import public, require_supported, scheme

_MOST_WHOLE_BYTES = 1 << 30
"""Largest file of a server without ranges: its only answer is the whole file, which is in memory."""


class WebFileSystem(HTTPFileSystem):  # type: ignore[misc]
    """Files of web servers."""

    async def _cat_file(self, url: str, start: int = 0, end: int = 0, size: int = 0, **_: Any) -> bytes:
        """Return the bytes from `start` to `end` of a file of `size` bytes; all from `start` on without ranges.

        Raises:
            OSError: the answer is about other bytes, or has another length.
            DataError: a server without ranges has a file that is too large.
        """
        session = await self.set_session()
        # A compressed answer would have another length.
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        async with session.get(self.encode_url(url), headers=headers) as answer:
            answer.raise_for_status()
            if answer.status == 206:
                span = answer.headers.get("Content-Range", "")
                if not span.startswith(f"bytes {start}-{end - 1}/"):
                    raise OSError("the answer is about other bytes than those that were asked for")
                return await _body(answer, end - start)
            if size > _MOST_WHOLE_BYTES:
                raise DataError(
                    f"{public(url)}: the server sends no parts of a file, and this one has {size:,} bytes; "
                    "download it by other means"
                )
            return (await _body(answer, size))[start:]


async def _body(answer: ClientResponse, size: int) -> bytes:
    """Return the body of an answer.

    Raises:
        OSError: it has not exactly `size` bytes.
    """
    try:
        body = await answer.content.readexactly(size)
    except asyncio.IncompleteReadError as error:
        raise OSError("the answer is too short") from error
    if await answer.content.read(1):
        raise OSError("the answer is too long")
    return body


async def open_session(**options: Any) -> ClientSession:
    """Return a session that checks every redirect; the `get_client` of the file system."""
    trace = TraceConfig()
    trace.on_request_redirect.append(_check_redirect)
    options.pop("loop", None)
    return ClientSession(trace_configs=[trace], **options)


async def _check_redirect(_: ClientSession, __: SimpleNamespace, hop: TraceRequestRedirectParams) -> None:
    """Check the next address of a redirect, before it is asked.

    Raises:
        UsageError: it could not be given by a user either.
        DataError: it leaves an encrypted connection.
    """
    source = str(hop.url)
    target = urljoin(source, hop.response.headers.get("Location", ""))
    if scheme(source) == "https" != scheme(target):
        raise DataError(f"{public(source)}: leads to {public(target)}, which is not encrypted")
    require_supported(target)
