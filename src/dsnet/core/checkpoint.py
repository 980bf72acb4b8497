"""Checkpoints: groups of tensors and plain data, written in one step, verified by SHA-256, found by name.

The folder of a run holds one folder per checkpoint, such as ``last-00000040``, and one small file per name:
``last`` contains the name of the current folder. A checkpoint has one ``GROUP.safetensors`` per group of
tensors, ``checkpoint.json`` and ``SHA256SUMS`` (in the form of ``sha256sum --check``). It is written under
another name, flushed to the disk and renamed, then the small file is replaced. So ``last`` names a complete
checkpoint whenever the process dies.

No model is known here: `dsnet.models.loading` turns a checkpoint into a network.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsnet.core.files import cannot_write, flush, open_regular, sha256_of, write_text
from dsnet.core.formats import CHECKPOINT, GROUP
from dsnet.core.schema import check, read_json
from dsnet.errors import DsnetError, DsnetWarning, printable, shorten

__all__ = [
    "Checkpoint",
    "DamagedCheckpointError",
    "check_tensors",
    "current_folder",
    "default_name",
    "has_last",
    "load_checkpoint",
    "saved_names",
    "write_checkpoint",
]

FORMAT = 1
SUMS = "SHA256SUMS"
RETRIES = 20  # reads of a file that another process replaces at the same time


class DamagedCheckpointError(DsnetError):
    """The files of a checkpoint differ from those that were written."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"{folder} is not a complete checkpoint: {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Groups of tensors by name (``model``, ``optimizer``, …) and plain data (JSON types)."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    data: Mapping[str, Any]

    @property
    def is_detector(self) -> bool:
        """Whether the network is a detector; else it is a classifier."""
        return "detector" in self.data

    @property
    def own_data(self) -> dict[str, Any]:
        """The data without what every checkpoint has, to save it again with another network or step."""
        return {k: v for k, v in self.data.items() if k not in ("format", "step", "groups", "network")}


# --- names and folders ---------------------------------------------------------------------------------
def _step_of(folder: str, name: str) -> int | None:
    """Return the step in the name of a checkpoint's folder; None if it is not a folder of this name."""
    match = re.fullmatch(rf"{re.escape(name)}-([0-9]{{1,18}})(?:-again)*", folder)
    return None if match is None else int(match[1])


def _folders(run: Path, name: str) -> list[Path]:
    """Return the folders of all checkpoints of a name, newest first; only complete ones have that name."""
    folders = []
    for path in run.iterdir() if run.is_dir() else ():
        step = _step_of(path.name, name)
        with suppress(FileNotFoundError):  # another process may remove one meanwhile
            if step is not None and (path / "checkpoint.json").is_file():
                folders.append((step, path.stat().st_mtime_ns, path))
    return [path for *_, path in sorted(folders, reverse=True)]


def _pointer(run: Path, name: str) -> str | None:
    try:
        with open_regular(run / name) as file:
            return file.read(1000).decode("utf-8", errors="replace").strip()
    except OSError:
        return None


def current_folder(run: Path, name: str) -> Path | None:
    """Return the folder that the file ``name`` of a run names; None if there is no such file or folder."""
    text = _pointer(run, name)
    return run / text if text and _step_of(text, name) is not None and (run / text).is_dir() else None


def has_last(run: Path) -> bool:
    """Return whether a run can be resumed: it has a checkpoint ``last``, even without the file ``last``."""
    return (run / "last").is_file() or bool(_folders(run, "last"))


def saved_names(run: Path) -> list[str]:
    """Return the usual names (last, best, final, gated) that a run has checkpoints of."""
    return [
        name
        for name in ("last", "best", "final", "gated")
        if (run / name).is_file() or (name == "last" and has_last(run))
    ]


def default_name(run: Path) -> str:
    """Return the checkpoint to use if none is named: ``gated``, else ``final``, else ``last``."""
    return next((name for name in ("gated", "final") if (run / name).is_file()), "last")


def _locate(run: Path, name: str) -> Path:
    """Find the current folder of a name; fall back to the newest one, with a warning, if `name` is damaged.

    If the file itself is missing, only ``last`` falls back.
    """
    text, folder = None, None
    if re.fullmatch(GROUP, name, re.ASCII):
        for _ in range(RETRIES):
            text, folder = _pointer(run, name), current_folder(run, name)
            if folder is not None:
                return folder
            if text == _pointer(run, name):
                break
    folders = _folders(run, name) if text is not None or name == "last" else []
    if not folders and text is None:
        has = ", ".join(n for n in saved_names(run) if (run / n).is_file()) or "none"
        raise DsnetError(f"{run} has no checkpoint {shorten(name)}; it has {has}")
    if not folders:
        assert text is not None
        raise DsnetError(
            f"{run / name} is damaged: it names {shorten(text, 60)}, not a checkpoint of this run"
        )
    state = "is missing" if text is None else f"is damaged (it names {shorten(text, 60)})"
    warnings.warn(
        f"{run / name} {state}: using the newest checkpoint of that name, {folders[0].name}",
        DsnetWarning,
        stacklevel=3,
    )
    return folders[0]


# --- writing -------------------------------------------------------------------------------------------
def write_checkpoint(
    run: Path, name: str, *, step: int, tensors: Mapping[str, Mapping[str, Tensor]], data: Mapping[str, Any]
) -> Path:
    """Write a checkpoint, all of it or nothing, and make it the current one of its name.

    Older checkpoints of the name are removed; of ``last`` the previous one is kept.

    Args:
        run: Folder of the run, created if there is none.
        name: Name of the checkpoint, such as ``last``.
        step: Number of optimizer steps made.
        tensors: Groups of tensors.
        data: Plain data (JSON types), among them ``network``.

    Returns:
        The folder of the checkpoint.

    Raises:
        DsnetError: If the name or the data are not valid, if ``last`` is a complete checkpoint of a later
            step, or if the files cannot be written.
    """
    if not re.fullmatch(GROUP, name, re.ASCII):
        raise DsnetError(
            f"a checkpoint's name starts with a letter and has letters, digits, _ and -, not {shorten(name)}"
        )
    plain = {"format": FORMAT, "step": step, "groups": sorted(tensors), **data}
    _check_data(plain, f"checkpoint {name!r}")
    try:
        text = json.dumps(plain, indent=2)
    except (TypeError, ValueError) as error:
        raise DsnetError(f"the data of checkpoint {name!r} cannot be written as JSON: {error}") from error
    if name == "last":
        _check_not_older(run, step)
    before, final = current_folder(run, name), _new_folder(run, name, step)
    started = run / f".{final.name}.{os.getpid()}"
    try:
        run.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(started, ignore_errors=True)
        started.mkdir()
        data_file = started / "checkpoint.json"
        data_file.write_text(text, encoding="utf-8")
        for group, values in tensors.items():
            contiguous = {key: value.contiguous() for key, value in values.items()}
            save_file(contiguous, started / f"{group}.safetensors")
            # safetensors lets only the owner read its files, whatever the umask
            (started / f"{group}.safetensors").chmod(data_file.stat().st_mode)
        _write_sums(started)
        for path in (*started.iterdir(), started):
            flush(path)
        started.rename(final)
    except (OSError, SafetensorError) as error:
        kept = "nothing was saved under that name before" if before is None else f"{before.name} is kept"
        raise DsnetError(f"{cannot_write(final, error)}; {kept}") from error
    finally:
        shutil.rmtree(started, ignore_errors=True)
    try:
        write_text(run / name, final.name + "\n")
    except DsnetError:
        shutil.rmtree(final, ignore_errors=True)
        raise
    _prune(run, name, final, before)
    return final


def _new_folder(run: Path, name: str, step: int) -> Path:
    """Return a path that does not exist: the current folder stays until the new one is complete."""
    path = run / f"{name}-{step:08d}"
    while os.path.lexists(path):
        path = path.with_name(f"{path.name}-again")
    return path


def _check_not_older(run: Path, step: int) -> None:
    """Raise if ``last`` is a complete checkpoint of a later step."""
    current = current_folder(run, "last")
    if current is None or (_step_of(current.name, "last") or 0) <= step:
        return
    try:
        _read(current)
    except DamagedCheckpointError:
        return
    raise DsnetError(
        f"{run} has a later checkpoint, {current.name}: step {step} does not replace it; save under another "
        f"name or in another folder, or remove {run / 'last'} and {current.name} first"
    )


def _prune(run: Path, name: str, keep: Path, before: Path | None) -> None:
    """Remove the checkpoints that ``keep`` replaces, and the unfinished ones of writers that were killed.

    Of ``last``, those of later steps stay and one earlier: the previous one, ``before``, or else the newest.
    """
    earlier = [path for path in _folders(run, name) if path != keep]
    if name == "last":
        step = _step_of(keep.name, name) or 0
        earlier = [path for path in earlier if (_step_of(path.name, name) or 0) <= step]
        spared = before if before in earlier else next(iter(earlier), None)
        earlier = [path for path in earlier if path != spared]
    for path in run.iterdir():
        stem, _, process = path.name.removeprefix(".").rpartition(".")
        written = stem == name or _step_of(stem, name) is not None
        unfinished = path.name.startswith(".") and process.isdecimal() and written
        if path in earlier or (unfinished and path.is_dir()):
            shutil.rmtree(path, ignore_errors=True)
        elif unfinished:
            path.unlink(missing_ok=True)


def _write_sums(folder: Path) -> None:
    lines = [f"{sha256_of(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / SUMS).write_text("".join(lines), encoding="ascii")


# --- reading -------------------------------------------------------------------------------------------
def load_checkpoint(path: str | Path, name: str | None = None) -> Checkpoint:
    """Load a checkpoint and verify its files.

    If it is damaged and an earlier one of its name was kept, as of ``last``, that one is loaded, with a
    warning.

    Args:
        path: Folder of a run, or of one checkpoint.
        name: Name of the run's checkpoint (default: ``gated``, else ``final``, else ``last``).

    Raises:
        DamagedCheckpointError: If a file is missing or differs from what was written.
        DsnetError: If there is no such checkpoint, or its format is unknown.
    """
    path = Path(path)
    if not path.is_dir():
        state = "is a file" if path.exists() else "does not exist"
        raise DsnetError(f"{path} {state}: expected the folder of a run, as `dsnet train` makes it")
    if (path / "checkpoint.json").exists():
        return _read(path)
    name = name or default_name(path)
    folder = _locate(path, name)
    for _ in range(RETRIES):
        try:
            return _read(folder)
        except DamagedCheckpointError as error:
            damage = error
        current = _locate(path, name)
        if current == folder:
            break
        folder = current  # another process saved meanwhile and removed the previous one
    for other in _folders(path, name):
        if other != folder:
            with suppress(DamagedCheckpointError):
                saved = _read(other)
                text = f"{damage}; loading {other.name} instead, of step {saved.data['step']}"
                warnings.warn(text, DsnetWarning, stacklevel=2)
                return saved
    raise damage


def _read(folder: Path) -> Checkpoint:
    """Read the folder of a checkpoint and verify every file."""
    hashed = _check_sums(folder)
    data = _read_data(folder)
    files = {group: f"{group}.safetensors" for group in data["groups"]}
    lacking = sorted(set(files.values()) - hashed) if hashed else []
    if lacking or "model" not in files:
        reason = f"{SUMS} has no {lacking[0]}" if lacking else "its groups lack 'model'"
        raise DamagedCheckpointError(folder, reason)
    tensors = {}
    for group, file in files.items():
        try:
            if not (folder / file).is_file():
                raise FileNotFoundError(f"there is no file {file}")
            tensors[group] = load_file(folder / file)
        except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:  # torch opens it too
            raise DamagedCheckpointError(folder, f"{file}: {printable(str(error), 200)}") from error
    return Checkpoint(tensors=tensors, data=data)


def _read_data(folder: Path) -> dict[str, Any]:
    """Read and check checkpoint.json."""
    path = folder / "checkpoint.json"
    try:
        data: dict[str, Any] = read_json(path)
        given = data.get("format") if isinstance(data, dict) else None
        if type(given) is not int or given == FORMAT:
            _check_data(data, path)
            return data
    except DsnetError as error:
        raise DamagedCheckpointError(folder, str(error)) from error
    raise DsnetError(f"{folder} has checkpoint format {shorten(given)}; this version reads {FORMAT}")


def _check_data(data: Mapping[str, Any], where: str | Path) -> None:
    """Raise if this version cannot use the plain data of a checkpoint."""
    check(CHECKPOINT, data, where)
    channels = data.get("input")
    if channels is not None and len(channels["mean"]) != len(channels["std"]):
        raise DsnetError(
            f"{where}: input.std has {len(channels['std'])} values, expected {len(channels['mean'])} as "
            "input.mean"
        )
    reserved = sorted({"name", "device", "dtype", "generator"} & set(data["network"]["options"]))
    if reserved:
        raise DsnetError(f"{where}: network.options.{reserved[0]} is not an option of a network")


def _check_sums(folder: Path) -> frozenset[str]:
    """Compare the files with their hashes and return their names; none for old checkpoints without hashes."""
    path = folder / SUMS
    try:
        if not path.is_file():
            if os.path.lexists(path):
                raise DamagedCheckpointError(folder, f"{SUMS} is not a regular file")
            return frozenset()
        lines = path.read_text(encoding="ascii").splitlines()
        matches = [re.fullmatch(r"([0-9a-f]{64})  ([A-Za-z][\w.-]*)", line, re.ASCII) for line in lines]
        if not matches or None in matches:
            raise DamagedCheckpointError(folder, f"{SUMS} is damaged")
        expected = {match[2]: match[1] for match in matches if match is not None}
        for name, digest in expected.items():
            if not (folder / name).is_file():
                raise DamagedCheckpointError(folder, f"{name} is missing")
            if sha256_of(folder / name) != digest:
                raise DamagedCheckpointError(
                    folder,
                    f"{name} is damaged: its SHA-256 differs from the one in {SUMS} (if it was changed on "
                    f"purpose, delete {SUMS})",
                )
    except (OSError, ValueError) as error:
        if isinstance(error, DsnetError):
            raise
        raise DamagedCheckpointError(folder, f"{SUMS} cannot be checked: {error}") from error
    return frozenset(expected)


def check_tensors(group: str, given: Mapping[str, Tensor], expected: Mapping[str, Sequence[int]]) -> None:
    """Raise if a group of saved tensors lacks one, has one too many, or has one of another shape.

    Args:
        group: Name of the group, for the error.
        given: The saved tensors.
        expected: Shapes by name.
    """
    for name, shape in expected.items():
        if name not in given:
            raise DsnetError(f"the checkpoint's group {group!r} lacks the tensor {name!r}")
        if tuple(given[name].shape) != tuple(shape):
            raise DsnetError(
                f"the tensor {name!r} of the checkpoint's group {group!r} has shape "
                f"{list(given[name].shape)}, expected {list(shape)}"
            )
    for name in given:
        if name not in expected:
            raise DsnetError(f"the checkpoint's group {group!r} has an unexpected tensor: {shorten(name)}")
