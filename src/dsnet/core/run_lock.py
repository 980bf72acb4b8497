"""One process at a time writes to a run's folder; who it is can be read by those that are refused.

The lock is that of the open file ``.lock``: it ends with the process, however that ends. What the file says
is for people, and is written only into a file that is empty or a lock already.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dsnet.core.files import NOFOLLOW
from dsnet.errors import DsnetError, printable

__all__ = ["LockedError", "locked", "locked_outputs"]

MARK = b'{"dsnet lock": 1'  # what the file begins with


class LockedError(DsnetError):
    """Another process writes to the folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from writing to the folder meanwhile."""
    try:
        import fcntl
    except ImportError:  # Windows has none
        yield
        return
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = folder / ".lock"
    while True:
        handle = _opened(lock)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LockedError(
                    f"another process works in {folder} now{_holder(handle)}; wait for it, or choose another "
                    "folder"
                ) from None
            except OSError as error:
                raise DsnetError(f"{lock} cannot be locked on this file system: {error.strerror}") from error
            if not _is_at(handle, lock):  # its folder was removed meanwhile: it keeps nobody out
                continue
            try:
                _note(handle, _about_us())
                yield
            finally:
                if folder in made:
                    _remove_unused(lock, made)
                _note(handle, b"")
            return
        finally:
            os.close(handle)


@contextmanager
def locked_outputs(*paths: Path | None) -> Iterator[None]:
    """Locks every run that one of these files lies in, for commands that write to files a user named."""
    runs = {run.resolve() for path in paths if path is not None and (run := _run_around(path)) is not None}
    with ExitStack() as locks:
        for run in sorted(runs):
            locks.enter_context(locked(run))
        yield


def _run_around(path: Path) -> Path | None:
    """The run that a file is in or will be in; none where its folders are none of a run."""
    return next((folder for folder in path.absolute().parents if (folder / "recipe.json").is_file()), None)


def _opened(lock: Path) -> int:
    """The open lock, its folder made; another process may remove that between the two."""
    for _ in range(99):
        with suppress(FileNotFoundError, FileExistsError):
            return _open(lock)
    return _open(lock)  # what is in the way every time is told


def _open(lock: Path) -> int:
    """Opens the file without changing it; a link, a pipe or a device is refused."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | NOFOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        handle = os.open(lock, flags, 0o666)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        if lock.is_symlink():
            raise DsnetError(f"{lock} is a symbolic link, which a lock must not be; remove it") from error
        raise DsnetError(f"{lock} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DsnetError(f"{lock} is not a regular file, which a lock must be; remove it")
    return handle


def _note(handle: int, text: bytes) -> None:
    """Says in the file who holds it; a file that holds something else is left as it is."""
    with suppress(OSError):  # on a full disk nothing is said
        before = os.pread(handle, len(MARK), 0)
        if before in (b"", MARK):
            os.ftruncate(handle, 0)
            os.pwrite(handle, text, 0)


def _about_us() -> bytes:
    program = Path(sys.argv[0] if sys.argv else "")
    name = program.parent.name if program.name == "__main__.py" else program.name  # python -m dsnet
    about = {
        "dsnet lock": 1,
        "process": os.getpid(),
        "machine": socket.gethostname(),
        "command": shlex.join([name, *sys.argv[1:]])[:500],
        "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    return json.dumps(about).encode() + b"\n"


def _holder(handle: int) -> str:
    """Who holds the lock, in words; nothing where the file does not say."""
    try:
        about = json.loads(os.pread(handle, 4096, 0))
        process, machine = int(about["process"]), str(about["machine"])
        command, since = str(about["command"]), str(about["since"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    where = "" if machine == socket.gethostname() else f" on {printable(machine, 100)}"
    return f": process {process}{where}, `{printable(command, 200)}`, since {printable(since, 40)}"


def _is_at(handle: int, path: Path) -> bool:
    """Whether the open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def _remove_unused(lock: Path, folders: list[Path]) -> None:
    """Removes folders, inner ones first, that hold nothing but the lock; called while it is held."""
    try:
        if [path.name for path in lock.parent.iterdir()] != [lock.name]:
            return
        lock.unlink()
        for folder in folders:
            folder.rmdir()
    except OSError:  # gone, or in use by another process since
        return
