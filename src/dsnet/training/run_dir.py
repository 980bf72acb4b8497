"""The folder of a run: its settings, and the checkpoint to resume from."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
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
    "flat_settings",
    "going_on",
    "locked",
    "read_config",
    "read_plain",
    "read_settings",
    "settings_of",
    "write_config",
]

T = TypeVar("T")

FREE = (  # settings that may differ when a run is resumed: they do not change what is learnt
    "run.device",
    "run.log_every",
    "run.validate_every",
    "run.save_minutes",
    "run.save_steps",
    "run.graphs",
    "run.compile",
    "run.timeout_minutes",
    "data.root",
    "data.workers",
    "data.lazy",
)


def read_config(folder: Path) -> TrainConfig:
    """Read the settings that a classifier's run was started with."""
    return read_settings(folder, TrainConfig)


def read_settings(folder: Path, cls: type[T]) -> T:
    """Read the settings that a run was started with, as a configuration of this class."""
    path = folder / "recipe.json"
    data = read_plain(path, f"{folder} holds no run: it has no recipe.json")
    return settings_of(cls, data, path)


def read_plain(path: Path, missing: str | None = None) -> dict[str, Any]:
    """Read the keys and values of a recipe's JSON file, without checking each."""
    data = read_json(path, missing=missing)
    if not isinstance(data, dict):
        raise DsnetError(f"{path} is not a recipe: expected an object of keys and values")
    return data


def settings_of(cls: type[T], data: Mapping[str, Any], where: str | Path) -> T:
    """Build settings from plain data; errors name where it was read."""
    try:
        return from_plain(cls, data)
    except DsnetError as error:
        raise DsnetError(f"{where}: {error}") from error


def flat_settings(config: object) -> dict[str, Any]:
    """Return the values of settings by their full key, such as ``optim.lr``."""
    return _flat(to_plain(config))


def _flat(plain: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        flat |= _flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {path + key: value}
    return flat


def write_config(folder: Path, config: object) -> None:
    """Write the settings of a new run into its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "recipe.json", json.dumps(to_plain(config), indent=2) + "\n")


def begin(
    folder: Path,
    config: object,
    *,
    resume: bool,
    warn: Callable[[str], None],
    names: Sequence[str] = ("last", "best", "final"),
    free: Collection[str] = FREE,
) -> Checkpoint | None:
    """Return the checkpoint to resume from; None for a new run.

    Args:
        folder: Folder of the run.
        config: Settings of the run.
        resume: Whether the run is to be resumed.
        warn: Gets a message if there is nothing to resume.
        names: Checkpoints that such a run writes.
        free: Settings that may differ from those that the run was started with.

    Raises:
        DsnetError: The folder holds a run that is not to be resumed, or one with other settings.
    """
    present = [name for name in names if (folder / name).is_file()]
    if "last" not in present and has_last(folder):  # the file that names it was lost
        present.insert(0, "last")
    if not resume:
        if present:
            raise DsnetError(f"{folder} holds a run already: resume it (--resume) or choose another folder")
        return None
    if not present:
        warn(f"there is no checkpoint in {folder} to resume from: this is a new run")
        return None
    if "last" not in present:
        raise DsnetError(f"{folder} has no checkpoint 'last' to resume from; it has {', '.join(present)}")
    if not (folder / "recipe.json").exists():
        raise DsnetError(f"{folder} has checkpoints but no recipe.json: `dsnet train` did not make them")
    before, now = flat_settings(read_settings(folder, type(config))), flat_settings(config)
    changes = [
        f"{key} was {shorten(before.get(key))}, not {shorten(now.get(key))}"
        for key in before | now
        if key not in free and before.get(key) != now.get(key)
    ]
    if changes:
        raise DsnetError(
            f"{folder} was started with other settings, so these cannot resume it: {'; '.join(changes)}"
        )
    return load_checkpoint(folder, "last")


def going_on(folder: Path) -> str:
    """Describe where a run that breaks off can be resumed."""
    last = current_folder(folder, "last")
    if last is None:
        return f"nothing is saved in {folder} yet: start all processes again"
    return f"{last} is the checkpoint to resume from: start all processes again with --resume"
