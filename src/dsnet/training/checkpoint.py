"""Checkpoints that survive being killed: tensors as safetensors, everything else as JSON.

A run's folder holds one sub-folder a checkpoint and, for every name such as ``last`` and ``best``, a small
file that says which sub-folder it is. A checkpoint is written under another name, flushed to the disk and
renamed; then the small file is replaced in one step. Whenever the process dies, ``last`` names a whole one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from dsnet.errors import DsnetError
from dsnet.gate import HeadForm
from dsnet.models import Supernet, create_model
from dsnet.routes import RouteSpace

__all__ = [
    "Checkpoint",
    "default_name",
    "load_checkpoint",
    "load_classifier",
    "load_model",
    "optimizer_tensors",
    "restore_optimizer",
    "save_checkpoint",
]

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What was saved: groups of tensors by name, and plain data."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    data: Mapping[str, Any]

    def model(self) -> Supernet:
        """The network, built anew with the saved weights, statistics and routing heads; in eval mode."""
        try:
            return self._model()
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, DsnetError):
                raise
            raise DsnetError(
                f"the checkpoint's network cannot be built: {type(error).__name__}: {error}"
            ) from error

    def _model(self) -> Supernet:
        saved = self.data["network"]
        model: Supernet = create_model(saved["name"], **saved["options"])
        space = RouteSpace.from_dict(saved["space"])
        if space != model.space:
            raise DsnetError(f"the checkpoint's {saved['name']} has other routes than this version builds")
        forms = saved.get("heads") or [None] * len(saved["gates"])
        for stage, (choices, form) in enumerate(zip(saved["gates"], forms, strict=True)):
            strange = sorted(set(choices) - set(space.choices[stage]))
            if strange:
                raise DsnetError(f"gate {stage} of the checkpoint has choices that there are not: {strange}")
            model.gate(stage).replace_routing(tuple(choices), form=None if form is None else HeadForm(**form))
        model.load_state_dict(dict(self.tensors["model"]))
        return model


def save_checkpoint(
    folder: Path,
    name: str,
    model: Supernet,
    *,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]] | None = None,
    data: Mapping[str, Any] | None = None,
) -> Path:
    """Saves the network, further tensors and plain data under ``name``, in one step or not at all.

    A group ``model`` among the tensors stands in for the network's own state.
    """
    if re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII) is None:
        raise DsnetError(
            f"a checkpoint's name has letters, digits, _ and - and begins with a letter, not {name!r}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"{name}-{step:08d}"
    while final.exists():  # the one that ``name`` stands for may not go before the new one is there
        final = final.with_name(f"{final.name}-again")
    started = folder / f".{final.name}.{os.getpid()}"
    shutil.rmtree(started, ignore_errors=True)
    started.mkdir()
    groups = {"model": model.state_dict(), **(tensors or {})}
    for group, values in groups.items():
        save_file(
            {key: value.contiguous() for key, value in values.items()}, started / f"{group}.safetensors"
        )
    plain = {
        "format": FORMAT,
        "step": step,
        "groups": sorted(groups),
        "network": {
            "name": model.spec.name,
            "options": dict(model.spec.options),
            "space": model.space.to_dict(),
            "gates": [list(model.gate(stage).choices) for stage in range(len(model.gates))],
            "heads": [asdict(model.gate(stage).form) for stage in range(len(model.gates))],
        },
        **(data or {}),
    }
    (started / "checkpoint.json").write_text(json.dumps(plain, indent=2), encoding="utf-8")
    for path in (*started.iterdir(), started):
        _flush(path)
    started.rename(final)
    _replace_text(folder / name, final.name)
    _remove_others(folder, name, final)
    return final


def _replace_text(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text + "\n", encoding="utf-8")
    _flush(new)
    os.replace(new, path)
    _flush(path.parent)


def _remove_others(folder: Path, name: str, keep: Path) -> None:
    own = re.compile(rf"\.?{re.escape(name)}-\d+(-again)*(\.\d+)?")  # not those of a name that begins like it
    begun = re.compile(rf"\.{re.escape(name)}\.\d+")  # by a process that was killed while it told the name
    for old in folder.iterdir():
        if old != keep and own.fullmatch(old.name) and old.is_dir():
            shutil.rmtree(old, ignore_errors=True)
        elif begun.fullmatch(old.name) and old.is_file():
            old.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Makes sure that a file, or a folder's list of files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def default_name(folder: Path) -> str:
    """The checkpoint that is meant where none is named: ``gated``, else ``final``, else ``last``."""
    return next((name for name in ("gated", "final") if (folder / name).is_file()), "last")


def load_checkpoint(path: Path, name: str | None = None) -> Checkpoint:
    """A checkpoint from its own folder, or the named one of a run's (see `default_name`)."""
    if (path / "checkpoint.json").exists():
        return _load(path)
    folder = _named(path, name or default_name(path))
    try:
        return _load(folder)
    except DsnetError:
        now = _named(path, name or default_name(path))
        if now == folder:
            raise
        return _load(now)  # another process saved meanwhile, and the old one is gone


def _load(folder: Path) -> Checkpoint:
    try:
        data = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
        if not isinstance(data, dict) or not {"step", "network"} <= set(data):
            raise DsnetError(
                f"{folder} is no whole checkpoint: its checkpoint.json lacks what it should hold"
            )
        if data.get("format") != FORMAT:
            given = data.get("format")
            raise DsnetError(f"{folder} has checkpoint format {given!r}; this version reads {FORMAT}")
        tensors = {group: load_file(folder / f"{group}.safetensors") for group in data["groups"]}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if isinstance(error, DsnetError):
            raise
        raise DsnetError(f"{folder} is no whole checkpoint: {error}") from error
    return Checkpoint(tensors=tensors, data=data)


def _named(path: Path, name: str) -> Path:
    pointer = path / name
    if not pointer.is_file():
        kept = [name for name in ("last", "best", "final", "gated") if (path / name).is_file()]
        has = f"it has {', '.join(kept)}" if kept else "it has none"
        raise DsnetError(f"{path} has no checkpoint {name!r}; {has}")
    folder = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if not folder.startswith(f"{name}-") or not (path / folder).is_dir():
        raise DsnetError(f"{pointer} is damaged: it names no checkpoint of this run but {folder[:60]!r}")
    return path / folder


def load_classifier(run: str | Path, name: str | None = None) -> Checkpoint:
    """As `load_checkpoint`; raises where it is a detector's, whose classifier was never trained."""
    saved = load_checkpoint(Path(run), name)
    if "detector" in saved.data:
        raise DsnetError(f"{run} holds a detector: use `dsnet detect evaluate` or `dsnet detect predict`")
    return saved


def load_model(path: str | Path, name: str | None = None) -> Supernet:
    """The network of a checkpoint, in eval mode."""
    return load_checkpoint(Path(path), name).model()


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """An optimiser's state as named tensors: parameter number, then what it is."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{key}": value
        for index, entry in state.items()
        for key, value in entry.items()
        if value is not None
    }


def restore_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Puts the state of `optimizer_tensors` into an optimiser over the same parameters."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
