"""The folder of a run: who may train in it, and from where it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsnet.errors import DsnetError
from dsnet.training.checkpoint import Checkpoint, load_checkpoint
from dsnet.training.config import TrainConfig
from dsnet.training.settings import from_plain, to_plain

__all__ = ["begin", "locked", "read_config", "write_config"]

# What may differ when a run goes on: where and how often, not what is learnt.
FREE = {
    "run": ("device", "log_every", "validate_every", "save_minutes", "save_steps", "graphs", "compile"),
    "data": ("root", "workers", "lazy"),
}


def read_config(folder: Path) -> TrainConfig:
    """The configuration that a run in ``folder`` was started with."""
    return read_recipe(folder / "recipe.json", f"{folder} holds no run: it has no recipe.json")


def read_recipe(path: Path, missing: str | None = None) -> TrainConfig:
    """A configuration from a JSON file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DsnetError(missing or f"there is no file {path}") from None
    except ValueError as error:  # no text, or no JSON
        raise DsnetError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise DsnetError(f"{path} holds no settings: a recipe is an object of keys and values")
    return from_plain(TrainConfig, data)


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
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DsnetError(
                f"another process works in {folder} now; wait for it, or choose another folder"
            ) from None
        yield


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
