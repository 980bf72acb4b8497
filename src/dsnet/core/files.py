"""File access: atomic writes, and reads that never block.

Files are replaced in one step: written beside the old one, flushed to the disk and renamed. A process that
dies, or a disk that is full, leaves the old file as it was. A symbolic link inside a run is replaced, never
written through.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from pathlib import Path
from typing import IO, BinaryIO

from dsnet.errors import DsnetError, printable

__all__ = [
    "cannot_write",
    "flush",
    "open_for_appending",
    "open_regular",
    "sha256_of",
    "write_output",
    "write_text",
]

NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
CLOEXEC: int = getattr(os, "O_CLOEXEC", 0)
NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)  # Windows has neither the flag nor FIFOs
ESCAPED = "backslashreplace"  # for file names that are not UTF-8
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FILE_TYPES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file, or a link to one, to read bytes; raise OSError for everything else.

    Opening a FIFO waits for a writer, opening a device can have effects, and reading from either may never
    end. So the type is checked before the file is opened, and again on the open file.
    """
    _check_regular(os.stat(path).st_mode)
    return open(path, "rb", opener=_open_nonblocking)


def _open_nonblocking(path: str, flags: int) -> int:
    handle = os.open(path, flags | NONBLOCK)
    try:
        _check_regular(os.fstat(handle).st_mode)
    except OSError:
        os.close(handle)
        raise
    return handle


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(f"expected a regular file, but it is {FILE_TYPES.get(stat.S_IFMT(mode), 'not one')}")


def write_text(path: Path, text: str) -> None:
    """Replace a file of a run by one with this text, in one step or not at all.

    If the path is a symbolic link, the link is replaced and its target stays as it is.
    """
    started = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        started.unlink(missing_ok=True)  # left by a killed process with the same id
        handle = os.open(started, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW | CLOEXEC, 0o666)
        with open(handle, "w", encoding="utf-8", errors=ESCAPED) as file:
            file.write(text)
            file.flush()
            os.fsync(handle)
        os.replace(started, path)
        flush(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        started.unlink(missing_ok=True)


def write_output(path: Path, text: str) -> None:
    """Write a file that a user named: like `write_text`, but through links and into pipes and devices."""
    try:
        target = path.resolve()
        special = target.exists() and not target.is_file()
    except OSError as error:
        raise cannot_write(path, error) from error
    if not special:
        write_text(target, text)
        return
    try:
        path.write_text(text, encoding="utf-8", errors=ESCAPED)
    except OSError as error:
        raise cannot_write(path, error) from error


def open_for_appending(path: Path) -> IO[str]:
    """Open a regular file of a run to append text, creating it if there is none; refuse symbolic links."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NOFOLLOW | CLOEXEC, 0o666)
    except OSError as error:
        raise cannot_write(path, error) from error
    return open(handle, "a", encoding="utf-8", errors=ESCAPED)


def flush(path: Path) -> None:
    """Flush a file, or a folder's list of files, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cannot_write(path: Path, error: Exception) -> DsnetError:
    """Return the error for a file that could not be written: why, and how much space is free there."""
    number = error.errno if isinstance(error, OSError) else None
    reason = str(error)
    if number == errno.ELOOP:
        reason = "it is a symbolic link, and links inside a run are not followed; remove it"
    elif isinstance(error, OSError) and error.strerror:
        reason = error.strerror
    text = f"{path} cannot be written: {printable(reason, 200)}"
    if number in DISK_FULL or number is None:
        text += f" ({_free_space(path)}); make room and run the command again"
    return DsnetError(text)


def _free_space(path: Path) -> str:
    for folder in path.parents:
        if folder.is_dir():
            return f"{shutil.disk_usage(folder).free / 1e6:.1f} MB free in {folder}"
    return "free space unknown"
