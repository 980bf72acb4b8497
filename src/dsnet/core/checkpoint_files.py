"""Where a run keeps its checkpoints: folders of files with their hashes, and small files that name a folder.

``last-00000040`` is a checkpoint, the file ``last`` names the one that counts. Beside the checkpoint's own
files ``SHA256SUMS`` holds their hashes, in the form that ``sha256sum --check`` reads.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from contextlib import suppress
from pathlib import Path

from dsnet.core.files import sha256_of
from dsnet.core.formats import GROUP
from dsnet.core.open_file import open_regular
from dsnet.errors import DsnetError, DsnetWarning, shorten

__all__ = [
    "SUMS",
    "DamagedCheckpointError",
    "check_name",
    "check_sums",
    "has_last",
    "locate",
    "named_by",
    "new_folder",
    "prune",
    "step_of",
    "stored",
    "write_sums",
]

SUMS = "SHA256SUMS"
TRIES = 20  # readings of a file that another process replaces at the same time
USUAL = ("last", "best", "final", "gated")


class DamagedCheckpointError(DsnetError):
    """A checkpoint's files are not those that were written."""


def check_name(name: str) -> None:
    """Raise where a checkpoint cannot have this name."""
    if not _is_name(name):
        raise DsnetError(
            f"a checkpoint's name has letters, digits, _ and - and begins with a letter, not {shorten(name)}"
        )


def _is_name(name: str) -> bool:
    return re.fullmatch(GROUP, name, re.ASCII) is not None


def _folder_pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(name)}-([0-9]{{1,18}})(?:-again)*")  # not of a name that begins like it


def step_of(folder: Path, name: str) -> int:
    """The step in the name of a checkpoint's folder."""
    found = _folder_pattern(name).fullmatch(folder.name)
    assert found is not None
    return int(found[1])


def stored(run: Path, name: str) -> list[Path]:
    """The folders of all checkpoints of this name, the newest first; they are moved here only when whole."""
    pattern, found = _folder_pattern(name), []
    for path in run.iterdir() if run.is_dir() else ():
        if pattern.fullmatch(path.name):
            with suppress(FileNotFoundError):  # another process may remove one meanwhile
                if (path / "checkpoint.json").is_file():
                    found.append((step_of(path, name), path.stat().st_mtime_ns, path))
    return [path for *_, path in sorted(found, reverse=True)]


def has_last(run: Path) -> bool:
    """Whether a run can go on: it has a checkpoint ``last``, or one whose name was lost."""
    return (run / "last").is_file() or bool(stored(run, "last"))


def _pointer(run: Path, name: str) -> str | None:
    try:
        with open_regular(run / name) as file:
            return file.read(1000).decode("utf-8", errors="replace").strip()
    except OSError:
        return None


def named_by(run: Path, name: str) -> Path | None:
    """The checkpoint that the file ``name`` names; none where there is no such file or it is damaged."""
    text = _pointer(run, name)
    if text is None or _folder_pattern(name).fullmatch(text) is None or not (run / text).is_dir():
        return None
    return run / text


def locate(run: Path, name: str) -> Path:
    """The folder of the checkpoint of this name.

    Where the file that names it is damaged, or where that of ``last`` is lost, the newest one is taken and a
    warning says so.
    """
    if not _is_name(name):
        raise _nothing(run, name)
    for _ in range(TRIES):
        text = _pointer(run, name)
        found = named_by(run, name)
        if found is not None:
            return found
        if text == _pointer(run, name):
            break
    if text is None and name != "last":
        raise _nothing(run, name)
    others = stored(run, name)
    if not others:
        if text is None:
            raise _nothing(run, name)
        raise DsnetError(
            f"{run / name} is damaged: it names no checkpoint of this run but {shorten(text, 60)}"
        )
    state = "is missing" if text is None else f"is damaged (it names {shorten(text, 60)})"
    warnings.warn(
        f"{run / name} {state}: the newest checkpoint of that name is taken, {others[0].name}",
        DsnetWarning,
        stacklevel=3,
    )
    return others[0]


def _nothing(run: Path, name: str) -> DsnetError:
    kept = [name for name in USUAL if (run / name).is_file()]
    has = f"it has {', '.join(kept)}" if kept else "it has none"
    return DsnetError(f"{run} has no checkpoint {shorten(name)}; {has}")


def new_folder(run: Path, name: str, step: int) -> Path:
    """A path for a new checkpoint that no other has."""
    path = run / f"{name}-{step:08d}"
    while os.path.lexists(path):  # the one that ``name`` stands for may not go before the new one is there
        path = path.with_name(f"{path.name}-again")
    return path


def prune(run: Path, name: str, keep: Path, before: Path | None) -> None:
    """Remove the checkpoints that ``keep`` replaces, and what writers left that were killed.

    Of ``last`` all of later steps stay, and one earlier: the one that was named ``before``, else the newest.
    """
    earlier = [path for path in stored(run, name) if path != keep]
    if name == "last":
        step = step_of(keep, name)
        earlier = [path for path in earlier if step_of(path, name) <= step]
        spared = before if before in earlier else next(iter(earlier), None)
        earlier = [path for path in earlier if path != spared]
    begun = re.compile(rf"\.(?:{_folder_pattern(name).pattern}|{re.escape(name)})\.\d+")
    for path in run.iterdir():
        if path in earlier or (begun.fullmatch(path.name) and path.is_dir()):
            shutil.rmtree(path, ignore_errors=True)
        elif begun.fullmatch(path.name):
            path.unlink(missing_ok=True)


def write_sums(folder: Path) -> None:
    """Write the hashes of all files of a checkpoint."""
    lines = [f"{sha256_of(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / SUMS).write_text("".join(lines), encoding="ascii")


def check_sums(folder: Path) -> frozenset[str]:
    """Raise where a file of a checkpoint is not as it was written; the names of those that were checked.

    Checkpoints of earlier versions have no hashes and pass.
    """
    path = folder / SUMS
    try:
        if not path.is_file():
            if os.path.lexists(path):
                raise _damaged(folder, f"{SUMS} is not a regular file")
            return frozenset()
        listed = path.read_text(encoding="ascii").splitlines()
        found = [re.fullmatch(r"([0-9a-f]{64})  ([A-Za-z][\w.-]*)", line, re.ASCII) for line in listed]
        if not found or None in found:
            raise _damaged(folder, f"{SUMS} is damaged")
        names = {match[2]: match[1] for match in found if match is not None}
        for name, expected in names.items():
            if not (folder / name).is_file():
                raise _damaged(folder, f"{name} is missing")
            if sha256_of(folder / name) != expected:
                raise _damaged(
                    folder,
                    f"{name} is damaged: its SHA-256 differs from the one in {SUMS} "
                    f"(where it was changed on purpose, delete {SUMS})",
                )
    except (OSError, ValueError) as error:
        if isinstance(error, DsnetError):
            raise
        raise _damaged(folder, f"{SUMS} cannot be checked: {error}") from error
    return frozenset(names)


def _damaged(folder: Path, why: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{folder} is no whole checkpoint: {why}")
