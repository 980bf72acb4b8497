"""Files that are replaced in one step: written beside the old one, flushed to the disk and renamed.

A process that dies, or a disk that is full, leaves the old file as it was. A symbolic link is replaced, never
written through.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path
from typing import IO

from dsnet.errors import DsnetError, printable

__all__ = [
    "cannot_write",
    "flush",
    "open_for_appending",
    "sha256_of",
    "write_output",
    "write_text",
]

NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
CLOEXEC: int = getattr(os, "O_CLOEXEC", 0)
ESCAPED = "backslashreplace"  # of names of files that are not UTF-8
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_text(path: Path, text: str) -> None:
    """Replace a file of a run by one with this text, in one step or not at all.

    Where the path is a symbolic link, the link is replaced and what it points to stays as it is.
    """
    started = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        started.unlink(missing_ok=True)  # left by a process of the same number that was killed
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
    """Write a file that a user named: as `write_text`, but a link, a pipe or a device is written to."""
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
    """Open a regular file of a run at its end, made where there is none; a symbolic link is refused."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NOFOLLOW | CLOEXEC, 0o666)
    except OSError as error:
        raise cannot_write(path, error) from error
    return open(handle, "a", encoding="utf-8", errors=ESCAPED)


def flush(path: Path) -> None:
    """Make sure that a file, or a folder's list of files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cannot_write(path: Path, error: Exception) -> DsnetError:
    """The error for a file that could not be written: why, and how much space is free there."""
    number = error.errno if isinstance(error, OSError) else None
    reason = str(error)
    if number == errno.ELOOP:
        reason = "it is a symbolic link, and links inside a run are not written through; remove it"
    elif isinstance(error, OSError) and error.strerror:
        reason = error.strerror
    text = f"{path} cannot be written: {printable(reason, 200)}"
    if number in FULL or number is None:
        text += f" ({_free(path)}); make room and run the command again"
    return DsnetError(text)


def _free(path: Path) -> str:
    """How much space is free where a file should be, in words."""
    for folder in path.parents:
        if folder.is_dir():
            return f"{shutil.disk_usage(folder).free / 1e6:.1f} MB free in {folder}"
    return "free space unknown"
