"""Locks on the folders of runs: one process at a time writes to a run, and the error names that process.

The lock is an flock on the open file ``.lock``, so it ends with the process, however that ends. The file's
content describes the owner; it is written only to a file that is empty or described an owner before.
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

from dsnet.core.files import CLOEXEC, NOFOLLOW, NONBLOCK
from dsnet.errors import DsnetError, printable

__all__ = ["LockedError", "locked", "locked_outputs"]

MARK = b'{"dsnet lock": 1'  # the beginning of an owner's description


class LockedError(DsnetError):
    """Another process is writing to the folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, creating it if there is none; remove it again if nothing was written to it.

    Raises:
        LockedError: If another process has locked it.
        DsnetError: If the lock file cannot be opened or locked.
    """
    try:
        import fcntl
    except ImportError:  # not available on Windows
        yield
        return
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = folder / ".lock"
    while True:
        handle = _open(lock)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LockedError(
                    f"another process works in {folder} now{_owner(handle)}; wait for it, or choose another "
                    "folder"
                ) from None
            except OSError as error:
                raise DsnetError(f"{lock} cannot be locked on this file system: {error.strerror}") from error
            if not _is_at(handle, lock):  # the folder was removed meanwhile: this lock has no effect
                continue
            try:
                _write_owner(handle, _this_process())
                yield
            finally:
                if folder in created:
                    _remove_unused(lock, created)
                _write_owner(handle, b"")
            return
        finally:
            os.close(handle)


@contextmanager
def locked_outputs(*paths: Path | None) -> Iterator[None]:
    """Lock the runs that contain these files, for commands that write to files named by the user."""
    runs = {run.resolve() for path in paths if path is not None and (run := _run_around(path)) is not None}
    with ExitStack() as locks:
        for run in sorted(runs):
            locks.enter_context(locked(run))
        yield


def _run_around(path: Path) -> Path | None:
    """Return the run that a file is or will be in; None if its folders are not a run's."""
    return next((folder for folder in path.absolute().parents if (folder / "recipe.json").is_file()), None)


def _open(lock: Path) -> int:
    """Open the file without changing it, creating its folder; refuse links, pipes and devices."""
    flags = os.O_RDWR | os.O_CREAT | NOFOLLOW | NONBLOCK | CLOEXEC
    for attempts_left in reversed(range(100)):
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(lock, flags, 0o666)
            break
        except (FileNotFoundError, FileExistsError):  # another process removed or created the folder
            if not attempts_left:
                raise
        except OSError as error:
            if lock.is_symlink():
                raise DsnetError(f"{lock} is a symbolic link, which a lock must not be; remove it") from error
            raise DsnetError(f"{lock} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DsnetError(f"{lock} is not a regular file, which a lock must be; remove it")
    return handle


def _write_owner(handle: int, text: bytes) -> None:
    """Replace the owner's description; leave a file with other content as it is."""
    with suppress(OSError):  # the lock holds on a full disk, too
        before = os.pread(handle, len(MARK), 0)
        if before in (b"", MARK):
            os.ftruncate(handle, 0)
            os.pwrite(handle, text, 0)


def _this_process() -> bytes:
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


def _owner(handle: int) -> str:
    """Describe the owner of the lock; empty if the file does not."""
    try:
        about = json.loads(os.pread(handle, 4096, 0))
        process, machine = int(about["process"]), str(about["machine"])
        command, since = str(about["command"]), str(about["since"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    where = "" if machine == socket.gethostname() else f" on {printable(machine, 100)}"
    return f": process {process}{where}, `{printable(command, 200)}`, since {printable(since, 40)}"


def _is_at(handle: int, path: Path) -> bool:
    """Return whether the open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def _remove_unused(lock: Path, folders: list[Path]) -> None:
    """Remove folders that contain nothing but the lock, inner ones first, while the lock is held."""
    try:
        if [path.name for path in lock.parent.iterdir()] != [lock.name]:
            return
        lock.unlink()
        for folder in folders:
            folder.rmdir()
    except OSError:  # removed or used by another process meanwhile
        return
