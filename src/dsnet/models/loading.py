"""Checkpoints that survive being killed: tensors as safetensors, everything else as JSON.

A run's folder holds one sub-folder a checkpoint and, for every name such as ``last`` and ``best``, a small
file that says which sub-folder it is. A checkpoint is written under another name, flushed to the disk and
renamed; then the small file is replaced in one step. Whenever the process dies, ``last`` names a whole one.
Every file's SHA-256 is kept beside it and compared when it is loaded (`dsnet.core.checkpoint_files`).
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from dsnet.core import checkpoint_files as stored
from dsnet.core.files import cannot_write, flush, write_text
from dsnet.core.formats import CHECKPOINT
from dsnet.core.schema import check, read_json
from dsnet.errors import DsnetError, DsnetWarning, printable, shorten
from dsnet.gate import HeadForm
from dsnet.models import Supernet, create_model, list_models
from dsnet.routes import RouteSpace

__all__ = [
    "Checkpoint",
    "check_tensors",
    "default_name",
    "load_checkpoint",
    "load_classifier",
    "load_model",
    "optimizer_tensors",
    "restore_optimizer",
    "save_checkpoint",
]

FORMAT = 1
LARGE = 2**16  # an option above this could take all memory
BROKEN = (
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    RuntimeError,
    MemoryError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What was saved: groups of tensors by name, and plain data."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    data: Mapping[str, Any]

    def model(self) -> Supernet:
        """The network, built anew with the saved weights, statistics and routing heads; in eval mode."""
        try:
            return self._model()
        except BROKEN as error:
            if isinstance(error, DsnetError):
                raise
            reason = f"{type(error).__name__}: {printable(str(error), 1000)}"
            raise DsnetError(f"the checkpoint's network cannot be built: {reason}") from error

    def _model(self) -> Supernet:
        options = self.data["network"]["options"]
        if any(type(value) is int and value > LARGE for value in options.values()):
            self._check_shapes(self._built("meta"))
        model = self._built(None)
        model.load_state_dict(dict(self.tensors["model"]))
        check_finite(self.tensors["model"])
        return model

    def _built(self, device: str | None) -> Supernet:
        """The network with its routing heads, without the saved weights."""
        saved = self.data["network"]
        _check_known(saved["name"])
        model: Supernet = create_model(saved["name"], device=device, **saved["options"])
        space = RouteSpace.from_dict(saved["space"])
        if space != model.space:
            raise DsnetError(f"the checkpoint's {saved['name']} has other routes than this version builds")
        forms = saved.get("heads") or [None] * len(saved["gates"])
        if not len(model.gates) == len(saved["gates"]) == len(forms):
            raise DsnetError(
                f"the checkpoint has choices for {len(saved['gates'])} gates and {len(forms)} heads, "
                f"expected {len(model.gates)} of each"
            )
        for stage, (choices, form) in enumerate(zip(saved["gates"], forms, strict=True)):
            strange = sorted(set(choices) - set(space.choices[stage]))
            if strange:
                raise DsnetError(f"gate {stage} of the checkpoint has choices that there are not: {strange}")
            model.gate(stage).replace_routing(tuple(choices), form=None if form is None else HeadForm(**form))
        return model

    def _check_shapes(self, model: Supernet) -> None:
        """Raises where a network is much larger than its weights, before memory is taken for it."""
        own = self.tensors["model"]
        for key, value in model.state_dict().items():
            if key not in own or own[key].shape != value.shape:
                has = "no such tensor" if key not in own else f"shape {list(own[key].shape)}"
                raise DsnetError(
                    f"the checkpoint's options do not fit its weights: {key} would have shape "
                    f"{list(value.shape)}, the file has {has}"
                )


def _check_known(name: str) -> None:
    """Raises where nobody has registered the network of a checkpoint."""
    if name not in list_models():
        raise DsnetError(
            f"the checkpoint's network {shorten(name)} is not a registered model; one of your own must be "
            "imported before it is loaded (on the command line: --import MODULE)"
        )


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise where weights or statistics hold NaN or infinite values, which every answer would then be."""
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            bad = int((~torch.isfinite(value)).sum())
            raise DsnetError(
                f"the checkpoint's weights are not finite: {bad} of {value.numel()} values of "
                f"{printable(name, 120)} are NaN or infinite. Its training diverged, or the file is damaged: "
                "use another checkpoint of the run, or train again with a lower learning rate"
            )


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

    A group ``model`` among the tensors stands in for the network's own state. Of ``last`` the checkpoint
    before this one is kept, and a whole one of a later step is never replaced.
    """
    stored.check_name(name)
    groups = {"model": model.state_dict(), **(tensors or {})}
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
    check_plain(plain, f"checkpoint {name!r}")
    try:
        text = json.dumps(plain, indent=2)
    except (TypeError, ValueError) as error:
        raise DsnetError(f"the data of checkpoint {name!r} cannot be written as JSON: {error}") from error
    if name == "last":
        _check_not_older(folder, step)
    before, final = stored.named_by(folder, name), stored.new_folder(folder, name, step)
    started = folder / f".{final.name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(started, ignore_errors=True)
        started.mkdir()
        for group, values in groups.items():
            contiguous = {key: value.contiguous() for key, value in values.items()}
            save_file(contiguous, started / f"{group}.safetensors")
        (started / "checkpoint.json").write_text(text, encoding="utf-8")
        stored.write_sums(started)
        for path in (*started.iterdir(), started):
            flush(path)
        started.rename(final)
    except (OSError, SafetensorError) as error:
        kept = "nothing was saved under that name before" if before is None else f"{before.name} is kept"
        raise DsnetError(f"{cannot_write(final, error)}; {kept}") from error
    finally:  # of whatever stopped it, nothing is left
        shutil.rmtree(started, ignore_errors=True)
    try:
        write_text(folder / name, final.name + "\n")
    except DsnetError:
        shutil.rmtree(final, ignore_errors=True)
        raise
    stored.prune(folder, name, final, before)
    return final


def _check_not_older(folder: Path, step: int) -> None:
    """Raises where ``last`` is a whole checkpoint of a later step."""
    current = stored.named_by(folder, "last")
    if current is None or stored.step_of(current, "last") <= step:
        return
    try:
        _load(current)
    except stored.DamagedCheckpointError:
        return
    raise DsnetError(
        f"{folder} has a later checkpoint, {current.name}: step {step} does not replace it; save under "
        f"another name or in another folder, or remove {folder / 'last'} and {current.name} first"
    )


def default_name(folder: Path) -> str:
    """The checkpoint that is meant where none is named: ``gated``, else ``final``, else ``last``."""
    return next((name for name in ("gated", "final") if (folder / name).is_file()), "last")


def load_checkpoint(path: Path, name: str | None = None) -> Checkpoint:
    """A checkpoint from its own folder, or the named one of a run's (see `default_name`).

    Every file is compared with its SHA-256. Where a run's checkpoint is damaged and an earlier one of that
    name was kept, as of ``last``, that one is loaded, with a warning.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise DsnetError(f"{path} {what}: expected the folder of a run, as `dsnet train` makes it")
    if (path / "checkpoint.json").exists():
        return _load(path)
    name = name or default_name(path)
    folder = stored.locate(path, name)
    for _ in range(stored.TRIES):
        try:
            return _load(folder)
        except stored.DamagedCheckpointError as error:
            damage = error
        now = stored.locate(path, name)
        if now == folder:
            break
        folder = now  # another process saved meanwhile, and the one that was named before is gone
    for other in stored.stored(path, name):
        if other == folder:
            continue
        try:
            saved = _load(other)
        except stored.DamagedCheckpointError:
            continue
        text = f"{damage}; {other.name} is loaded instead, of step {saved.data['step']}"
        warnings.warn(text, DsnetWarning, stacklevel=2)
        return saved
    raise damage


def _load(folder: Path) -> Checkpoint:
    """Reads a checkpoint's folder, every file checked."""
    hashed = stored.check_sums(folder)
    data = _read_plain(folder)
    files = {group: f"{group}.safetensors" for group in data["groups"]}
    lacking = sorted(set(files.values()) - hashed) if hashed else []
    if lacking or "model" not in files:
        why = f"{stored.SUMS} has no {lacking[0]}" if lacking else "its groups lack 'model'"
        raise stored.DamagedCheckpointError(f"{folder} is no whole checkpoint: {why}")
    tensors = {}
    for group, file in files.items():
        try:
            if not (folder / file).is_file():
                raise FileNotFoundError(f"there is no file {file}")
            tensors[group] = load_file(folder / file)
        except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:  # torch opens it too
            raise stored.DamagedCheckpointError(
                f"{folder} is no whole checkpoint: {file}: {printable(str(error), 200)}"
            ) from error
    return Checkpoint(tensors=tensors, data=data)


def _read_plain(folder: Path) -> dict[str, Any]:
    """The content of checkpoint.json, checked."""
    try:
        data = read_json(folder / "checkpoint.json")
    except DsnetError as error:
        raise stored.DamagedCheckpointError(f"{folder} is no whole checkpoint: {error}") from error
    given = data.get("format") if isinstance(data, dict) else None
    if type(given) is int and given != FORMAT:
        raise DsnetError(f"{folder} has checkpoint format {shorten(given)}; this version reads {FORMAT}")
    try:
        check_plain(data, folder / "checkpoint.json")
    except DsnetError as error:
        raise stored.DamagedCheckpointError(f"{folder} is no whole checkpoint: {error}") from error
    checked: dict[str, Any] = data
    return checked


def check_plain(data: Any, where: str | Path) -> None:  # noqa: ANN401  (plain data)
    """Raises where the plain data of a checkpoint is not what this version can use."""
    check(CHECKPOINT, data, where)
    known = data.get("input")
    if known is not None and len(known["mean"]) != len(known["std"]):
        raise DsnetError(
            f"{where}: input.std has {len(known['std'])} values, expected {len(known['mean'])} as input.mean"
        )
    options = data["network"]["options"]
    reserved = sorted({"name", "device", "dtype", "generator"} & set(options))
    if reserved:
        raise DsnetError(f"{where}: network.options.{reserved[0]} is not an option of a network")


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


def restore_optimizer(
    optimizer: Optimizer, tensors: Mapping[str, Tensor], unused: Iterable[Tensor] = ()
) -> None:
    """Puts the state of `optimizer_tensors` into an optimiser over the same parameters.

    Every parameter must have its state, as after a step in which all took part; those that are ``unused`` may
    have none. A tensor that is missing, left over or of another shape is an error.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    idle = {id(parameter) for parameter in unused}
    expected: dict[str, tuple[int, ...]] = {}
    for index, parameter in enumerate(parameters):
        names = {f"{index}.{key}": shape for key, shape in _state_shapes(optimizer, parameter).items()}
        if id(parameter) in idle and not names.keys() & tensors.keys():
            continue
        expected |= names
    check_tensors("optimizer", tensors, expected)
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index_of, key = name.split(".", 1)
        state.setdefault(int(index_of), {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _state_shapes(optimizer: Optimizer, parameter: Tensor) -> dict[str, tuple[int, ...]]:
    """What an optimiser keeps for a parameter, by name."""
    shape = tuple(parameter.shape)
    if isinstance(optimizer, SGD):
        return {"momentum_buffer": shape} if optimizer.defaults["momentum"] else {}
    if isinstance(optimizer, AdamW):
        return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
    raise DsnetError(f"the state of {type(optimizer).__name__} cannot be restored; possible: SGD, AdamW")


def check_tensors(group: str, given: Mapping[str, Tensor], expected: Mapping[str, Sequence[int]]) -> None:
    """Raises where a group of saved tensors lacks one, has one too many, or one has another shape."""
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
            raise DsnetError(f"the checkpoint's group {group!r} has a tensor too many: {shorten(name)}")
