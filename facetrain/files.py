"""Atomic writes of small files and of folders, digests, and errors of the operating system as errors of facetrain."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import resource
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from facetrain.errors import DataError, FacetrainError, RunError, UsageError
from facetrain.text import shell_path, shortened

_LONGEST_REASON = 200
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WRITE_ADVICE = {errno.EROFS: "choose another path"} | dict.fromkeys(
    _FULL, "free space or choose another path"
)
_FOLDER_SYNC_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def error_reason(error: BaseException, *, of_text: bool = True) -> str:
    """Return why an operation failed, on one line: the text of the errno where there is one.

    Some libraries repeat the damaged file, or add a stack of C++ calls: a long text is cut.

    Args:
        error: what was raised.
        of_text: whether the file is a text; false for a binary format, which an editor would destroy.
    """
    if isinstance(error, UnicodeDecodeError):
        # Not the place: a file that is read in pieces counts it from the start of a piece.
        byte = f"byte 0x{error.object[error.start]:02x}"
        return (
            f"is not text in UTF-8 ({byte}); save it as UTF-8" if of_text else f"text not in UTF-8 ({byte})"
        )
    reason = " ".join(str(getattr(error, "strerror", None) or error).split())
    return shortened(reason, _LONGEST_REASON) or type(error).__name__


def damage_reason(error: BaseException) -> str:
    """Return why a file in a binary format cannot be read, and an advice if its content is the reason.

    It is not if the error has an errno, or is about memory or what a library does not support.
    """
    reason = error_reason(error, of_text=False)
    is_content = isinstance(error, OSError | ValueError | LookupError) and not getattr(error, "errno", None)
    return f"{reason}; the file is damaged or incomplete: copy it again" if is_content else reason


@contextmanager
def os_errors_as(kind: type[FacetrainError], path: Path, advice: str = "") -> Iterator[None]:
    """Turn an OSError of the block into `kind`, with the path, the reason and an advice.

    The path that the error itself names wins over `path`. Errors that only writing has get an advice here.

    Raises:
        FacetrainError: of type `kind`, if the block raised an OSError; on a full disk RunError in place of a
            UsageError, because nothing is wrong with the input.
    """
    try:
        yield
    except OSError as error:
        # Of a rename, the second name: the first one is a scratch path.
        named = error.filename2 or error.filename
        place = named if isinstance(named, str | os.PathLike) else path
        raise error_as(kind, place, error, advice) from error


def error_as(kind: type[FacetrainError], place: object, error: OSError, advice: str = "") -> FacetrainError:
    """Return an OSError as an error of facetrain: the place, the reason, and an advice. See `os_errors_as`."""
    advice = advice or _WRITE_ADVICE.get(error.errno or 0, "")
    if error.errno in _FULL and issubclass(kind, UsageError):
        kind = RunError
    return kind(f"{place}: {error_reason(error)}" + (f"; {advice}" if advice else ""))


def write_fault(path: Path) -> str:
    """Return why a file or folder cannot be written to, in the words of the operating system; empty if it can."""
    if os.access(path, os.W_OK):
        return ""
    try:
        is_read_only = os.statvfs(path).f_flag & os.ST_RDONLY
    except OSError as error:
        return error_reason(error)
    return os.strerror(errno.EROFS if is_read_only else errno.EACCES)


def creation_fault(path: Path) -> str:
    """Return which existing folder on the way to a path cannot be written to, and why; empty if it can."""
    existing = next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
    fault = write_fault(existing) if existing.is_dir() else os.strerror(errno.ENOTDIR)
    return fault and f"{existing}: {fault}"


def stamp_of(status: os.stat_result) -> list[int]:
    """Return size, inode, modification time and time of change (ns) of a file, for JSON: others tell a change.

    Inode and time of change tell also of a file that replaced one of the same size and modification time.
    """
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_utf_8(name: str | os.PathLike[str]) -> None:
    """Check that a name is text in UTF-8: configs, JSON and the libraries of model files hold no other.

    Raises:
        UsageError: it has a byte that is not, which is half a character in Python's names of files.
    """
    text = os.fspath(name)
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise UsageError(f"{text}: a name that is not UTF-8; rename the file or folder")


def read_regular_text(path: Path) -> str:
    """Return the text of a file without a byte order mark; bytes that are not UTF-8 are replaced.

    Raises:
        OSError: the file cannot be read, or is not a regular file: a read of a pipe or a device may never end.
    """
    with open(path, encoding="utf-8-sig", errors="replace", opener=open_regular) as file:
        return file.read()


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor; also an `opener` for `open`.

    Raises:
        OSError: the file cannot be opened, or is a folder, a pipe or a device: a read of a pipe may never end.
    """
    # Without O_NONBLOCK, the opening of a pipe waits for a writer.
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return descriptor


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file. After a crash, the file holds the old text or the new text, never a mixture."""
    with replacing(path) as scratch, scratch.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def scratch_path(output: Path) -> Path:
    """Return a new hidden path beside `output`, for a file or folder that is to become it.

    The name is random: processes in several containers or on several hosts can share a process id, and a name that
    others can guess could be a link to another file.
    """
    return output.with_name(f".{output.name.removeprefix('.')}.{secrets.token_hex(8)}.tmp")


def unfinished(output: Path) -> list[Path]:
    """Return the hidden paths beside an output where commands write it, or were killed while they did."""
    name = glob.escape(output.name.removeprefix("."))
    return sorted(output.parent.glob(f".{name}.{'[0-9a-f]' * 16}.tmp"))


@contextmanager
def replacing(output: Path) -> Iterator[Path]:
    """Yield a scratch path beside `output`; its file becomes `output` if the block ends, and is removed if it fails.

    An existing `output` is replaced. Errors name `output`.
    """
    scratch = scratch_path(output)
    try:
        with _errors_naming(output, scratch):
            yield scratch
            os.replace(scratch, output)
    except BaseException:
        with suppress(OSError):  # its error would hide the first one
            scratch.unlink()
        raise


@contextmanager
def _errors_naming(output: Path, scratch: Path) -> Iterator[None]:
    """Let an OSError of the block name `output` in place of a scratch path, which the user has not given."""
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str | os.PathLike) and Path(error.filename).is_relative_to(scratch):
            error.filename = str(output / Path(error.filename).relative_to(scratch))
        raise


@contextmanager
def new_file(output: Path, kind: type[FacetrainError]) -> Iterator[Path]:
    """Yield a scratch path as `replacing` does.

    Raises:
        FacetrainError: of type `kind`, if the operating system refuses.
    """
    with os_errors_as(kind, output), replacing(output) as scratch:
        yield scratch


def packaged_folder(in_wheel: Path, in_source_tree: Path) -> Path:
    """Return which of two folders has the YAML files that come with facetrain: a wheel and a source tree differ.

    Beside an installed package, the second folder may belong to another one.
    """
    return in_wheel if any(in_wheel.glob("*.yaml")) else in_source_tree


def require_absent(output: Path | None) -> None:
    """Check that an output can be created and does not exist, before the work for it starts; None is skipped.

    Raises:
        DataError: there is a file, a folder, or a link, which no folder could replace; or a folder on the way to it may
            not be written.
    """
    if output is None:
        return
    if not os.path.lexists(output):
        if fault := creation_fault(output):
            raise DataError(f"{output}: cannot be created: {fault}; choose another path")
        return
    if not output.exists():
        raise DataError(
            f"{output}: is a link to {output.parent / os.readlink(output)}, where nothing is; give that path itself, "
            "or remove the link"
        )
    raise DataError(f"{output}: already exists; remove it or choose another name")


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a scratch folder, which becomes `output` when the block ends and is removed if the block fails.

    Raises:
        DataError: `output` exists, or the operating system refuses.
    """
    require_absent(output)
    scratch = scratch_path(output)
    with os_errors_as(DataError, output), _errors_naming(output, scratch):
        try:
            scratch.mkdir(parents=True)  # in the block: Ctrl-C may come as soon as the folder exists
            yield scratch
            require_absent(output)  # another command may have written it meanwhile
            os.replace(scratch, output)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def locked(
    path: Path, *, wait: bool = True, before_wait: Callable[[], None] = lambda: None
) -> Iterator[IO[str] | None]:
    """Hold the lock of a file among the processes of this machine, and yield the file, open at its start.

    If another process holds it: yield None without `wait`, otherwise call `before_wait` and wait.
    """
    # What the disk has damaged is no reason to fail: the caller finds a text that is not its own.
    with path.open("a+", encoding="ascii", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                yield None
                return
            before_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file


def make_folder(folder: Path, *, exist_ok: bool = True) -> list[Path]:
    """Create a folder and its missing parents, and wait until their names are on the disk; return the new ones.

    The innermost is the first.

    Raises:
        FileExistsError: the folder exists, and `exist_ok` is not set.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=exist_ok)
    for path in reversed(missing):
        sync_folder(path.parent)
    return missing


def require_temporary_folder() -> None:
    """Check that there is a folder for temporary files, which a read-only container lacks.

    Raises:
        UsageError: there is none.
        RunError: there is one on a full disk.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        # Python writes to each folder that it tries, and does not say why it could not.
        folder = Path("/tmp")
        with suppress(OSError):
            # Read-only file systems of containers have no free bytes either.
            if not (disk := os.statvfs(folder)).f_bavail and not disk.f_flag & os.ST_RDONLY:
                full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                raise error_as(RunError, folder, full) from error
        raise UsageError(
            "no folder for temporary files can be written to, neither TMPDIR nor /tmp nor the current folder; set the "
            "environment variable TMPDIR to one that can"
        ) from error


def private_folder(folder: Path) -> Path:
    """Return a folder, created if need be, that only this user can change: what it holds is trusted later.

    Raises:
        DataError: another user owns it, or other users may write to it.
        OSError: it cannot be created.
    """
    if not folder.exists():
        make_folder(folder.parent)
        with suppress(FileExistsError):  # another process was faster
            folder.mkdir(mode=0o700)
        sync_folder(folder.parent)
    status = folder.stat()
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_uid not in (os.geteuid(), 0):
        raise DataError(
            f"{folder}: other users can change files in this cache; use another folder, or take their right away: "
            f"chmod go-w {shell_path(folder)}"
        )
    return folder


def sync_file(descriptor: int, path: Path | str) -> None:
    """Wait until the content of an open file is on the disk.

    Raises:
        OSError: with the path, which `os.fsync` does not name.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Several network and user-space file systems sync files only, and order changes of names themselves.
        if error.errno not in _FOLDER_SYNC_UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def allow_open_files() -> None:
    """Raise the limit of open files as far as the system permits.

    Many systems set it to 1,024. A mixture of a few hundred datasets exceeds it, and so do the connections of a few
    hundred ranks to the process that all of them meet in.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
