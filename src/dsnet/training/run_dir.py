"""The folder of a run: who may train in it, and from where it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dsnet.core.checkpoint import Checkpoint, current_folder, has_last, load_checkpoint
from dsnet.core.files import write_text
from dsnet.core.run_lock import locked
from dsnet.core.schema import read_json
from dsnet.core.settings import from_plain, to_plain
from dsnet.errors import DsnetError, shorten
from dsnet.training.config import TrainConfig

__all__ = [
    "begin",
    "going_on",
    "locked",
    "read_config",
    "read_plain",
    "read_settings",
    "settings_of",
    "write_config",
]

T = TypeVar("T")

# What may differ when a run goes on: where and how often, not what is learnt.
FREE = {
    "run": (
        "device",
        "log_every",
        "validate_every",
        "save_minutes",
        "save_steps",
        "graphs",
        "compile",
        "timeout_minutes",
    ),
    "data": ("root", "workers", "lazy"),
}


def read_config(folder: Path) -> TrainConfig:
    """The configuration that a run in ``folder`` was started with."""
    return read_settings(folder, TrainConfig)


def read_settings(folder: Path, cls: type[T]) -> T:
    """Read the settings that a run was started with, as a configuration of this class."""
    path = folder / "recipe.json"
    data = read_plain(path, f"{folder} holds no run: it has no recipe.json")
    return settings_of(cls, data, path)


def read_plain(path: Path, missing: str | None = None) -> dict[str, Any]:
    """The keys and values of a recipe's JSON file, not yet checked one by one."""
    data = read_json(path, missing=missing)
    if not isinstance(data, dict):
        raise DsnetError(f"{path} holds no settings: a recipe is an object of keys and values")
    return data


def settings_of(cls: type[T], data: Mapping[str, Any], where: str | Path) -> T:
    """Settings from plain data; an error names where they were read."""
    try:
        return from_plain(cls, data)
    except DsnetError as error:
        raise DsnetError(f"{where}: {error}") from error


def write_config(folder: Path, config: object) -> None:
    """Notes the configuration of a run that begins."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "recipe.json", json.dumps(to_plain(config), indent=2) + "\n")


def begin(
    folder: Path,
    config: object,
    *,
    resume: bool,
    warn: Callable[[str], None],
    names: Sequence[str] = ("last", "best", "final"),
    free: Mapping[str, Sequence[str]] = FREE,
) -> Checkpoint | None:
    """Return the checkpoint to resume from; None for a new run.

    Args:
        folder: Folder of the run.
        config: Settings of the run.
        resume: Whether the run is to be resumed.
        warn: Gets a message if there is nothing to resume.
        names: Checkpoints that such a run writes.
        free: Settings that may differ from those that the run was started with, by group.

    Raises:
        DsnetError: The folder holds a run that is not to be resumed, or one with other settings.
    """
    kept = [name for name in names if (folder / name).is_file()]
    if "last" not in kept and has_last(folder):  # the file that names it was lost
        kept.insert(0, "last")
    if not resume:
        if kept:
            raise DsnetError(
                f"{folder} holds a run already: go on with it (--resume) or choose another folder"
            )
        return None
    if not kept:
        warn(f"there is no checkpoint in {folder} to go on from: starting anew")
        return None
    if "last" not in kept:
        raise DsnetError(f"{folder} has no checkpoint 'last' to go on from; it has {', '.join(kept)}")
    if not (folder / "recipe.json").exists():
        raise DsnetError(f"{folder} has checkpoints but no recipe.json: `dsnet train` did not make them")
    _same(folder, to_plain(read_settings(folder, type(config))), to_plain(config), free)
    return load_checkpoint(folder, "last")


def going_on(folder: Path) -> str:
    """From where a run that breaks off can go on, for a message."""
    last = current_folder(folder, "last")
    if last is None:
        return f"nothing is saved in {folder} yet: start all processes again"
    return f"{last} is the checkpoint to go on from: start all processes again with --resume"


def _same(
    folder: Path, before: dict[str, Any], now: dict[str, Any], free: Mapping[str, Sequence[str]]
) -> None:
    for group, keys in free.items():
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
        return ", ".join(
            f"{group}.{key} was {shorten(before.get(key))}, not {shorten(now.get(key))}" for key in keys
        )
    return f"{group} was {shorten(before)}, not {shorten(now)}"
