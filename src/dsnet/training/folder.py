"""The folder of a run: who may train in it, and from where it goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from dsnet.errors import DsnetError
from dsnet.training.checkpoint import Checkpoint, load_checkpoint
from dsnet.training.config import TrainConfig
from dsnet.training.settings import from_plain, to_plain

__all__ = ["begin", "locked", "read_config", "read_plain", "write_config"]

# What may differ when a run goes on: where and how often, not what is learnt.
FREE = {
    "run": ("device", "log_every", "validate_every", "save_minutes", "save_steps", "graphs", "compile"),
    "data": ("root", "workers", "lazy"),
}


def read_config(folder: Path) -> TrainConfig:
    """The configuration that a run in ``folder`` was started with."""
    data = read_plain(folder / "recipe.json", f"{folder} holds no run: it has no recipe.json")
    return from_plain(TrainConfig, data)


def read_plain(path: Path, missing: str | None = None) -> dict[str, Any]:
    """The keys and values of a recipe's JSON file, unchecked."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DsnetError(missing or f"there is no file {path}") from None
    except ValueError as error:  # no text, or no JSON
        raise DsnetError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise DsnetError(f"{path} holds no settings: a recipe is an object of keys and values")
    return data


def write_config(folder: Path, config: TrainConfig) -> None:
    """Notes the configuration of a run that begins."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.json").write_text(json.dumps(to_plain(config), indent=2) + "\n", encoding="utf-8")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from training in the folder meanwhile."""
    try:
        import fcntl
    except ImportError:  # Windows has none
        yield
        return
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = folder / ".lock"
    while True:
        with _opened(lock) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise DsnetError(
                    f"another process works in {folder} now; wait for it, or choose another folder"
                ) from None
            if not _is_at(file, lock):  # its folder was removed meanwhile: it keeps nobody out
                continue
            try:
                yield
            finally:
                if folder in made:
                    _remove_unused(lock, made)
            return


def _opened(lock: Path) -> IO[str]:
    """The open lock, its folder made; another process may remove that between the two."""
    for _ in range(99):
        with suppress(FileNotFoundError, FileExistsError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            return lock.open("w")
    lock.parent.mkdir(parents=True, exist_ok=True)  # what is in the way every time is told
    return lock.open("w")


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether the open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
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


def begin(
    folder: Path, config: TrainConfig, *, resume: bool, told: Callable[[str], None]
) -> Checkpoint | None:
    """The checkpoint to go on from, none for a new run; raises where that is not what was asked for."""
    kept = [name for name in ("last", "best", "final") if (folder / name).is_file()]
    if not resume:
        if kept:
            raise DsnetError(
                f"{folder} holds a run already: go on with it (--resume) or choose another folder"
            )
        return None
    if not kept:
        told(f"there is no checkpoint in {folder} to go on from: starting anew")
        return None
    if "last" not in kept:
        raise DsnetError(f"{folder} has no checkpoint 'last' to go on from; it has {', '.join(kept)}")
    if not (folder / "recipe.json").exists():
        raise DsnetError(f"{folder} has checkpoints but no recipe.json: `dsnet train` did not make them")
    _same(folder, to_plain(read_config(folder)), to_plain(config))
    return load_checkpoint(folder, "last")


def _same(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for group, keys in FREE.items():
        for key in keys:
            before[group].pop(key)
            now[group].pop(key)
    changed = [key for key in before if before[key] != now[key]]
    if changed:
        told = "; ".join(_difference(key, before[key], now[key]) for key in changed)
        raise DsnetError(f"{folder} was started with other settings, so it cannot go on with these: {told}")


def _difference(group: str, before: Any, now: Any) -> str:  # noqa: ANN401  (plain data)
    if isinstance(before, dict):
        keys = [key for key in before | now if before.get(key) != now.get(key)]
        return ", ".join(f"{group}.{key} was {before.get(key)!r}, not {now.get(key)!r}" for key in keys)
    return f"{group} was {before!r}, not {now!r}"
