"""File systems of addresses, by fsspec and its libraries, with retries and errors of facetrain.

Endpoints and credentials come from the environment and the files of the libraries only, such as AWS_ENDPOINT_URL,
AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS, HF_ENDPOINT and HF_TOKEN.
"""

from __future__ import annotations

import logging
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, as_completed
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from facetrain.errors import DataError, FacetrainError, UsageError, missing_package
from facetrain.remote.address import public, require_supported, scheme

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")

ATTEMPTS = 5
FIRST_WAIT_S = 0.5
"""Wait before the second attempt; every further wait is twice as long."""
_CONNECT_S, _READ_S = 10, 60
PATIENCE_S = 60.0
_LEAST_BYTES_PER_S = 50_000
"""An answer of N bytes has `PATIENCE_S` + N / `_LEAST_BYTES_PER_S` seconds: one byte per second is a failure."""
_TRANSIENT_STATUS = (408, 425, 429)
_GOOGLE_TEXT = re.compile("(?P<forbidden>Forbidden: )|Bad Request: |Bucket is requester pays")
"""Beginnings of gcsfs's errors of Python's own types for the statuses 403 and 400, which say the status by it alone."""
_NO_OUTPUT = logging.NullHandler()
_CREDENTIALS = "give credentials by the environment or by the files of the library (docs/remote.md)"


def open_filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of an address, and the path in it.

    Listings are not cached. Run every operation by `with_retries`. A file system must not be used after a fork:
    call this function in each process; it returns the same object for the same kind of address.

    Raises:
        UsageError: the address cannot be used, or a package is missing.
    """
    require_supported(url)
    kind, rest = scheme(url), url.partition("://")[2]
    try:
        filesystem = _FILESYSTEMS.get(kind, _plain_filesystem)(kind)
    except ImportError as error:
        # fsspec raises an error of its own for a library that is missing.
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        raise UsageError(f"{public(url)}: {missing_package(cause, 'remote')}") from error
    if kind in ("http", "https"):
        return filesystem, url
    if kind == "s3":
        filesystem.retries = 1  # botocore repeats a request, and `with_retries` the operation
    return filesystem, _hub_path(rest) if kind == "hf" else rest.rstrip("/")


def with_retries(
    url: str,
    operation: Callable[[], T],
    kind: type[FacetrainError] = DataError,
    *,
    most_bytes: int | None = None,
) -> T:
    """Return the result of an operation on the file system of `url`; repeat it after errors that may pass.

    If S3 refuses the keys, they are read again from the files of the library, and tried once more: they may have been
    replaced meanwhile.

    `most_bytes` of the answer bound the time of each attempt: the operation runs in a thread, which is left alone when
    the time is over. None: no bound, for uploads of any size.

    Run nothing else in the operation: an error of the local disk would be taken for one of the store. The text of the
    library's error is dropped, also from tracebacks, because it can have keys and signed addresses.

    Raises:
        FacetrainError: of type `kind`, with the address without secrets and the reason.
    """
    attempt, was_refused = 1, False
    while True:
        try:
            if was_refused:
                open_filesystem(url)[0].connect(refresh=True)
            if most_bytes is None:
                return operation()
            return in_background(operation).result(PATIENCE_S + most_bytes / _LEAST_BYTES_PER_S)
        except Exception as error:
            if isinstance(error.__cause__, FacetrainError):  # fsspec has turned it into "not found"
                raise error.__cause__ from None
            if not (isinstance(error, OSError) or _is_of_library(error) or _status(error)):
                raise
            cause = _cause(error)
            if _is_refusal(cause) and not was_refused and scheme(url) == "s3":
                was_refused = True
                continue
            if attempt == ATTEMPTS or not _may_pass(cause):
                raise kind(f"{public(url)}: {_reason(cause, attempt)}") from None
        # Half of the wait is random: many ranks would otherwise repeat their requests at the same moment.
        time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.5, 1))
        attempt += 1


def in_background(operation: Callable[[], T]) -> Future[T]:
    """Run an operation in a thread for which nothing waits: no caller that leaves it, and not the end of the process.

    So a store that hangs holds up neither an error nor Ctrl-C. A ThreadPoolExecutor would wait for its threads.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(operation())
        except BaseException as error:  # the waiting thread raises it
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def side_by_side(operation: Callable[[T], None], items: Iterable[T], threads: int) -> None:
    """Run an operation on each item, as many at a time as there are threads.

    The first error, or Ctrl-C, ends the function at once. What then runs is left alone, and no other item is begun.
    """
    is_ended = threading.Event()
    waiting: SimpleQueue[T] = SimpleQueue()
    for item in items:
        waiting.put(item)

    def run_waiting() -> None:
        with suppress(Empty):
            while not is_ended.is_set():
                operation(waiting.get_nowait())

    try:
        for done in as_completed([in_background(run_waiting) for _ in range(threads)]):
            done.result()
    finally:
        is_ended.set()


def _hub_path(rest: str) -> str:
    """Return `org/repo@revision/file`, as huggingface_hub has it, of `org/repo/file@revision`."""
    path, at, revision = rest.rstrip("/").rpartition("@")
    if not at:
        return rest.rstrip("/")
    parts = path.split("/")
    depth = 3 if parts[0] in ("datasets", "spaces") else 2
    if len(parts) < depth or ("/" in revision and len(parts) == depth):
        return rest.rstrip("/")  # the repository already includes the revision
    return "/".join(["/".join(parts[:depth]) + "@" + revision.replace("/", "%2F"), *parts[depth:]])


def _plain_filesystem(kind: str, **options: Any) -> AbstractFileSystem:
    import fsspec

    return fsspec.filesystem(kind, use_listings_cache=False, **options)


def _web_filesystem(_: str) -> AbstractFileSystem:
    from aiohttp import ClientTimeout

    from facetrain.remote.web_filesystem import WebFileSystem, open_session

    timeout = ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S)
    # Addresses are taken as they are: signatures of a query cover its spelling.
    options = {"encoded": True, "client_kwargs": {"timeout": timeout, "trust_env": True}}
    return WebFileSystem(use_listings_cache=False, get_client=open_session, **options)


def _store_filesystem(kind: str) -> AbstractFileSystem:
    retries = {"mode": "standard", "total_max_attempts": 3}
    config = {"connect_timeout": _CONNECT_S, "read_timeout": _READ_S, "retries": retries}
    return _plain_filesystem(kind, config_kwargs=config, default_cache_type="none")


def _google_filesystem(kind: str) -> AbstractFileSystem:
    # gcsfs logs each failed request with its traceback, and each operation in a bucket whose type it cannot find out.
    # Without a handler, Python would print that beside our line; those of a program, and GCSFS_DEBUG, still get it.
    logging.getLogger("gcsfs").addHandler(_NO_OUTPUT)
    return _plain_filesystem(kind, version_aware=True)


_FILESYSTEMS: dict[str, Callable[[str], AbstractFileSystem]] = {
    "s3": _store_filesystem,
    "gs": _google_filesystem,
    "http": _web_filesystem,
    "https": _web_filesystem,
}


def _cause(error: BaseException) -> BaseException:
    """Return the error of the connection or the server that fsspec or s3fs has turned into an OSError."""
    cause = error.__cause__
    if cause is None or _is_of_library(error) or not isinstance(error, OSError):
        return error
    return cause if _is_of_library(cause) else error


def _is_of_library(error: BaseException) -> bool:
    """Return whether an error is of a package: any may be one that fsspec and its libraries use for connections."""
    return type(error).__module__.split(".")[0] not in {"facetrain", *sys.stdlib_module_names}


def _status(error: BaseException) -> int | None:
    """Return the status of the HTTP answer that an error of a library is about; None if it is about none."""
    if type(error) in (OSError, ValueError):
        found = _GOOGLE_TEXT.match(str(error))
        return (403 if found["forbidden"] else 400) if found else None
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status: Any = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif type(error).__module__.startswith("gcsfs"):
        status = getattr(error, "code", None)
    else:  # aiohttp, httpx
        status = getattr(error, "status", None) or getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


def _is_refusal(error: BaseException) -> bool:
    """Return whether a store does not accept the credentials, or a library has found none."""
    response: Any = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None  # botocore
    # S3 answers to an expired token with status 400; to HEAD without a text, which botocore replaces by the number.
    is_refused = _status(error) in (401, 403) or code in ("ExpiredToken", "400")
    return is_refused or isinstance(error, PermissionError) or "Credential" in type(error).__name__


def _may_pass(error: BaseException) -> bool:
    status = _status(error)
    if status is not None:
        return status >= 500 or status in _TRANSIENT_STATUS
    name = type(error).__name__
    return not isinstance(error, FileNotFoundError | PermissionError | FileExistsError) and not (
        "Credential" in name or "NotFound" in name or "Offline" in name
    )


def _reason(error: BaseException, attempts: int) -> str:
    status, name = _status(error), type(error).__name__
    if name in ("RepositoryNotFoundError", "GatedRepoError"):  # 401 and 403, too
        return f"no such repository, or no access to it; accept its terms on its page, and {_CREDENTIALS}"
    if _is_refusal(error):
        return f"access denied; {_CREDENTIALS}"
    if status == 404 or isinstance(error, FileNotFoundError) or "NotFound" in name:
        return "not found"
    if status is None and "Connect" in name:
        return f"cannot be reached ({name}, {attempts} attempts); check the address and the network"
    if status is not None and not _may_pass(error):
        return f"the store refuses the request (status {status}); check the address and the settings of the store"
    reason = f"status {status}" if status is not None else name
    return f"the store did not answer as expected ({reason}, {attempts} attempts); try again later"
